"""Answers of one wheel to the questions of the contract: what a name is, what a class has, who calls a hook.

A question is a kind and a name, an answer a row of plain values, as the manifest keeps it. The wheel answers from its
sources; `manifest.py` from what was written down. Questions:

    symbol   dotted name                       class, function, value, module, native or missing
    class    canonical name of a class         its abstract methods and the names of all members
    member   canonical class `:` member        method, property, field, …, or missing; unknown where a base is elsewhere
    contains symbol `:` text                   whether its source contains the text
    flag     `--name`                          of the package's command line: the config field behind it
    names    an environment variable           whether the package knows it
    hook     canonical class `:` method        who calls it, and with what
    request  class of a request                its fields as JSON names them, each with the classes that it is made of,
                                               and the JSON types of those that can be a list or an object
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import griffe

from tests.contract.callers import Callers
from tests.contract.flags import Flags
from tests.contract.json_types import json_types
from tests.contract.members import Classes, ClassFacts, Member
from tests.contract.source import WheelSource

Row = dict[str, Any]


class Facts(Protocol):
    """Whoever answers."""

    def ask(self, kind: str, name: str) -> Row: ...


def near(word: str, names: Iterable[str]) -> list[str]:
    """Names that may have been meant."""
    return difflib.get_close_matches(word, sorted(names), n=2, cutoff=0.7)


class WheelFacts:
    """Answers from a wheel's file."""

    def __init__(self, path: Path, package: str) -> None:
        self._source = WheelSource(path)
        self._classes = Classes(self._source)
        self._callers = Callers(self._source)
        self._flags = Flags(self._source, self._classes, package)
        self._answers: dict[str, Callable[[str], Row]] = {
            "symbol": self._symbol,
            "class": self._class,
            "member": self._member,
            "contains": self._contains,
            "flag": self._flags.row,
            "names": self._names,
            "hook": self._hook,
            "request": self._request,
        }

    def ask(self, kind: str, name: str) -> Row:
        return self._answers[kind](name)

    def _symbol(self, name: str) -> Row:
        match found := self._source.find(name):
            case None:
                return self._native(name) or {"is": "missing", "near": self._near(name)}
            case griffe.Function():
                return {"is": "function", "at": found.path, "text": self._classes.signature(found)}
            case griffe.Attribute():
                return {"is": "value", "at": found.path, "text": self._classes.type_of(found.annotation)}
        return {"is": found.kind.value, "at": found.path}

    def _near(self, name: str) -> list[str]:
        owner, _, last = name.rpartition(".")
        there = self._source.find(owner) if owner else None
        return near(last, there.members) if isinstance(there, griffe.Module) else []

    def _native(self, name: str) -> Row | None:
        """An extension module, or a class of one: what can be told is whether its bytes contain the name."""
        if self._source.native(name) is not None:
            return {"is": "module", "at": name, "native": True}
        owner, _, last = name.rpartition(".")
        file = self._source.native(owner) if owner else None
        if file is None:
            return None
        return {"is": "class", "at": name, "native": True} if self._bytes_have(file, last) else {"is": "missing"}

    def _bytes_have(self, file: str, word: str) -> bool:
        """As the end of a C string: linkers let a string share the tail of a longer one."""
        return word.encode() + b"\0" in self._source.data(file)

    def _class(self, name: str) -> Row:
        found = self._source.find_class(name)
        if found is None:
            return {"native": True} if self._native(name) else {"is": "missing"}
        facts = self._classes.facts(found)
        abstract = sorted(member.name for member in facts.members.values() if member.abstract)
        row: Row = {"abstract": abstract} if abstract else {}
        return row | {"names": " ".join(sorted(facts.members))}

    def _member(self, name: str) -> Row:
        owner, _, last = name.partition(":")
        found = self._source.find_class(owner)
        if found is None:
            file = self._source.native(owner.rpartition(".")[0])
            known = file is not None and self._bytes_have(file, last)
            return {"is": "native"} if known else {"is": "missing"}
        facts = self._classes.facts(found)
        member = facts.members.get(last) or (self._constructor(facts) if last == "__init__" else None)
        if member is None:
            return {"is": "unknown"} if facts.open else {"is": "missing", "near": near(last, facts.members)}
        row: Row = {"is": member.kind}
        return row | ({"text": member.text} if member.text else {})

    @staticmethod
    def _constructor(facts: ClassFacts) -> Member | None:
        return facts.members.get("__new__")

    def _contains(self, name: str) -> Row:
        owner, _, text = name.partition(":")
        found = self._source.find(owner)
        if found is None:
            return {"is": "missing"}
        lines = self._source.text(str(found.filepath)).splitlines()
        part = lines if isinstance(found, griffe.Module) else lines[(found.lineno or 1) - 1 : found.endlineno]
        return {"is": text in "\n".join(part)}

    def _names(self, name: str) -> Row:
        word = name.encode()
        files = sorted(self._source.files, key=lambda file: (not file.endswith("/envs.py"), file))
        for suffix in (".py", ".so"):
            for file in files:
                if file.endswith(suffix) and word in self._source.data(file):
                    return {"is": True, "at": file}
        return {"is": False}

    def _hook(self, name: str) -> Row:
        owner, _, method = name.partition(":")
        return {"calls": self._callers.of(owner, method)}

    def _request(self, name: str) -> Row:
        found = self._source.find_class(name)
        if found is None:
            return {"is": "missing"}
        fields = self._classes.request_fields(found)
        types = {field: self._types(text) for field, text in fields.items()}
        return {
            "fields": {field: self._made_of(text) for field, text in fields.items()},
            "types": {field: found for field, found in types.items() if found},
        }

    def _types(self, annotation: str) -> str:
        """What may stand in JSON for a field: see `json_types`."""

        def is_object(name: str) -> bool:
            found = self._source.find_class(name)
            return found is not None and bool(self._classes.request_fields(found))

        return json_types(annotation, is_object)

    def _made_of(self, annotation: str) -> str:
        words = dict.fromkeys(re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", annotation))
        return " ".join(word for word in words if self._source.find_class(word) is not None)
