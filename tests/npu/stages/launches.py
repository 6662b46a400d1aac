"""The layouts that are served on the card, one after the other, each once for all tests that want it.

Owns how a layout is started on the device under test and what is kept of it for the report. What a user's launch
promises at its end is checked by `tests.e2e.serving`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.serving import MODEL, Serving
from tests.npu.card import Card
from tests.npu.report import Report


@dataclass(frozen=True)
class Planned:
    """A layout to serve.

    Attributes:
        devices: how many it takes. alone: only where there are no more than these.
        core_share: of the stages that share a device; "" for no limit.
    """

    layout: str
    devices: int
    core_share: str = ""
    alone: bool = False


PLANNED = {
    "(E-PD)": Planned("(E-PD)", 1),
    "(E-PD), core shares": Planned("(E-PD)", 1, core_share="E=0.3,PD=0.7"),
    "(E-P-D)": Planned("(E-P-D)", 1, alone=True),
    "(E-P)-D, core shares": Planned("(E-P)-D", 2, core_share="E=0.3,P=0.7"),
    "E-P-D": Planned("E-P-D", 3),
}
ORDER = tuple(PLANNED)
"""One start each: tests are sorted by it (`conftest.py`)."""

MONOLITH = Planned("TP1", 1)
SPLIT = ("(E-P-D)", "(E-P)-D, core shares", "E-P-D")  # those with a P and a D, between which KV travels


def over(*names: str) -> pytest.MarkDecorator:
    """Run a test once on each of these launches."""
    return pytest.mark.parametrize("launch", names, indirect=True, scope="session")


def why_not(name: str, card: Card) -> str:
    """Why the launch cannot be tested on this card, or ""."""
    planned = PLANNED[name]
    if planned.devices > len(card.ids):
        return f"{name} takes {planned.devices} devices, there {'is' if len(card.ids) == 1 else 'are'} {len(card.ids)}"
    if planned.alone and len(card.ids) > planned.devices:
        return f"{name} is for machines with one device; set EPD_TEST_DEVICES=1 to test it on this one"
    return ""


def shares_on(planned: Planned, card: Card) -> str:
    """The core shares of a launch on this card. A CPU has to have a core for each: a rehearsal may go without."""
    cores = len(os.sched_getaffinity(0)) // planned.devices
    few = card.kind == "cpu" and cores < planned.core_share.count("=")
    return "" if few else planned.core_share


class CardServing(Serving):
    """`epd-serve serve` on the card, with traces, and logs that outlive it in the report."""

    def __init__(self, name: str, planned: Planned, card: Card, scratch: Path, report: Report) -> None:
        self.name = name
        self.card = card
        self.traces = scratch / f"traces-{len(list(scratch.glob('traces-*')))}"
        self._report = report
        # Room for the longest prompt here and no more: a real checkpoint's 128 K would take the device's memory.
        common = "--max-model-len 8192 --max-num-seqs 32" + (" --enforce-eager" if card.eager else "")
        self.core_share = shares_on(planned, card)
        flags = ["--device", card.kind, "--served-model-name", MODEL, "--trace-dir", str(self.traces)]
        flags += ["--core-share", self.core_share] if self.core_share else []
        super().__init__(planned.layout, *flags, "--stage-args", f"all:{common}", card.model(scratch))

    def keep_logs(self) -> None:
        """Now, for a launch removes its run directory."""
        kept = [self.log, *self.traces.glob("*.jsonl")]
        with contextlib.suppress(ValueError, OSError):  # it may have ended before it had a run directory
            kept += [path for path in self.run.iterdir() if path.suffix in (".log", ".json", ".jsonl")]
        self._report.keep_logs(self.name, *kept)

    def devices_of(self, instance: str) -> list[int]:
        devices: list[int] = self.instances()[instance]["devices"]
        return devices


@contextlib.contextmanager
def served(name: str, planned: Planned, card: Card, scratch: Path, report: Report) -> Iterator[CardServing]:
    """A ready launch; at the end Ctrl-C with all its promises checked. Its logs are kept whatever happened."""
    launch = CardServing(name, planned, card, scratch, report)
    try:
        begun = time.monotonic()
        launch.wait_ready(card.start_s)
        report.figure("ready_s", round(time.monotonic() - begun, 1), launch=name)
        yield launch
        launch.keep_logs()
        if launch.process.poll() is None:
            launch.stop()
    finally:
        launch.keep_logs()
        launch.destroy()
