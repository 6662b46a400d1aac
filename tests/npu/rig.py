"""What a part is given: the card, the report, folders; and how it says what it saw, what is wrong, or why not.

A check that fails does not end its part: whoever has the card for minutes wants all that is wrong, not the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.served import LOGS_ENV
from epd_serve.layout_parser import parse
from tests.npu.card import Card
from tests.npu.report import ROOT, Report


class Skipped(Exception):
    """This card or machine cannot run the part; says why."""


class PartFailed(Exception):
    """One or more checks did not hold."""


@dataclass
class Rig:
    """Of one part.

    Attributes:
        folder: of this part: its log, logs of its stages, files that it measured.
        scratch: for models and traces; kept between the parts of one run.
    """

    part: str
    card: Card
    report: Report
    folder: Path
    scratch: Path
    failed: list[str] = field(default_factory=list)
    _about: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def layout(self, layout: str) -> Iterator[None]:
        """Every row meanwhile names this layout, and what stands for the devices that it takes."""
        devices, there = parse(layout).device_count, len(self.card.ids)
        stand_in = f" virtual ones on {there}" if there < devices else ""
        before, self._about = self._about, {"layout": layout, "devices": f"{devices}{stand_in}"}
        try:
            yield
        finally:
            self._about = before

    def row(self, name: str, value: object, **more: Any) -> None:
        """One thing seen, with what it was seen on."""
        more = {**self._about, **more}
        told = {"part": self.part, "name": name, "value": value, "device": self.card.kind}
        told |= {"on": self.card.label, "stages": self.card.mode}
        self.report.row(**told, **more)
        print(f"{name} = {json.dumps(value, default=str)[:300]}" + (f"   {more}" if more else ""), flush=True)

    def check(self, holds: bool, what: str, why: str = "") -> bool:
        """One thing that has to hold; `why` is for when it does not."""
        self.row(what, "holds" if holds else "DOES NOT HOLD", **({} if holds else {"why": why[:4000]}))
        if not holds:
            self.failed.append(f"{what}: {why}" if why else what)
        return holds

    def settle(self) -> None:
        """At the end of a part. Raises PartFailed."""
        if self.failed:
            raise PartFailed("\n".join(self.failed))

    def bench(self, *words: str, name: str, limit_s: float) -> dict[str, Any]:
        """`epd-bench WORDS`; its result, which stays in the folder as `name`.json. Raises PartFailed."""
        path = self.folder / f"{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.cli", *words, "--json", str(path)]
        self.run(command, limit_s)
        if not path.exists():
            raise PartFailed(f"epd-bench {' '.join(words)} left no result: see log.txt")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def run(self, command: Sequence[str], limit_s: float) -> int:
        """A command with its output in this part's log, and the logs of what it launches in this part's folder."""
        environment = {**os.environ, LOGS_ENV: str(self.folder / "logs")}
        print(f"$ {' '.join(command)}", flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"{' '.join(command[:4])} did not end within {limit_s:g} s") from None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        print(f"exit status {code}", flush=True)
        return code
