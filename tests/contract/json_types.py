"""The JSON types that an annotation lets pass, null aside. Pure.

As letters: `o` an object, `l` a list, `L` a list of objects, `s` a string, `n` a number or a boolean. pydantic takes
strings for numbers, too. An annotation that says nothing about lists and objects has none: pydantic's own word on it
comes before anything else of vLLM's has read the value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

_NAMES = {
    "str": "s",
    "bytes": "s",
    "int": "ns",
    "float": "ns",
    "bool": "ns",
    "dict": "o",
    "Mapping": "o",
    "list": "l",
    "Iterable": "l",
    "Sequence": "l",
    "tuple": "l",
    "set": "l",
}
_UNIONS = {"Optional", "Union"}
_WRAPPERS = {"Annotated", "Required", "NotRequired"}


def json_types(annotation: str, is_object: Callable[[str], bool]) -> str:
    """Returns the letters, sorted, "" where anything may pass.

    Args:
        is_object: whether a dotted name is a class that is made from an object.
    """
    found = _types(ast.parse(annotation, mode="eval").body, is_object)
    return "".join(sorted(found)) if found and found & set("lLo") else ""


def _types(node: ast.expr, is_object: Callable[[str], bool]) -> set[str] | None:
    """None: anything."""
    match node:
        case ast.Constant(value=None):
            return set()
        case ast.Constant(value=str(text)):
            return _types(ast.parse(text, mode="eval").body, is_object)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right], is_object)
        case ast.Subscript(value=base, slice=inner):
            return _subscript(ast.unparse(base).rpartition(".")[2], _parts(inner), is_object)
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            if name in _NAMES:
                return set(_NAMES[name])
            return {"o"} if is_object(name) else None
    return None


def _subscript(base: str, inner: list[ast.expr], is_object: Callable[[str], bool]) -> set[str] | None:
    if base == "Literal":
        values = [one.value for one in inner if isinstance(one, ast.Constant) and one.value is not None]
        return {"s" if isinstance(value, str) else "n" for value in values}
    if base in _UNIONS:
        return _union(inner, is_object)
    if base in _WRAPPERS:
        return _types(inner[0], is_object)
    if _NAMES.get(base) == "l":
        return {"L" if _union(inner, is_object) == {"o"} else "l"}
    return set(_NAMES[base]) if base in _NAMES else None


def _union(nodes: list[ast.expr], is_object: Callable[[str], bool]) -> set[str] | None:
    found: set[str] = set()
    for node in nodes:
        types = _types(node, is_object)
        if types is None:
            return None
        found |= types
    return found


def _parts(inner: ast.expr) -> list[ast.expr]:
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]
