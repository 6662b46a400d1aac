"""The example proxies of vLLM and vllm-ascend, and any other proxy that is run beside ours from a command.

Each example is a script at a commit, fetched or given as a copy, and runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from bench.started import started
from epd_serve.errors import StageError

START_S = 60.0
FETCH_S = 30.0


class Rival(NamedTuple):
    """Something that answers requests. `pids`: its processes, none where their CPU time is not asked for."""

    name: str
    url: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Peer:
    """An example proxy. `url` has a commit in it, so what is fetched is always the same. `flag`: gives a copy."""

    name: str
    flag: str
    url: str

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


VLLM = Peer(
    "vllm_example",
    "--peer-vllm",
    "https://raw.githubusercontent.com/vllm-project/vllm/7e4cd77021afa2d7298f9e6836dc789517b01925/"
    "examples/online_serving/disaggregated_encoder/disagg_epd_proxy.py",
)
ASCEND = Peer(
    "vllm_ascend_example",
    "--peer-ascend",
    "https://raw.githubusercontent.com/vllm-project/vllm-ascend/182b75ea84ff13ece27b57391331ef8935410aea/"
    "examples/epd_disaggregated/epd_load_balance_proxy_layerwise_server_example.py",
)
PEERS = (VLLM, ASCEND)


@functools.cache
def source(peer: Peer, copy: Path | None) -> bytes:
    """Returns the peer's script.

    Raises:
        StageError: it can be neither read nor fetched; says what to give instead.
    """
    try:
        if copy is not None:
            return copy.read_bytes()
        with urllib.request.urlopen(peer.url, timeout=FETCH_S) as answer:
            return bytes(answer.read())
    except (OSError, urllib.error.URLError) as error:
        cause = f"{copy or peer.url} cannot be read ({error}): give a copy by {peer.flag}"
        raise StageError(cause, stage=peer.name) from error


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
