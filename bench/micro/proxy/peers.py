"""Our proxy against the example proxies of vLLM and vllm-ascend for encode, prefill and decode, over the same stages.

The examples are fetched when this is measured, each at a commit, or taken from `--peer-vllm` and `--peer-ascend`; they
run as they are, each in a process of its own. Layout E-PD, which all three can serve without a KV connector: streamed
text (one call to PD), and images (one call to E, one to PD), each image sent once. The examples check nothing, keep
no table, and drop nothing from answers; ours does all that.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from bench.clients.process import SenderProcess
from bench.example_proxies import PEERS, VLLM, Peer, Rival, running, source
from bench.goals import Goal
from bench.micro.proxy.part import Options, Part, PartResult
from bench.micro.proxy.rivals import (
    Row,
    closed_loop,
    image_request,
    in_turns,
    medians_table,
    ratio,
    text_request,
)
from bench.micro.proxy.simulated import simulated
from bench.scratch import scratch
from deploy.ports import free_ports

IMAGES = 400
IMAGE_SIDE = 64


def measure(options: Options) -> PartResult:
    seconds, rounds = (2.0, 3) if options.quick else (6.0, 5)
    seeds = itertools.count()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        sender = stack.enter_context(SenderProcess())
        launch = stack.enter_context(simulated("E-PD"))
        encoder, decoder = launch.stage_url("E"), launch.stage_url("PD")
        assert encoder is not None and decoder is not None, "the layout is E-PD"
        rivals = [Rival("proxy", launch.url, launch.cpu_parts["proxy"])]
        for peer in PEERS:
            script, (port,) = folder / f"{peer.name}.py", free_ports(1)
            script.write_bytes(source(peer, _copy(peer, options)))
            rivals.append(stack.enter_context(running(peer.name, port, peer.argv(script, port, [encoder], [decoder]))))

        def texts(rival: Rival) -> Row:
            return closed_loop(sender, rival, [text_request(launch.model, stream=True)], seconds)

        def images(rival: Rival) -> Row:
            fresh = [image_request(launch.model, next(seeds), IMAGE_SIDE) for _ in range(IMAGES)]
            return closed_loop(sender, rival, fresh, seconds)

        rows = list(in_turns(rivals, {"text": texts, "picture": images}, rounds))
    figures = {
        f"rps_over_{peer.name}{suffix}": ratio(rows, kind, "proxy", peer.name)
        for peer in PEERS
        for kind, suffix in (("text", ""), ("picture", "_picture"))
    }
    return PartResult(figures, rows, medians_table(rows, {"rps": ".0f", "cpu_us_per_request": ".0f"}))


def fetch(options: Options) -> None:
    """Reads both, for `measure` to find. Raises StageError."""
    for peer in PEERS:
        source(peer, _copy(peer, options))


def _copy(peer: Peer, options: Options) -> Path | None:
    return options.peer_vllm if peer is VLLM else options.peer_ascend


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
