"""What a measurement runs beside our proxy: the example proxies of vLLM and vllm-ascend, and any other one.

An example is a script that the user brings (docs/measuring/layouts.md says where they are), and runs as it is. The
processes are `deploy/host/started.py`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from deploy.host.started import started
from epd_serve.errors import ConfigError


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


VLLM = Peer("--peer-vllm", "vLLM's example proxy")
ASCEND = Peer("--peer-ascend", "vllm-ascend's example proxy")
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
