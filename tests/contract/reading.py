"""Reads one file of ours against one wheel: imports, functions and classes, statement by statement."""

from __future__ import annotations

import ast

from tests.contract.asking import Asker
from tests.contract.expressions import Expressions, OwnClass, Scope
from tests.contract.facts import Facts
from tests.contract.findings import Examined
from tests.contract.hooks import check_class, check_stand_in
from tests.contract.origins import GUARDED, STAND_INS
from tests.contract.source import Function, imported
from tests.contract.things import UNKNOWN, Thing, Value, elements
from tests.contract.words import check_words

_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError"}


def read(path: str, tree: ast.Module, facts: Facts, package: str, wheel: str, probed: frozenset[str]) -> Examined:
    """All that a file uses of the wheel's package, and what of it the wheel has not.

    Args:
        path: for messages and the table of origins.
        probed: hooks that some versions lack or never call, and that our code asks for before it counts on them.
    """
    asker = Asker(facts, package, path, Examined(wheel))
    reader = _Reader(asker, probed)
    reader.body(tree.body, Scope())
    reader.learning, asker.seen = False, Examined(wheel)  # what attributes hold is known after one pass
    reader.body(tree.body, Scope())
    check_words(tree, asker)
    return asker.seen


class _Reader:
    def __init__(self, asker: Asker, probed: frozenset[str]) -> None:
        self._asker = asker
        self._expressions = Expressions(asker)
        self._probed = probed
        self._classes: dict[str, OwnClass] = {}
        self.learning = True

    def body(self, statements: list[ast.stmt], scope: Scope) -> None:
        for node in statements:
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Assign():
                value = self._expressions.value(node.value, scope)
                for target in node.targets:
                    self._expressions.bind(target, value, scope)
            case ast.AnnAssign():
                value = self._expressions.value(node.value, scope) if node.value is not None else UNKNOWN
                declared = self._expressions.annotation(node.annotation, scope)
                self._expressions.bind(node.target, declared or value, scope)
            case ast.For() | ast.AsyncFor():
                held = self._expressions.value(node.iter, scope)
                self._expressions.bind(node.target, elements(held, self._asker.package), scope)
                self.body([*node.body, *node.orelse], scope)
            case ast.Assert():
                self._expressions.value(node.test, scope)
                self._narrow(node.test, scope)
            case ast.Try():
                self._try(node, scope)
            case ast.If():
                self._if(node, scope)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self._expressions.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._expressions.bind(item.optional_vars, value, scope)
                self.body(node.body, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expressions.value(child, scope)
                    elif isinstance(child, ast.stmt):
                        self._statement(child, scope)
                    elif isinstance(child, ast.match_case):
                        self.body(child.body, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for name, dotted in imported(node):
            if not self._asker.is_ours_to_ask(dotted):
                scope.names[name] = UNKNOWN
                continue
            value = self._asker.symbol(node.lineno, dotted)
            if isinstance(node, ast.Import) and not any(alias.asname for alias in node.names):
                for alias in node.names:
                    if alias.name != dotted and self._asker.is_ours_to_ask(alias.name):
                        self._asker.symbol(node.lineno, alias.name)
            scope.names[name] = value

    def _try(self, node: ast.Try, scope: Scope) -> None:
        handlers = [handler for handler in node.handlers if _IMPORT_ERRORS & _names(handler.type)]
        copes = any(not isinstance(handler.body[-1], ast.Raise) for handler in handlers)
        if copes:
            with self._asker.tolerating("ImportError is caught"):
                self.body(node.body, scope)
        else:
            self.body(node.body, scope)
        for handler in node.handlers:
            self.body(handler.body, scope)
        self.body([*node.orelse, *node.finalbody], scope)

    def _if(self, node: ast.If, scope: Scope) -> None:
        self._expressions.value(node.test, scope)
        names = [
            str(call.args[1].value)
            for call in ast.walk(node.test)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "hasattr"
            and isinstance(call.args[1], ast.Constant)
        ]
        self._asker.guarded += names
        self.body(node.body, scope)
        del self._asker.guarded[len(self._asker.guarded) - len(names) :]
        self.body(node.orelse, scope)

    def _narrow(self, test: ast.expr, scope: Scope) -> None:
        """`assert isinstance(x, C)`: from here on `x` is a `C`."""
        if isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance" and isinstance(test.args[0], ast.Name):
            held = self._expressions.value(test.args[1], scope)
            scope.names[test.args[0].id] = tuple(Thing("instance", one.name) for one in held if one.kind == "class")

    def _function(self, node: Function, scope: Scope) -> None:
        scope.names[node.name] = UNKNOWN
        with self._asker.inside(node.name):
            inner = Scope(parent=scope)
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for argument in every:
                known = self._expressions.origin(argument.arg)
                inner.names[argument.arg] = known or self._expressions.annotation(argument.annotation, scope)
            for default in (*arguments.defaults, *arguments.kw_defaults):
                if default is not None:
                    self._expressions.value(default, scope)
            reason = GUARDED.get((self._asker.path, node.name))
            if reason is None:
                self.body(node.body, inner)
            else:
                with self._asker.tolerating(reason):
                    self.body(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        stand_in = next((row for row in STAND_INS if (row.path, row.name) == (self._asker.path, node.name)), None)
        if stand_in is not None and self._asker.is_ours_to_ask(stand_in.type):
            check_stand_in(node, stand_in, self._asker)
            scope.names[node.name] = (Thing("class", stand_in.type),)
            return
        key = ".".join([*self._asker.where, node.name])
        own = self._classes.setdefault(key, OwnClass(node.name))
        own.bases = [thing for base in node.bases for thing in self._base(base, scope)]
        own.names |= {statement.name for statement in node.body if isinstance(statement, Function)}
        own.names |= {
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        with self._asker.inside(node.name):
            self.body(node.body, Scope(parent=scope, owner=own))
            if own.bases and not self.learning:
                check_class(node, own, self._asker, self._probed)
        scope.names[node.name] = UNKNOWN

    def _base(self, node: ast.expr, scope: Scope) -> Value:
        return tuple(thing for thing in self._expressions.value(node, scope) if thing.kind == "class")


def _names(node: ast.expr | None) -> set[str]:
    return set() if node is None else {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
