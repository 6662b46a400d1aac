"""Follows the values of our code through expressions: what of the wheel each may be, as far as types tell.

Every attribute of a part of the wheel and every call of one is asked for (`asking.py`) as it is met.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.contract.asking import Asker
from tests.contract.origins import GRAFTED, ORIGINS
from tests.contract.signature import Shape
from tests.contract.things import UNKNOWN, Thing, Value, elements, of_type

_SAME = {"list", "tuple", "set", "sorted", "reversed", "iter", "copy", "deepcopy", "frozenset"}
_FEWER = {"next", "min", "max"}
_VALUES = {"values", "items", "get", "pop", "setdefault", "popleft", "popitem", "copy"}


@dataclass
class OwnClass:
    """A class of ours: `bases` of the wheel, names it defines, and what its attributes hold."""

    name: str
    bases: list[Thing] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass
class Scope:
    """Names at some place, inner ones first."""

    names: dict[str, Value] = field(default_factory=dict)
    parent: Scope | None = None
    owner: OwnClass | None = None

    def get(self, name: str) -> Value:
        if name in self.names:
            return self.names[name]
        return self.parent.get(name) if self.parent is not None else UNKNOWN

    def self_of(self) -> OwnClass | None:
        return self.owner or (self.parent.self_of() if self.parent is not None else None)


class Expressions:
    """Of one file."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self._origins = {(row.where, row.name): row.type for row in ORIGINS if row.path == asker.path}
        self._by_type: dict[type[ast.expr], Callable[[ast.expr, Scope], Value]] = {
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.Subscript: self._subscript,
            ast.BoolOp: self._bool_op,
            ast.IfExp: self._if_exp,
            ast.NamedExpr: self._named,
            ast.Compare: self._compare,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.Lambda: self._lambda,
        }

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """What the expression may be; all that it uses is noted."""
        known = self._by_type.get(type(node))
        if known is not None:
            return known(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
        return UNKNOWN

    def annotation(self, node: ast.expr | None, scope: Scope) -> Value:
        """What a parameter or variable with this annotation holds."""
        if node is None:
            return UNKNOWN
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if not any(isinstance(part, ast.Name) and scope.get(part.id) for part in ast.walk(node)):
            return UNKNOWN
        return of_type(ast.unparse(_Canonical(scope).visit(ast.parse(ast.unparse(node), mode="eval").body)),
                       self.asker.package)  # fmt: skip

    def origin(self, name: str) -> Value:
        """By the table of origins, for a name in the function that is being read."""
        where = ".".join(self.asker.where)
        found = of_type(self._origins.get((where, name), ""), self.asker.package)
        if not found or not self._answers(found):
            return UNKNOWN
        self.asker.seen.followed.add((self.asker.path, where, name))
        return found

    def bind(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """An assignment."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = self.origin(target.id) or value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part.value if isinstance(part, ast.Starred) else part, UNKNOWN, scope)
        elif isinstance(target, ast.Attribute):
            owner = scope.self_of()
            if owner is not None and isinstance(target.value, ast.Name) and target.value.id == "self":
                value = self.origin(f"self.{target.attr}") or value
                there = owner.attributes.get(target.attr, UNKNOWN)
                owner.attributes[target.attr] = tuple(dict.fromkeys((*there, *value)))
                owner.names.add(target.attr)
            else:
                self.value(target, scope)
        else:
            self.value(target, scope)

    def _answers(self, found: Value) -> bool:
        return all(self.asker.is_ours_to_ask(thing.name) for thing in found)

    def _name(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Name)
        return scope.get(node.id)

    def _attribute(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Attribute)
        grafted = GRAFTED.get(ast.unparse(node)) if isinstance(node.value, ast.Name) else None
        if grafted is not None and self.asker.is_ours_to_ask(grafted):
            return self.asker.symbol(node.lineno, grafted, "attribute")
        if self._origins and (known := self.origin(ast.unparse(node))):
            return known
        if isinstance(node.value, ast.Name) and node.value.id == "self" and (owner := scope.self_of()) is not None:
            if node.attr in owner.names or not owner.bases:
                return owner.attributes.get(node.attr, UNKNOWN)
            return self._of_all(node, [Thing("instance", base.name) for base in owner.bases])
        return self._of_all(node, self.value(node.value, scope))

    def _of_all(self, node: ast.Attribute, things: Value | list[Thing]) -> Value:
        found: list[Thing] = []
        for thing in things:
            found += self.asker.member(node.lineno, thing, node.attr)
        return tuple(dict.fromkeys(found))

    def _call(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Call)
        arguments = [self.value(argument, scope) for argument in node.args]
        for keyword in node.keywords:
            self.value(keyword.value, scope)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and name in ("getattr", "hasattr") and len(node.args) > 1:
            return self._by_word(node, name, arguments[0])
        if name == "super" and not node.args:
            owner = scope.self_of()
            return tuple(Thing("super", base.name) for base in owner.bases) if owner is not None else UNKNOWN
        if name in _SAME and len(arguments) == 1:
            return arguments[0]
        if name in _FEWER and arguments:
            return elements(arguments[0], self.asker.package)
        if isinstance(node.func, ast.Attribute) and name in _VALUES:
            held = self.value(node.func.value, scope)
            if held and all(thing.kind == "generic" for thing in held):
                inner = elements(held, self.asker.package, values=True)
                text = " | ".join(thing.text or thing.name for thing in inner)
                return of_type(f"list[{text}]", self.asker.package) if name in ("values", "items") and inner else inner
        found: list[Thing] = []
        for thing in self.value(node.func, scope):
            found += self.asker.call(node.lineno, thing, Shape.of(node))
        return tuple(dict.fromkeys(found))

    def _by_word(self, node: ast.Call, name: str, owner: Value) -> Value:
        """`getattr(x, "name", default)` and `hasattr(x, "name")`."""
        word = node.args[1]
        found: list[Thing] = []
        for thing in owner:
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                optional = name == "hasattr" or len(node.args) > 2
                found += self.asker.member(node.lineno, thing, word.value, optional=optional)
        return tuple(dict.fromkeys(found)) if name == "getattr" else UNKNOWN

    def _subscript(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Subscript)
        self.value(node.slice, scope)
        held = self.value(node.value, scope)
        return held if isinstance(node.slice, ast.Slice) else elements(held, self.asker.package, values=True)

    def _bool_op(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.BoolOp)
        return tuple(dict.fromkeys(thing for side in node.values for thing in self.value(side, scope)))

    def _if_exp(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.IfExp)
        self.value(node.test, scope)
        return tuple(dict.fromkeys((*self.value(node.body, scope), *self.value(node.orelse, scope))))

    def _named(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.NamedExpr)
        value = self.value(node.value, scope)
        self.bind(node.target, value, scope)
        return value

    def _compare(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators):
            self.value(side, scope)
        return UNKNOWN

    def _comprehension(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp)
        inner = Scope(parent=scope)
        for generator in node.generators:
            self.bind(generator.target, elements(self.value(generator.iter, inner), self.asker.package), inner)
            for test in generator.ifs:
                self.value(test, inner)
        if isinstance(node, ast.DictComp):
            self.value(node.key, inner)
            self.value(node.value, inner)
            return UNKNOWN
        made = self.value(node.elt, inner)
        text = " | ".join(thing.text or thing.name for thing in made if thing.kind in ("instance", "generic"))
        return of_type(f"list[{text}]", self.asker.package) if text else UNKNOWN

    def _lambda(self, node: ast.expr, scope: Scope) -> Value:
        assert isinstance(node, ast.Lambda)
        names = {argument.arg: UNKNOWN for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        self.value(node.body, Scope(names, scope))
        return UNKNOWN


class _Canonical(ast.NodeTransformer):
    """Puts canonical names in place of what a file imported them as."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def visit_Name(self, node: ast.Name) -> ast.expr:
        for thing in self._scope.get(node.id):
            if thing.kind == "class":
                return ast.parse(thing.name, mode="eval").body
        return node
