"""The classes of a wheel: their members, inherited ones included, with types and signatures as text.

A type's text is a Python expression whose names are canonical: `list[vllm.multimodal.inputs.MultiModalFeatureSpec]`.
Where a type cannot be told it is empty; a class some base of which lies outside the wheel is `open`: what it lacks it
may inherit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.contract.signature import text_of
from tests.contract.source import Found, Function, Module, WheelSource

# Bases that bring no members of interest.
_PLAIN = {"ABC", "abc.ABC", "object", "Protocol", "Generic", "Enum", "enum.Enum", "IntEnum", "enum.IntEnum"}
_DEPTH = 6


@dataclass(frozen=True)
class Member:
    """`kind`: method, classmethod, staticmethod, property, field or class. `text`: a signature, or a type."""

    name: str
    kind: str
    text: str
    owner: str
    abstract: bool = False


@dataclass(frozen=True)
class ClassFacts:
    """`lineage`: canonical names, nearest first, of those in the wheel."""

    lineage: tuple[str, ...]
    members: dict[str, Member]
    open: bool


class Classes:
    """Reads classes of one wheel; remembers them."""

    def __init__(self, source: WheelSource) -> None:
        self._source = source
        self._facts: dict[str, ClassFacts] = {}

    def facts(self, found: Found) -> ClassFacts:
        """Of a class definition."""
        if found.name not in self._facts:
            assert isinstance(found.node, ast.ClassDef)
            self._facts[found.name] = ClassFacts((found.name,), {}, True)  # what a circular reference sees
            self._facts[found.name] = self._read(found, found.node)
        return self._facts[found.name]

    def type_of(self, annotation: ast.expr | None, module: Module) -> str:
        """The text of an annotation in a module."""
        if annotation is None:
            return ""
        return ast.unparse(_Qualified(self._source, module).visit(_copy(annotation)))

    def signature(self, node: Function, module: Module) -> str:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        notes = [(argument.arg, self.type_of(argument.annotation, module)) for argument in every]
        return text_of(node.args, self.type_of(node.returns, module), notes)

    def request_fields(self, found: Found) -> dict[str, str]:
        """Of a model that is validated from JSON: its fields and their types, inherited ones first.

        A field is annotated, public and no class variable; where it has an alias, that is its name.
        """
        fields: dict[str, str] = {}
        for owner in reversed(self.facts(found).lineage):
            there = self._source.find(owner)
            assert there is not None and isinstance(there.node, ast.ClassDef), "a lineage is of classes"
            for statement in _statements(there.node.body):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    name, text = statement.target.id, self.type_of(statement.annotation, there.module)
                    if not name.startswith("_") and "ClassVar" not in text:
                        fields[_alias(statement.value) or name] = text
        return fields

    def _read(self, found: Found, node: ast.ClassDef) -> ClassFacts:
        members = {member.name: member for member in reversed(list(self._own(found, node)))}
        lineage, is_open = [found.name], False
        for base in node.bases:
            text = ast.unparse(base)
            if text.partition("[")[0] in _PLAIN:
                continue
            parent = self._resolve(base, found.module)
            if parent is None or not isinstance(parent.node, ast.ClassDef):
                is_open = True
                continue
            facts = self.facts(parent)
            lineage += [name for name in facts.lineage if name not in lineage]
            members = facts.members | members if facts.lineage[0] != found.name else members
            is_open = is_open or facts.open
        return ClassFacts(tuple(lineage), members, is_open)

    def _resolve(self, node: ast.expr, module: Module) -> Found | None:
        text = ast.unparse(node).partition("[")[0]
        bound = module.bindings.get(text.split(".")[0])
        if isinstance(bound, str):
            return self._source.find(".".join([bound, *text.split(".")[1:]]))
        return self._source.find(f"{module.name}.{text}") if bound is not None else None

    def _own(self, found: Found, node: ast.ClassDef) -> Iterator[Member]:
        owner, module = found.name, found.module
        for statement in _statements(node.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield Member(statement.target.id, "field", self.type_of(statement.annotation, module), owner)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        yield Member(target.id, "field", self._type_of_value(statement.value, found, {}, 0), owner)
            elif isinstance(statement, ast.ClassDef):
                yield Member(statement.name, "class", f"{owner}.{statement.name}", owner)
            elif isinstance(statement, Function):
                yield self._method(statement, found)
        for statement in node.body:
            if isinstance(statement, Function):
                yield from self._assigned(statement, found)

    def _method(self, node: Function, found: Found) -> Member:
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        abstract = "abstractmethod" in marks
        if marks & {"property", "cached_property"} or "setter" in marks:
            return Member(node.name, "property", self.type_of(node.returns, found.module), found.name, abstract)
        kind = next((mark for mark in ("classmethod", "staticmethod") if mark in marks), "method")
        return Member(node.name, kind, self.signature(node, found.module), found.name, abstract)

    def _assigned(self, method: Function, found: Found) -> Iterator[Member]:
        """`self.x = …` in a method."""
        every = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
        types = {argument.arg: self.type_of(argument.annotation, found.module) for argument in every}
        for node in ast.walk(method):
            if isinstance(node, ast.AnnAssign) and (name := _of_self(node.target)):
                yield Member(name, "field", self.type_of(node.annotation, found.module), found.name)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for place in target.elts if isinstance(target, ast.Tuple) else (target,):
                        if name := _of_self(place):
                            value = self._type_of_value(node.value, found, types, 0) if place is target else ""
                            yield Member(name, "field", value, found.name)

    def _type_of_value(self, value: ast.expr, found: Found, types: dict[str, str], depth: int) -> str:
        """What an assigned expression is, where that is evident."""
        if depth > _DEPTH:
            return ""
        match value:
            case ast.Name():
                return types.get(value.id, "")
            case ast.BoolOp():
                return self._type_of_value(value.values[0], found, types, depth + 1)
            case ast.IfExp():
                sides = (self._type_of_value(side, found, types, depth + 1) for side in (value.body, value.orelse))
                return " | ".join(dict.fromkeys(side for side in sides if side))
            case ast.Call():
                made = self._resolve(value.func, found.module)
                return made.name if made is not None and isinstance(made.node, ast.ClassDef) else ""
            case ast.Attribute():
                return self._member_type(self._type_of_value(value.value, found, types, depth + 1), value.attr)
        return ""

    def _member_type(self, owner: str, name: str) -> str:
        for part in owner.split(" | "):
            there = self._source.find(part) if "." in part and "[" not in part else None
            if there is not None and isinstance(there.node, ast.ClassDef):
                member = self.facts(there).members.get(name)
                return member.text if member is not None and member.kind in ("field", "property") else ""
        return ""


class _Qualified(ast.NodeTransformer):
    """Makes the names of an annotation canonical and puts type aliases in."""

    def __init__(self, source: WheelSource, module: Module, depth: int = 0) -> None:
        self._source, self._module, self._depth = source, module, depth

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._canonical(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self._canonical(node, ast.unparse(node))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        try:
            inner = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return node
        made = self.visit(inner)
        assert isinstance(made, ast.expr)
        return made

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        head = ast.unparse(node.value).split(".")[-1]
        if head == "Literal":  # its strings are values, its names aliases of more
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            node.slice = ast.Tuple([part if isinstance(part, ast.Constant) else self.visit(part) for part in inner])
            return node
        if head == "Annotated" and isinstance(node.slice, ast.Tuple):
            made = self.visit(node.slice.elts[0])
            assert isinstance(made, ast.expr)
            return made
        self.generic_visit(node)
        return node

    def _canonical(self, node: ast.expr, text: str) -> ast.expr:
        first, _, rest = text.partition(".")
        bound = self._module.bindings.get(first)
        if bound is None:
            return node
        dotted = bound if isinstance(bound, str) else f"{self._module.name}.{first}"
        there = self._source.find(f"{dotted}.{rest}" if rest else dotted)
        if there is None:
            return node
        if isinstance(there.node, ast.Assign | ast.AnnAssign):
            value = there.node.value
            if isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute) and self._depth < _DEPTH:
                made = _Qualified(self._source, there.module, self._depth + 1).visit(_copy(value))
                assert isinstance(made, ast.expr)
                return made
            return node
        return ast.parse(there.name, mode="eval").body


def _alias(value: ast.expr | None) -> str:
    """Of `Field(alias="…")`."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    found = [word.value for word in keywords if word.arg == "alias"]
    return str(found[0].value) if found and isinstance(found[0], ast.Constant) else ""


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _of_self(node: ast.expr) -> str:
    is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_self and isinstance(node, ast.Attribute) else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
