"""Our proxy against the example proxies of vLLM and vllm-ascend for encode, prefill and decode, over the same stages.

The examples are fetched when this is measured, each at a commit, or taken from `--peer-vllm` and `--peer-ascend`; they
run as they are, each in a process of its own. Layout E-PD, which all three can serve without a KV connector: streamed
text (one call to PD), and pictures (one call to E, one to PD), each picture sent once. The examples check nothing, keep
no table, and drop nothing from answers; ours does all that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.goals import Goal
from bench.load_process import Generator, Load
from bench.processes import cpu_seconds
from bench.proxy_part import Found, Options, Part
from bench.proxy_rivals import Rival, running
from bench.proxy_speed import AT_ONCE, picture_body, simulated, text_body
from bench.served import Served
from deploy.placement_table import table
from deploy.ports import free_ports
from epd_serve.errors import StageError

FETCH_S = 30.0
PICTURES = 400
PICTURE_SIDE = 64


@dataclass(frozen=True)
class Peer:
    """An example proxy. `url` has a commit in it, so what is fetched is always the same."""

    name: str
    url: str

    def argv(self, script: Path, port: int, encoders: Sequence[str], decoders: Sequence[str]) -> list[str]:
        """Its command line, in front of these E and PD (URLs)."""
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
    "https://raw.githubusercontent.com/vllm-project/vllm/7e4cd77021afa2d7298f9e6836dc789517b01925/"
    "examples/online_serving/disaggregated_encoder/disagg_epd_proxy.py",
)
ASCEND = Peer(
    "vllm_ascend_example",
    "https://raw.githubusercontent.com/vllm-project/vllm-ascend/182b75ea84ff13ece27b57391331ef8935410aea/"
    "examples/epd_disaggregated/epd_load_balance_proxy_layerwise_server_example.py",
)


def measure(options: Options) -> Found:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp")))
        scripts = {peer: scratch / f"{peer.name}.py" for peer, _ in _given(options)}
        for peer, given in _given(options):
            scripts[peer].write_bytes(_source(peer, given))
        generator = stack.enter_context(Generator())
        launch = stack.enter_context(simulated("E-PD"))
        rivals = [Rival("proxy", launch.url, launch.cpu_parts["proxy"][0])]
        rivals += [stack.enter_context(_started(peer, script, launch)) for peer, script in scripts.items()]
        rows = _rows(generator, launch.model, rivals, options.quick)
    figures = {}
    for peer in scripts:
        figures[f"rps_over_{peer.name}"] = _ratio(rows, "text", peer.name)
        figures[f"rps_over_{peer.name}_picture"] = _ratio(rows, "picture", peer.name)
    return Found(figures, rows, _table(rows))


def fetch(options: Options) -> None:
    """Reads both, for `measure` to find. Raises StageError."""
    for peer, given in _given(options):
        _source(peer, given)


PART = Part(
    "peers",
    "requests a second against the example proxies of vLLM and vllm-ascend",
    measure,
    (
        Goal("rps_over_vllm_example", ">=", 1.0, "streamed text on E-PD"),
        Goal("rps_over_vllm_ascend_example", ">=", 1.0, "the same"),
    ),
    fetch,
)


def _given(options: Options) -> Sequence[tuple[Peer, Path | None]]:
    return ((VLLM, options.peer_vllm), (ASCEND, options.peer_ascend))


@functools.cache
def _source(peer: Peer, given: Path | None) -> bytes:
    """The peer's script.

    Raises:
        StageError: it can be neither read nor fetched; says what to give instead.
    """
    flag = "--peer-vllm" if peer is VLLM else "--peer-ascend"
    try:
        if given is not None:
            return given.read_bytes()
        with urllib.request.urlopen(peer.url, timeout=FETCH_S) as answer:
            source: bytes = answer.read()
            return source
    except (OSError, urllib.error.URLError) as error:
        cause = f"{given or peer.url} cannot be read ({error}): give a copy by {flag}"
        raise StageError(cause, stage=peer.name) from error


@contextlib.contextmanager
def _started(peer: Peer, script: Path, launch: Served) -> Iterator[Rival]:
    encoder, decoder = launch.stage_url("E"), launch.stage_url("PD")
    assert encoder is not None and decoder is not None, "the layout is E-PD"
    (port,) = free_ports(1)
    with running(peer.name, port, peer.argv(script, port, [encoder], [decoder])) as rival:
        yield rival


def _rows(generator: Generator, model: str, rivals: Sequence[Rival], quick: bool) -> list[dict[str, Any]]:
    seconds, rounds = (2.0, 3) if quick else (6.0, 5)
    rows: list[dict[str, Any]] = []
    seeds = itertools.count()
    for turn in range(rounds):
        for kind in ("text", "picture"):
            for rival in rivals:
                bodies = (
                    [text_body(model, stream=True)]
                    if kind == "text"
                    else [picture_body(model, next(seeds), PICTURE_SIDE) for _ in range(PICTURES)]
                )
                before = cpu_seconds({"it": (rival.pid,)})["it"]
                load = Load(bodies, seconds, at_once=AT_ONCE, warm_up_s=0.5)
                found = generator.run(rival.url, load)
                spent_s = cpu_seconds({"it": (rival.pid,)})["it"] - before
                counted = found["requests"] * (1 + load.warm_up_s / seconds)
                cpu = round(spent_s / counted * 1e6, 1)
                rows.append({"kind": kind, "to": rival.name, "round": turn, **found, "cpu_us_per_request": cpu})
    return rows


def _ratio(rows: Sequence[dict[str, Any]], kind: str, name: str) -> float:
    """Our requests a second over the peer's, the median over rounds."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault(row["round"], {})[row["to"]] = row["rps"]
    return round(statistics.median(one["proxy"] / one[name] for one in found.values()), 4)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [("requests", "through", "requests/s", "CPU us/request", "errors")]
    for kind in ("text", "picture"):
        for name in dict.fromkeys(row["to"] for row in rows):
            these = [row for row in rows if (row["kind"], row["to"]) == (kind, name)]
            rps, cpu = (statistics.median(row[field] for row in these) for field in ("rps", "cpu_us_per_request"))
            lines.append((kind, name, f"{rps:.0f}", f"{cpu:.0f}", str(sum(row["errors"] for row in these))))
    return table(lines)
