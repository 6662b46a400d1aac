"""Measures the parts of a profile, one launch after the other, and goes on where a run before was ended.

Parts that are done stand in a file beside the profile, `FILE.part`: JSON lines, the first says what is measured, so
that parts of two profiles never meet. Each part is written when it is whole; half a line at the end is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from deploy.planner.served import launched
from deploy.planner.steps import Part
from deploy.planner.sweep import Extent, Launch, Sweep
from epd_serve.errors import ConfigError

VERSION = 1
BAR = 24


def measured(
    path: Path, about: Mapping[str, Any], launches: Sequence[Launch], run: Callable[[Launch], Part], progress: Progress
) -> list[Part]:
    """All parts, those of an earlier run as they were found then.

    Args:
        path: of the parts; removed by whoever has made a profile of them.
        about: what is measured, as JSON; parts of anything else are refused. run: measures one.

    Raises:
        ConfigError: the file cannot be read or written, or is of something else.
    """
    head = {"version": VERSION, **about}
    done = _read(path, head)
    progress.begin(len(launches), sum(one.name in done for one in launches))
    if not done:
        _write(path, "wb", head)
    for launch in launches:
        if launch.name not in done:
            progress.part(launch)
            done[launch.name] = part = run(launch)
            _write(path, "ab", part)
    progress.end()
    return [done[launch.name] for launch in launches]


def _read(path: Path, head: Mapping[str, Any]) -> dict[str, Part]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="--out") from error
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    first, *lines = whole.splitlines() or [b""]
    if not first:
        return {}
    try:
        found = msgspec.json.decode(first, type=dict)
        differing = [name for name in {**found, **head} if found.get(name) != head.get(name)]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{path} holds parts of another profile: {name} was {found.get(name)!r} and is {head.get(name)!r} now; "
                "remove it, or give another --out",
                param="--out",
            )
        return {part.name: part for part in (msgspec.json.decode(line, type=Part) for line in lines)}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no file of parts ({error}); remove it", param="--out") from error


def _write(path: Path, mode: Literal["wb", "ab"], value: object) -> None:
    try:
        with path.open(mode) as file:
            file.write(msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="--out") from error


def measure_part(launch: Launch, extent: Extent, flags: Sequence[str], progress: Progress, *, multimodal: bool) -> Part:
    """Start it, send everything, and end it. Raises StageError: it did not start, or an answer was none."""
    with launched(launch.layout, flags) as served:
        sweep = Sweep(launch, served, extent, multimodal=multimodal)
        actions = sweep.actions()
        for number, (label, act) in enumerate(actions):
            progress.action(number, len(actions), label)
            act()
        return sweep.part()


class Progress:
    """Says how far it is and how long it will take: a bar on a terminal, else a line per part."""

    def __init__(self, out: TextIO, *, terminal: bool) -> None:
        self._out, self._terminal = out, terminal
        self._parts = self._first = self._number = 0
        self._begun = 0.0
        self._label = ""

    def begin(self, parts: int, done: int) -> None:
        self._parts, self._number, self._first, self._begun = parts, done, done, time.monotonic()
        if done:
            self.line(f"{done} of {parts} parts are there already")

    def part(self, launch: Launch) -> None:
        self._number += 1
        self._label = f"part {self._number} of {self._parts}, {launch.name} on {launch.layout}"
        self.line(f"{self._label}: starting{self._left(0.0)}")

    def action(self, number: int, of: int, label: str) -> None:
        if self._terminal:
            full = BAR * number // of
            bar = "█" * full + "·" * (BAR - full)
            self._out.write(f"\r\x1b[K{bar} {self._label}: {label}{self._left(number / of)}")
            self._out.flush()

    def end(self) -> None:
        self.line(f"measured in {time.monotonic() - self._begun:.0f} s")

    def _left(self, share: float) -> str:
        """`share`: of this part that is done. Parts are taken to be equally long."""
        done = self._number - 1 - self._first + share
        to_come = self._parts - self._first - done
        left_s = (time.monotonic() - self._begun) / done * to_come if done > 0.2 else 0.0
        return f", about {left_s:.0f} s left" if left_s else ""

    def line(self, text: str) -> None:
        self._out.write(f"{chr(13)}{chr(27)}[K{text}\n" if self._terminal else f"{text}\n")
        self._out.flush()
