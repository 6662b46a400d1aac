"""What a request sees of E→P and P→D beside an 8B model's compute: exposed time and overlap at 1, 8 and 16 at once.

One launch of (E-P-D). P→D: prompts of exact lengths, adaptive against bulk and layerwise groups in turns
(`bench/micro/pd/stages.py`). E→P: pictures that nobody has seen. A feature is there when it lies in P's device memory,
by that device's own account (`feature_loaded`); pinned in the host's memory it is half way. The step that computes the
prompt begins with the copy, so that is exposed as a whole; before it a feature is exposed for as long as its request is
in P's scheduler and the feature, encoded by then, is not pinned:

    copy      = feature loaded - load begun
    transfer  = feature pinned - encoded + copy
    exposed   = max(0, feature pinned - the later of: encoded, request in P's scheduler) + copy
    overlap   = 1 - exposed / transfer
    to device = feature loaded - encoded: with D's blocks, which it reserves when it hears of the feature, and P's queue
"""

from __future__ import annotations

import itertools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.micro.pd.figures import cells
from bench.micro.pd.stages import ANSWER_S, FROM_DECODE, SPARE, Turns, take_turns
from bench.served import LOGS_ENV, Served, served
from bench.workloads.synthetic import demo_image
from epd_serve.engine.kv.grouping_file import PREFIX, replace_mode
from epd_serve.phases.stamps import Timeline, read_stamps
from tests.npu.launches import stage_events
from tests.npu.parts.eight_b import model_of, stage_flags
from tests.npu.rig import Rig
from tests.waiting import wait_for

LAYOUT = "(E-P-D)"
MODES = ("bulk", "layerwise", "adaptive")
TOGETHER = (1, 8, 16)
SIDE = 960  # as many pixels as 1280 x 720
STAMPS_S = 10.0


def run(rig: Rig) -> None:
    os.environ[LOGS_ENV] = str(rig.folder / "logs")
    on_cpu, mode = rig.card.kind == "cpu", rig.scratch / "mode"
    turns = (
        Turns((256,), MODES, {1: 1, 8: 1, 16: 1}, 60.0)
        if on_cpu
        else Turns((1024, 4096), MODES, {1: 4, 8: 2, 16: 2}, 60.0)
    )
    replace_mode(mode, MODES[0])
    room = max(turns.lengths) + SPARE
    flags = [str(model_of(rig)), "--device", rig.card.kind, "--kv-grouping", f"{PREFIX}{mode}", *FROM_DECODE]
    flags += stage_flags(rig, f"--max-num-batched-tokens {max(room, 8192)}")
    client = httpx.Client(timeout=ANSWER_S, trust_env=False)
    with rig.layout(LAYOUT), served(LAYOUT, flags) as launch, client:
        rig.row("ready_s", round(launch.ready_s, 1))
        found = cells(take_turns(launch, client, mode, "shm", turns))
        for cell in found:
            about = {"tokens": cell.tokens, "at_once": cell.concurrency, "mode": cell.mode}
            told = {name: round(spread.median, 4) for name, spread in cell.measures.items()}
            rig.row("P→D", told, over_bulk={name: round(x.median, 3) for name, x in cell.over_base.items()}, **about)
        numbers = itertools.count(1)
        for together in TOGETHER:
            _pictures(launch, client, [next(numbers) for _ in range(together)])  # unmeasured: shapes and links warm up
            _features(
                rig, launch, client, [next(numbers) for _ in range(together if on_cpu else 2 * together)], together
            )


def _features(rig: Rig, launch: Served, client: httpx.Client, numbers: list[int], together: int) -> None:
    asked = [
        one for at in range(0, len(numbers), together) for one in _pictures(launch, client, numbers[at : at + together])
    ]
    wait_for(lambda: all(map(_told, _events(launch, asked))), "the stamps of all", STAMPS_S)
    each = [feature_times_ms(of) for of in _events(launch, asked)]
    told = {name: statistics.median(times[name] for times in each) for name in each[0]}
    told["overlap"] = 1 - told["exposed_ms"] / told["transfer_ms"]
    seen = {name: round(value, 4) for name, value in told.items()}
    rig.row("E→P", seen, at_once=together, pictures=len(numbers), pixels=SIDE * SIDE)


def feature_times_ms(of: dict[tuple[str, str], float]) -> dict[str, float]:
    """The times above of one request with one picture, by what `stage_events` says of it."""
    encoded, pinned, loaded = of["E", "encoded"], of["P", "feature_pinned"], of["P", "feature_loaded"]
    copy = loaded - of["P", "feature_loaded_begun"]
    times = {
        "encode": encoded - of["E", "encode_start"],
        "copy": copy,
        "transfer": pinned - encoded + copy,
        "exposed": max(0.0, pinned - max(encoded, of["P", "prefill_arrived"])) + copy,
        "encoded_to_device": loaded - encoded,
    }
    return {f"{name}_ms": 1e3 * seconds for name, seconds in times.items()}


def _told(of: dict[tuple[str, str], float]) -> bool:
    p_s = ("feature_pinned", "feature_loaded", "prefill_arrived")
    return {("E", "encode_start"), ("E", "encoded"), *(("P", event) for event in p_s)} <= of.keys()


def _events(launch: Served, asked: list[str]) -> list[dict[tuple[str, str], float]]:
    timeline = Timeline(read_stamps(launch.traces))
    return [stage_events(timeline, request) for request in asked]


def _pictures(launch: Served, client: httpx.Client, numbers: list[int]) -> list[str]:
    """Request ids."""

    def ask(number: int) -> str:
        picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": demo_image(number, SIDE).url}}
        messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is in the picture?"}]}]
        body = {"model": launch.model, "messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = client.post(f"{launch.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text[:1000]
        return answer.headers["x-request-id"]

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(ask, numbers))
