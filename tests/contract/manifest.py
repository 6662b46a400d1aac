"""The committed answers of the wheels: one file for each, one row per line; and the recorder that makes them.

A row is `[kind, name, answer]`. The first line of a file says which wheel it was read from, with its sha256.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.contract.asking import NotRecordedError
from tests.contract.facts import Facts, Row
from tests.contract.wheels import Wheel

FOLDER = Path(__file__).with_name("manifest")


class Manifest:
    """What was recorded of one wheel. `about`: its facts; `not_available` among them says why there are no rows."""

    def __init__(self, about: dict[str, str], rows: dict[tuple[str, str], Row]) -> None:
        self.about = about
        self._rows = rows

    @property
    def available(self) -> bool:
        return "not_available" not in self.about

    def ask(self, kind: str, name: str) -> Row:
        """Raises:
        NotRecordedError: nobody asked this when the manifest was made.
        """
        try:
            return self._rows[kind, name]
        except KeyError:
            raise NotRecordedError(f"{kind} {name}") from None

    def __len__(self) -> int:
        return len(self._rows)


class Recorder:
    """Passes questions on and keeps the answers."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.rows: dict[tuple[str, str], Row] = {}

    def ask(self, kind: str, name: str) -> Row:
        if (kind, name) not in self.rows:
            self.rows[kind, name] = self._facts.ask(kind, name)
        return self.rows[kind, name]


def write(folder: Path, wheel: Wheel, about: dict[str, str], rows: dict[tuple[str, str], Row]) -> None:
    """One file, whose text depends on its content only."""
    lines = [json.dumps([kind, name, row]) for (kind, name), row in sorted(rows.items())]
    text = "\n".join(["[" + ",\n".join([json.dumps(["wheel", wheel.name, about]), *lines]), "]", ""])
    (folder / wheel.file).write_text(text, encoding="utf-8")


def load(folder: Path, wheel: Wheel) -> Manifest:
    """Raises:
    FileNotFoundError: there is no manifest of this wheel.
    """
    (_, _, about), *rows = json.loads((folder / wheel.file).read_text(encoding="utf-8"))
    return Manifest(about, {(kind, name): row for kind, name, row in rows})
