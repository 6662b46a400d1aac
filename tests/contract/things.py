"""What a value of our code may be, as far as the contract follows it: parts of a wheel, by their canonical names.

A value is a tuple of things, one for each alternative; the empty tuple is a value of which nothing is known. Pure.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

Kind = Literal["instance", "class", "module", "callable", "generic", "super", "ours"]

_SEQUENCES = {"list", "Sequence", "Iterable", "Iterator", "set", "frozenset", "deque", "Collection", "Set", "List"}
_MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "Dict"}


@dataclass(frozen=True)
class Thing:
    """`name`: canonical, or what to call it in a message. `text`: the type of a generic, a callable's signature."""

    kind: Kind
    name: str
    text: str = ""


Value = tuple[Thing, ...]
UNKNOWN: Value = ()


def of_type(text: str, package: str) -> Value:
    """A value whose type is written so (names canonical); parts that are not the package's are not known."""
    if text.startswith("module "):
        return (Thing("module", text.removeprefix("module ")),)
    if not text:
        return UNKNOWN
    try:
        return tuple(dict.fromkeys(_things(ast.parse(text, mode="eval").body, package)))
    except SyntaxError:
        return UNKNOWN


def elements(value: Value, package: str, *, values: bool = False) -> Value:
    """What iterating over the value gives, or, with `values`, what a subscript gives."""
    found: list[Thing] = []
    for thing in value:
        if thing.kind != "generic":
            continue
        node = ast.parse(thing.text, mode="eval").body
        assert isinstance(node, ast.Subscript)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        head = ast.unparse(node.value).split(".")[-1]
        if head in _SEQUENCES or (head.lower() == "tuple" and len(parts) == 2 and ast.unparse(parts[1]) == "..."):
            found += _things(parts[0], package)
        elif head in _MAPPINGS and len(parts) == 2:
            found += _things(parts[1 if values else 0], package)
    return tuple(dict.fromkeys(found))


def literals(text: str) -> list[str] | None:
    """The strings that a `Literal[…]` (or a union with some) allows; None for any other type."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    sides = _sides(node)
    named = [side for side in sides if isinstance(side, ast.Subscript) and _head(side) == "Literal"]
    plain = [side for side in sides if side not in named and ast.unparse(side) != "None"]
    if not named or plain:
        return None
    constants = (part.value for side in named for part in ast.walk(side.slice) if isinstance(part, ast.Constant))
    return [word for word in constants if isinstance(word, str)]


def _things(node: ast.expr, package: str) -> list[Thing]:
    found = []
    for side in _sides(node):
        text = ast.unparse(side)
        if isinstance(side, ast.Subscript):
            head = _head(side)
            if head in ("type", "Type"):
                inner = _things(side.slice, package)
                found += [Thing("class", one.name) for one in inner if one.kind == "instance"]
            elif head in ("Optional", "ClassVar", "Final", "Required"):
                found += _things(side.slice, package)
            elif package + "." in text:
                found.append(Thing("generic", text, text))
        elif text.startswith(package + "."):
            found.append(Thing("instance", text))
    return found


def _sides(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_sides(node.left), *_sides(node.right)]
    if isinstance(node, ast.Subscript) and _head(node) == "Union" and isinstance(node.slice, ast.Tuple):
        return [side for part in node.slice.elts for side in _sides(part)]
    return [node]


def _head(node: ast.Subscript) -> str:
    return ast.unparse(node.value).split(".")[-1]
