"""Commands that run beside what started them: waited for until they are ready, ended with it.

Owns the process, its log and its end, also after a starter that was killed. When a command is ready, its caller knows.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deploy.host.parent_death_exec import parent_death_exec
from deploy.host.processes import Killing, group_members
from epd_serve.errors import StageError

ENDS = "Ctrl-C stops everything."
"""What a deployment says once it is ready."""

_HOUSE = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.02
TRACKER_S = 10.0
"""For what cleans up after a command, as Python's resource tracker, which takes its shared memory out of /dev/shm."""
_TAIL_BYTES = 2000
_Sign = TypeVar("_Sign")


@dataclass(frozen=True)
class Started:
    """A command that runs. `log`: what it prints."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self, look: Callable[[], _Sign | None], start_s: float) -> _Sign:
        """Returns what `look` finds once it finds something.

        Raises:
            StageError: it ended before, or `start_s` seconds were not enough; with the end of its log.
        """
        end = time.monotonic() + start_s
        while not (sign := look()):
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                why = f"not ready after {start_s:.0f} s" if code is None else f"it ended with {code}"
                tail = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
                raise StageError(f"{self.name} did not become ready, {why}:\n{tail}", stage=self.name)
            time.sleep(LOOK_EVERY_S)
        return sign


@contextlib.contextmanager
def started(
    argv: Sequence[str],
    log: Path,
    *,
    name: str = "",
    out: Path | None = None,
    env: Mapping[str, str] | None = None,
    by: signal.Signals = signal.SIGINT,
    stop_s: float = 10.0,
) -> Iterator[Started]:
    """Run `argv` until the context ends.

    Args:
        name: in errors, instead of the log's. out: what it prints goes there, and to `log` its errors alone.
        by: the signal that ends it (SIGINT as Ctrl-C), which it also gets when this process dies. stop_s: the time that
            it has for its end.
    """
    with contextlib.ExitStack() as files:
        errors = files.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", *parent_death_exec(argv, by)],
            cwd=_HOUSE,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=errors if out is None else files.enter_context(out.open("wb")),
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield Started(name or log.stem, process, log)
    finally:
        end(process, by, stop_s)


def end(process: subprocess.Popen[bytes], by: signal.Signals = signal.SIGTERM, stop_s: float = 10.0) -> None:
    """The signal, time to end, then SIGKILL to whatever is left of its process group, what cleans up last."""
    process.send_signal(by)
    try:
        process.wait(stop_s)
        patience_s = TRACKER_S
    except subprocess.TimeoutExpired:
        patience_s = 0.0
    kill_at, killing = time.monotonic() + patience_s, Killing()
    while (members := group_members(process.pid)) and time.monotonic() < kill_at + TRACKER_S + stop_s:
        if time.monotonic() > kill_at:
            killing.strike([one.pid for one in members])
        time.sleep(LOOK_EVERY_S)
    process.wait(stop_s)
