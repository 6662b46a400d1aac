"""Commands that a measurement starts: run beside it, waited for until they are ready, ended with it.

Owns the process, its log and its end, also after a measurement that was killed. When a command is ready, its caller
knows. Among them the example proxies of vLLM and vllm-ascend, and any other proxy that is run beside ours: an example
is a script that the user brings (docs/measuring/layouts.md says where they are), and runs as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx

from bench.record import ROOT
from deploy.host.parent_death_exec import parent_death_exec
from deploy.host.processes import Killing, group_members
from epd_serve.errors import ConfigError, StageError

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
            cwd=ROOT,
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


def answers(url: str, says: str = "") -> bool:
    """Whether somebody on this machine answers at `url` with 200, and `says` in the text."""
    try:  # there is nothing to verify, and to load certificates at each look would take 20 ms of a core
        answer = httpx.get(url, timeout=5.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and says in answer.text


START_S = 60.0


class Rival(NamedTuple):
    """Something that answers requests. `pids`: its processes, none where their CPU time is not asked for."""

    name: str
    url: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Peer:
    """An example proxy. `flag`: names the script. `title`: in tables and figures."""

    name: str
    flag: str
    title: str

    def argv(self, script: Path, port: int, encoders: Sequence[str], decoders: Sequence[str]) -> list[str]:
        """Returns its command line, in front of these E and PD (URLs)."""
        flags = ["--host", "127.0.0.1", "--port", str(port)]
        if self is VLLM:
            flags += ["--encode-servers-urls", ",".join(encoders), "--prefill-servers-urls", "disable"]
            return [sys.executable, str(script), *flags, "--decode-servers-urls", ",".join(decoders)]
        for name, urls in (("encoder", encoders), ("pd", decoders)):
            parts = [urlsplit(url) for url in urls]
            flags += [f"--{name}-hosts", *(str(part.hostname) for part in parts)]
            flags += [f"--{name}-ports", *(str(part.port) for part in parts)]
        return [sys.executable, str(script), *flags]


VLLM = Peer("vllm_example", "--peer-vllm", "vLLM's example proxy")
ASCEND = Peer("vllm_ascend_example", "--peer-ascend", "vllm-ascend's example proxy")
PEERS = (VLLM, ASCEND)


def add_peer_flags(parser: argparse._ActionsContainer) -> None:
    """A flag for each script; there is no other way to have one, since nothing is fetched."""
    for peer in PEERS:
        parser.add_argument(peer.flag, type=Path, metavar="FILE", help=f"{peer.title}, which you bring")


def given_peers(arguments: argparse.Namespace) -> dict[Peer, Path]:
    """The scripts that are given. Raises ConfigError where one is not there."""
    paths = {peer: getattr(arguments, peer.flag.removeprefix("--").replace("-", "_")) for peer in PEERS}
    given = {peer: path.resolve() for peer, path in paths.items() if path is not None}
    for peer, path in given.items():
        if not path.is_file():
            raise ConfigError(f"{peer.flag} {path}: there is no such file", param=peer.flag)
    return given


@contextlib.contextmanager
def running(name: str, port: int, argv: Sequence[str]) -> Iterator[Rival]:
    """Run `argv` until the context ends; its output goes to a file that is shown when it does not start.

    Raises:
        StageError: it ended, or did not listen on `port` within `START_S`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="epd-bench-") as folder,
        started(argv, Path(folder) / "log", name=name) as process,
    ):
        process.ready(lambda: _listens(port), START_S)
        yield Rival(name, f"http://127.0.0.1:{port}", (process.process.pid,))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
