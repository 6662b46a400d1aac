"""Measures the parts of a profile, one launch after the other, and goes on where a run before was ended.

Parts that are done stand in a file beside the profile, `FILE.part`: JSON lines, the first says what is measured, so
that parts of two profiles never meet. Each part is written when it is whole; half a line at the end is left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.planner.served import launched
from deploy.planner.steps import Part
from deploy.planner.sweep import Extent, Launch, Sweep
from epd_serve.errors import ConfigError

VERSION = 1

Report = Callable[[str, float], None]
"""Called with what of a part is measured now, and the share of the part that is done."""


def measured(
    path: Path,
    about: Mapping[str, Any],
    launches: Sequence[Launch],
    run: Callable[[Launch, Report], Part],
    progress: Progress,
) -> list[Part]:
    """All parts, those of an earlier run as they were found then.

    Args:
        path: of the parts; removed by whoever has made a profile of them.
        about: what is measured, as JSON; parts of anything else are refused. run: measures one.
        progress: gets a task whose units are parts, which are taken to be equally long.

    Raises:
        ConfigError: the file cannot be read or written, or is of something else.
    """
    head = {"version": VERSION, **about}
    done = _read(path, head)
    left = [launch for launch in launches if launch.name not in done]
    if done:
        progress.print(f"{len(launches) - len(left)} of {len(launches)} parts are there already")
    else:
        _write(path, "wb", head)
    begun = time.monotonic()
    with progress:
        task = progress.add_task("", total=len(launches))
        for number, launch in enumerate(left, len(launches) - len(left)):
            label = f"part {number + 1} of {len(launches)}, {launch.name} on {launch.layout}"
            progress.print(f"{label}: starting")

            def report(action: str, share: float, label: str = label, number: int = number) -> None:
                progress.update(task, description=f"{label}: {action}", completed=number + share, refresh=True)

            done[launch.name] = part = run(launch, report)
            _write(path, "ab", part)
    progress.print(f"measured in {time.monotonic() - begun:.0f} s")
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


def measure_part(launch: Launch, extent: Extent, flags: Sequence[str], report: Report, *, multimodal: bool) -> Part:
    """Start it, send everything, and end it. Raises StageError: it did not start, or an answer was none."""
    with launched(launch.layout, flags) as served:
        sweep = Sweep(launch, served, extent, multimodal=multimodal)
        actions = sweep.actions()
        for number, (label, act) in enumerate(actions):
            report(label, number / len(actions))
            act()
        return sweep.part()


def progress_bar(console: Console) -> Progress:
    """On a terminal what is done and how long the rest will take, below what is printed; elsewhere that alone. It is
    drawn when there is news, and not by a thread: this process stamps what is measured."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, auto_refresh=False, speed_estimate_period=math.inf)
