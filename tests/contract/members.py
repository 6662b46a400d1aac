"""The classes of a wheel: their members, inherited ones included, with types and signatures as text.

A type's text is a Python expression whose names are canonical: `list[vllm.multimodal.inputs.MultiModalFeatureSpec]`.
Where a type cannot be told it is empty; a class some base of which lies outside the wheel is `open`: what it lacks it
may inherit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import griffe

from tests.contract.source import WheelSource

# Bases that bring no members of interest.
_PLAIN = {"ABC", "abc.ABC", "object", "Protocol", "Generic", "Enum", "enum.Enum", "IntEnum", "enum.IntEnum"}
_DEPTH = 6
_STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}

Expression = str | griffe.Expr | None


@dataclass(frozen=True)
class Member:
    """`kind`: method, classmethod, staticmethod, property, field or class. `text`: a signature, or a type."""

    name: str
    kind: str
    text: str = ""
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

    def facts(self, found: griffe.Class) -> ClassFacts:
        if found.path not in self._facts:
            self._facts[found.path] = ClassFacts((found.path,), {}, True)  # what a circular reference sees
            self._facts[found.path] = self._read(found)
        return self._facts[found.path]

    def type_of(self, node: Expression, depth: int = 0) -> str:
        """The text of an annotation: names canonical, type aliases put in."""
        match node:
            case griffe.ExprName() | griffe.ExprAttribute():
                there = self._source.find(node.canonical_path)
                if not isinstance(there, griffe.Attribute):
                    return there.path if there is not None else str(node)
                names_a_type = isinstance(there.value, griffe.ExprSubscript | griffe.ExprBinOp | griffe.ExprName)
                return self.type_of(there.value, depth + 1) if names_a_type and depth < _DEPTH else str(node)
            case griffe.ExprSubscript(slice=griffe.ExprTuple(elements=[first, *_])) if _last(node) == "Annotated":
                return self.type_of(first, depth)
            case griffe.Expr():
                return "".join(self.type_of(part, depth) for part in node.iterate(flat=False))
        return node or ""

    def signature(self, function: griffe.Function) -> str:
        """`(self, request: vllm.v1.request.Request, *, index: int=...) -> None`: each default as `...`."""
        parts: list[str] = []
        for parameter in function.parameters:
            only_by_name = parameter.kind is griffe.ParameterKind.keyword_only
            if only_by_name and not any(part.startswith("*") for part in parts):
                parts.append("*")
            if star := _STARS.get(parameter.kind or griffe.ParameterKind.positional_or_keyword, ""):
                parts.append(star + parameter.name)
                continue
            note = self.type_of(parameter.annotation)
            parts.append(parameter.name + (f": {note}" if note else "") + ("=..." if not parameter.required else ""))
        returns = self.type_of(function.returns)
        return f"({', '.join(parts)})" + (f" -> {returns}" if returns else "")

    def request_fields(self, found: griffe.Class) -> dict[str, str]:
        """Of a model that is validated from JSON: its fields and their types, inherited ones first.

        A field is annotated, public and no class variable; where it has an alias, that is its name.
        """
        fields: dict[str, str] = {}
        for name in reversed(self.facts(found).lineage):
            owner = self._source.find_class(name)
            assert owner is not None, "a lineage is of classes"
            for one in owner.attributes.values():
                if one.annotation is not None and "instance-attribute" in one.labels and not one.name.startswith("_"):
                    fields[_alias(one.value) or one.name] = self.type_of(one.annotation)
        return fields

    def _read(self, found: griffe.Class) -> ClassFacts:
        members: dict[str, Member] = {}
        lineage, is_open = [found.path], False
        for base in found.bases:
            if str(base).partition("[")[0] in _PLAIN:
                continue
            parent = self._source.find_class(_canonical(base).partition("[")[0])
            if parent is None:
                is_open = True
                continue
            facts = self.facts(parent)
            lineage += [name for name in facts.lineage if name not in lineage]
            members |= {name: member for name, member in facts.members.items() if name not in members}
            is_open = is_open or facts.open
        own = {name: self._member(one) for name, one in found.members.items() if isinstance(one, griffe.Object)}
        return ClassFacts(tuple(lineage), members | own, is_open)

    def _member(self, one: griffe.Object) -> Member:
        if isinstance(one, griffe.Function):
            kind = next((mark for mark in ("classmethod", "staticmethod") if mark in one.labels), "method")
            return Member(one.name, kind, self.signature(one), "abstractmethod" in one.labels)
        if isinstance(one, griffe.Attribute):
            if "property" in one.labels:
                return Member(one.name, "property", self.type_of(one.annotation), "abstractmethod" in one.labels)
            return Member(one.name, "field", self.type_of(one.annotation) or self._type_of_value(one.value))
        return Member(one.name, "class", one.path)

    def _type_of_value(self, value: Expression, depth: int = 0) -> str:
        """What an assigned expression is, where that is evident."""
        if depth > _DEPTH:
            return ""
        match value:
            case griffe.ExprName(parent=griffe.Function() as function) if value.name in function.parameters:
                return self.type_of(function.parameters[value.name].annotation)
            case griffe.ExprBoolOp():
                return self._type_of_value(value.values[0], depth + 1)
            case griffe.ExprIfExp():
                sides = (self._type_of_value(side, depth + 1) for side in (value.body, value.orelse))
                return " | ".join(dict.fromkeys(side for side in sides if side))
            case griffe.ExprCall():
                made = self._source.find_class(_canonical(value.function))
                return made.path if made is not None else ""
            case griffe.ExprAttribute(values=[first, *names]):
                return self._type_of_member(self._type_of_value(first, depth + 1), map(str, names))
        return ""

    def _type_of_member(self, owner: str, names: Iterable[str]) -> str:
        for name in names:
            found = next(filter(None, map(self._source.find_class, owner.split(" | "))), None)
            member = self.facts(found).members.get(name) if found is not None else None
            owner = member.text if member is not None and member.kind in ("field", "property") else ""
        return owner


def _canonical(node: Expression) -> str:
    return node.canonical_path if isinstance(node, griffe.Expr) else node or ""


def _last(node: griffe.ExprSubscript) -> str:
    return str(node.left).rpartition(".")[2]


def _alias(value: Expression) -> str:
    """Of `Field(alias="…")`."""
    words = value.arguments if isinstance(value, griffe.ExprCall) else []
    found = [word.value for word in words if isinstance(word, griffe.ExprKeyword) and word.name == "alias"]
    return str(found[0]).strip("'\"") if found else ""
