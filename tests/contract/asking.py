"""Questions about one wheel on behalf of one file of ours: each use is noted, what is not there becomes a finding.

Owns the wording of findings and what makes a missing thing harmless (`tolerant`); knows nothing of syntax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.contract.facts import Facts, Row
from tests.contract.findings import Examined, Finding, Probe, Use
from tests.contract.signature import Shape, Signature
from tests.contract.things import UNKNOWN, Thing, Value, of_type

_OF_EVERY_CLASS = {"__class__", "__dict__", "__doc__", "__module__", "__name__", "__qualname__"}


class NotRecordedError(LookupError):
    """The manifest has no answer: it was made before our code asked this."""


@dataclass
class Asker:
    """Of one file. `where`: the function that is being read; `tolerant`: why a missing thing is no finding there."""

    facts: Facts
    package: str
    path: str
    seen: Examined
    where: list[str] = field(default_factory=list)
    tolerant: list[str] = field(default_factory=list)
    guarded: list[str] = field(default_factory=list)  # names that were asked for with hasattr

    def ask(self, line: int, kind: str, name: str) -> Row:
        """The row; {"is": "missing"} with a finding where the manifest has none."""
        try:
            return self.facts.ask(kind, name)
        except NotRecordedError:
            self.find(line, f"{kind} {name} is not in the manifest; run `make npu-contract` and commit what it writes")
            return {"is": "unrecorded"}

    def find(self, line: int, message: str) -> None:
        self.seen.findings.append(Finding(self.path, line, self.seen.wheel, message))

    def use(self, line: int, kind: str, name: str) -> None:
        self.seen.uses.append(Use(self.path, line, kind, name))

    def probe(self, line: int, question: str, found: bool) -> None:
        self.seen.probes.append(Probe(self.path, line, ".".join(self.where), question, found))

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.where.append(name)
        try:
            yield
        finally:
            self.where.pop()

    @contextmanager
    def tolerating(self, why: str) -> Iterator[None]:
        self.tolerant.append(why)
        try:
            yield
        finally:
            self.tolerant.pop()

    def is_ours_to_ask(self, dotted: str) -> bool:
        return dotted.split(".")[0] == self.package

    def symbol(self, line: int, dotted: str, kind: str = "import") -> Value:
        """A module, class, function or value by its dotted name."""
        row = self.ask(line, "symbol", dotted)
        self.use(line, kind, dotted)
        if self.tolerant:
            self.probe(line, dotted, row["is"] != "missing")
        elif row["is"] == "missing":
            self.find(line, f"{dotted} does not exist{_meant(row)}")
        return self._value(row)

    def member(self, line: int, thing: Thing, name: str, *, optional: bool = False) -> Value:
        """An attribute of a thing. `optional`: our code copes without it."""
        if thing.kind == "module":
            dotted = f"{thing.name}.{name}"
            if optional or name in self.guarded:
                row = self.ask(line, "symbol", dotted)
                self.probe(line, dotted, row["is"] != "missing")
                return self._value(row)
            return self.symbol(line, dotted, "attribute")
        if thing.kind not in ("instance", "class", "super") or name in _OF_EVERY_CLASS:
            return UNKNOWN
        key = f"{thing.name}:{name}"
        row = self.ask(line, "member", key)
        self.use(line, "attribute", key)
        if optional or name in self.guarded or self.tolerant:
            self.probe(line, key.replace(":", "."), row["is"] != "missing")
        elif row["is"] == "missing":
            self.find(line, f"{thing.name} has no {name!r}{_meant(row)}")
        elif row["is"] == "unknown":
            self.seen.unproved.append(Use(self.path, line, "attribute", key))
        return self._member_value(row, thing, name)

    def call(self, line: int, thing: Thing, shape: Shape) -> Value:
        """Calling a thing; what it gives."""
        if thing.kind == "class":
            row = self.ask(line, "member", f"{thing.name}:__init__")
            if row.get("text"):
                self._fits(line, thing.name, Signature.parse(row["text"]).bound(), shape)
            return (Thing("instance", thing.name),)
        if thing.kind == "callable":
            if thing.text:
                self._fits(line, thing.name, Signature.parse(thing.text), shape)
                return of_type(thing.text.rpartition(" -> ")[2] if " -> " in thing.text else "", self.package)
            return UNKNOWN
        return UNKNOWN

    def _fits(self, line: int, name: str, signature: Signature, shape: Shape) -> None:
        self.use(line, "call", f"{name}{shape}")
        reason = signature.refuses(shape)
        if reason is not None and not self.tolerant:
            self.find(line, f"{name} {reason}")

    def _value(self, row: Row) -> Value:
        match row["is"]:
            case "module":
                return (Thing("module", row["at"]),)
            case "class":
                return (Thing("class", row["at"]),)
            case "function":
                return (Thing("callable", row["at"], row.get("text", "")),)
            case "value":
                return of_type(row.get("text", ""), self.package)
        return UNKNOWN

    def _member_value(self, row: Row, thing: Thing, name: str) -> Value:
        text = row.get("text", "")
        match row["is"]:
            case "field" | "property":
                return of_type(text, self.package)
            case "class":
                return (Thing("class", text),)
            case "method" | "classmethod" | "staticmethod":
                takes_self = row["is"] == "classmethod" or (row["is"] == "method" and thing.kind != "class")
                return (Thing("callable", f"{thing.name}.{name}", _bound(text) if takes_self else text),)
        return UNKNOWN


def _bound(text: str) -> str:
    """A signature's text without its first parameter."""
    inner, _, returns = text.partition(" -> ")
    depth = 0
    for at, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 1 and letter == ",":
            rest = f"({inner[at + 1 :].lstrip()}"
            break
        if depth == 0:
            rest = "()"
            break
    return f"{rest} -> {returns}" if returns else rest


def _meant(row: Row) -> str:
    names = row.get("near") or []
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
