"""Classes of ours that extend the wheel's: is nothing abstract left, does every hook exist, is it called as it can be.

A hook that a version lacks, or never calls, must be asked for somewhere (`compat.py`): else it is a typing error or a
hope.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from tests.contract.asking import Asker
from tests.contract.expressions import OwnClass
from tests.contract.facts import near
from tests.contract.findings import Hook
from tests.contract.origins import OURS, Origin
from tests.contract.signature import Shape, Signature
from tests.contract.source import Function
from tests.contract.things import Thing


def check_class(node: ast.ClassDef, own: OwnClass, asker: Asker, probed: frozenset[str]) -> None:
    """A subclass, against each base of the wheel."""
    methods = {method.name: method for method in node.body if isinstance(method, Function)}
    for base in own.bases:
        row = asker.ask(node.lineno, "class", base.name)
        if row.get("is") in ("missing", "unrecorded"):
            continue
        for name in row.get("abstract", []):
            if name not in methods:
                asker.find(node.lineno, f"{node.name} lacks the abstract method {name!r} of {base.name}")
        names = set(row.get("names", "").split())
        for name, method in methods.items():
            _check_method(method, name, base, names, asker, probed)
        for name in sorted((own.names - set(methods)) & names):
            if name.startswith("_"):
                line = _line_of(node, name)
                asker.find(line, f"{node.name} assigns {name!r}, which {base.name} keeps for itself")


def check_stand_in(node: ast.ClassDef, stand_in: Origin, asker: Asker) -> None:
    """A Protocol of ours: whatever it names, the class that it stands for must have."""
    asker.seen.followed.add((stand_in.path, stand_in.where, stand_in.name))
    thing = Thing("instance", stand_in.type)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            asker.member(statement.lineno, thing, statement.target.id)
        elif isinstance(statement, Function):
            asker.member(statement.lineno, thing, statement.name)


def check_other_callers(hooks: Iterable[Hook], trees: Mapping[str, ast.Module], asker: Asker) -> None:
    """Hooks that a second package calls, too: a platform's own workers and schedulers."""
    for hook in sorted(set(hooks)):
        asker.path = hook.path
        for method in ast.walk(trees[hook.path]):
            if isinstance(method, Function) and (method.name, method.lineno) == (hook.method, hook.line):
                base = Thing("class", hook.owner)
                if _check_calls(method, base, Signature.of(method.args).bound(), asker):
                    asker.use(method.lineno, "hook", f"{hook.owner}:{hook.method}")
                    _note(method, base, hook.defined, asker)


def _check_method(
    method: Function, name: str, base: Thing, names: set[str], asker: Asker, probed: frozenset[str]
) -> None:
    ours = name in OURS.get(asker.path, ())
    mine = Signature.of(method.args).bound()
    if name not in names:
        if not name.startswith("_") and not ours and name not in probed:
            meant = near(name, names)
            hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
            asker.find(method.lineno, f"{name!r} is no method of {base.name}{hint}")
        if name in probed:
            _note(method, base, False, asker)
        return
    if ours:
        asker.find(method.lineno, f"{base.name} has a {name!r} of its own, which this would replace")
        return
    if name == "__init__":
        _check_calls(method, base, mine, asker)
        return
    if name.startswith("_"):
        asker.find(method.lineno, f"{base.name} has a private {name!r}, which this would replace")
        return
    row = asker.ask(method.lineno, "member", f"{base.name}:{name}")
    asker.use(method.lineno, "hook", f"{base.name}:{name}")
    if row.get("text") and row.get("is") in ("method", "classmethod"):
        reason = mine.cannot_replace(Signature.parse(row["text"]).bound())
        if reason is not None:
            asker.find(method.lineno, f"{name} {reason}, but {base.name} declares {row['text']}")
    calls = _check_calls(method, base, mine, asker)
    if not calls and name not in probed:
        asker.find(method.lineno, f"{name!r} of {base.name} is never called, and nothing here asks whether it is")
    _note(method, base, True, asker)


def _check_calls(method: Function, base: Thing, mine: Signature, asker: Asker) -> int:
    """How often it is called."""
    row = asker.ask(method.lineno, "hook", f"{base.name}:{method.name}")
    for call in row.get("calls", []):
        reason = mine.refuses(Shape.parse(call["shape"]))
        if reason is not None:
            asker.find(method.lineno, f"{method.name} {reason}, as {call['at']} calls it")
    return sum(call["count"] for call in row.get("calls", []))


def _note(method: Function, base: Thing, defined: bool, asker: Asker) -> None:
    calls = asker.ask(method.lineno, "hook", f"{base.name}:{method.name}").get("calls", [])
    count = sum(call["count"] for call in calls)
    at = calls[0]["at"] if calls else ""
    asker.seen.hooks.append(Hook(asker.path, method.lineno, base.name, method.name, defined, count, at))


def _line_of(node: ast.ClassDef, name: str) -> int:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store):
            return part.lineno
    return node.lineno
