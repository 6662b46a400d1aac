"""AISBench as a process: started, watched, and ended whatever happens; it leaves no process and no shared memory.

It runs in a session of its own, so that Ctrl-C reaches this process alone, which asks AISBench to end in its own good
order (it keeps what it has then) before it insists. Its progress is read from the status file that it keeps for its own
display. Owns no meaning of what AISBench leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from bench.aisbench.environment import outside
from bench.clients.measure import TAKEN_AWAY
from deploy.host.processes import Killing, running, signal_process
from epd_serve.errors import ConfigError

LOOK_S = 0.2
GRACE_S = 45.0
"""For AISBench to end in good order: its processes wait for each other."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ended:
    """How a run of AISBench ended.

    Attributes:
        code: of the process, which is 0 for failed requests too. signal: that this process was sent, or 0.
        late: it was ended since it took too long.
    """

    code: int
    signal: int = 0
    late: bool = False

    @property
    def early(self) -> bool:
        return bool(self.signal) or self.late


def variables(host: str) -> dict[str, str]:
    """For AISBench: nothing from a model hub, no proxy between it and the endpoint, no display that it draws itself."""
    without = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    return {**outside(), **fixed, "no_proxy": without, "NO_PROXY": without}


def run(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    *,
    host: str = "127.0.0.1",
    label: str = "",
    progress: TextIO | None = None,
    log: str = "ais_bench.log",
    more: Mapping[str, str] | None = None,
) -> Ended:
    """Run `command` in `folder` to its end; what it prints is in the file `log` there.

    Args:
        limit_s: after which it is ended. host: of the endpoint. progress: where the live line goes, on a terminal.
        more: variables beside the usual.

    Raises:
        ConfigError: it cannot be started.
    """
    caught: list[int] = []
    late = False
    terminal = progress if progress is not None and progress.isatty() else None
    with _caught(caught), _line_on(terminal) as show:  # first: a signal that we ignore it would ignore too
        process, begun = _started(command, folder, {**variables(host), **(more or {})}, log), time.monotonic()
        try:
            while process.poll() is None and not caught and not late:
                took_s = time.monotonic() - begun
                late = took_s > limit_s
                show(f"{label}  {took_s:.0f} s  AISBench: {in_words(state(folder) if terminal else {})}")
                time.sleep(LOOK_S)
            if process.returncode is None:
                show("ending AISBench, which writes what it has …")
                _ask_to_end(process, caught)
        finally:
            _end(process)
    return Ended(process.returncode, caught[0] if caught else 0, late)


def _started(command: Sequence[str], folder: Path, env: Mapping[str, str], log: str) -> subprocess.Popen[bytes]:
    try:
        with (folder / log).open("wb") as file:
            return subprocess.Popen(
                list(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}", param="--venv") from error


def _ask_to_end(process: subprocess.Popen[bytes], caught: Sequence[int]) -> None:
    """As Ctrl-C on a terminal does: all its processes. A second signal to this one ends the waiting."""
    for pid in _members(process.pid):
        signal_process(pid, signal.SIGINT)
    end, heard = time.monotonic() + GRACE_S, len(caught)
    while process.poll() is None and time.monotonic() < end and len(caught) == heard:
        time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it; those that clean up its shared memory do so once all others are gone."""
    end, killing = time.monotonic() + GRACE_S, Killing()
    while (members := _members(process.pid)) and time.monotonic() < end:
        killing.strike(members)
        process.poll()
        time.sleep(0.02)
    process.wait(GRACE_S)


def _members(session: int) -> list[int]:
    """Living processes of a session. Those that AISBench starts are in its own."""
    found = []
    for one in running():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(one.pid) == session:
                found.append(one.pid)
    return found


@contextlib.contextmanager
def _caught(into: list[int]) -> Iterator[None]:
    """Signals that end this process are noted instead."""

    def note(number: int, frame: FrameType | None) -> None:
        into.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _line_on(terminal: TextIO | None) -> Iterator[Callable[[str], None]]:
    """What shows a line on the terminal instead of the last one; nothing where there is none."""

    def show(text: str) -> None:
        if terminal is not None:
            print(f"{TAKEN_AWAY}{text}", end="", file=terminal, flush=True)

    try:
        yield show
    finally:
        show("")


def state(folder: Path) -> Mapping[str, Any]:
    """The newest entry of AISBench's status file; empty where it has none now, since its own display empties it."""
    for path in folder.rglob("status_tmp/*.json"):
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(entries, list) and entries and isinstance(entries[-1], dict):
                return entries[-1]
    return {}


def in_words(entry: Mapping[str, Any]) -> str:
    """As `inferencing, 12 sent, 9 of 61 done, 1 failed`."""
    counts = entry.get("other_kwargs")
    words = [str(entry.get("status", "starting"))]
    if isinstance(counts, dict) and "POST" in counts:
        done = f"{counts.get('FINISH', 0)} of {entry.get('total_count', '?')} done"
        words += [f"{counts['POST']} sent", done, f"{counts.get('FAIL', 0)} failed"]
    return ", ".join(words)
