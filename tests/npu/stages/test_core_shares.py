"""What every worker got of its device's cores, and what an encode storm does to decoding, with shares and without."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.bodies import chat, png
from tests.npu.card import Card
from tests.npu.report import Report
from tests.npu.stages.launches import CardServing, over

SHARED = "(E-PD), core shares", "(E-P)-D, core shares"
DECODED = 96  # tokens per stream; the gaps between them are TPOT
STORM = 4  # requests with a picture of its own each, at any time
PICTURE = 448
STORM_S = 60.0


def granted(launch: CardServing) -> dict[str, list[dict[str, Any]]]:
    """By instance, what each of its workers read back; empty without a share."""
    return {name: entry["cores"] for name, entry in launch.instances().items()}


@over(*SHARED)
def test_every_worker_reads_back_its_share(launch: CardServing, card: Card, report: Report) -> None:
    if not launch.core_share:
        pytest.skip("a CPU with fewer cores than stages on a virtual device; cards have enough")
    told = granted(launch)
    report.figure("core_grants", told, launch=launch.name)
    shared = [name for name in told if name != "D0"]  # which has a device to itself, and so no limit
    assert all(len(told[name]) == 1 for name in shared), told
    assert not told.get("D0")
    (first, second) = (told[name][0] for name in shared)
    assert set(first["cores"]) == set(second["cores"])
    assert all(count >= 1 for one in (first, second) for count in one["cores"].values())
    if card.kind == "npu":
        for kind, whole in first["of"].items():
            assert first["cores"][kind] + second["cores"][kind] <= whole
    if card.kind != "cuda":  # without MPS nothing holds a CUDA process to its share, and the launch says so
        assert first["enforced"] and second["enforced"]


@over("(E-PD)", "(E-PD), core shares")
def test_decoding_goes_on_in_an_encode_storm(launch: CardServing, report: Report) -> None:
    """Its pace is printed, not judged; that it ends, and how many pictures were encoded meanwhile, is."""
    alone = arrivals_s(launch)
    with storm(launch) as served:
        crowded = arrivals_s(launch)
    assert served(), "no picture was answered during the storm"
    for name, times in (("alone", alone), ("in_an_encode_storm", crowded)):
        gaps_ms = sorted(1e3 * (later - earlier) for earlier, later in pairwise(times))
        told = {"longest_gap_ms": round(gaps_ms[-1], 2), "tokens": len(times)}
        report.figure(f"tpot_ms_{name}", round(tpot_ms(times), 3), launch=launch.name, **told)
    report.figure("tpot_in_an_encode_storm_over_alone", round(tpot_ms(crowded) / tpot_ms(alone), 2), launch=launch.name)
    report.figure("pictures_answered_in_the_storm", served(), launch=launch.name)


def arrivals_s(launch: CardServing) -> list[float]:
    """When the tokens of one streamed answer came."""
    body = {**chat("Hello", max_tokens=DECODED, ignore_eos=True), "stream": True}
    arrived = []
    with launch.client.stream("POST", f"{launch.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()[:500]
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: "))["choices"]:
                arrived.append(time.monotonic())
    assert len(arrived) > DECODED / 2, "fewer events than tokens: nothing to measure"
    return arrived


def tpot_ms(times: list[float]) -> float:
    """Time per output token, the first one aside; single gaps tell how events bunch on their way, not how fast D is."""
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


@contextmanager
def storm(launch: CardServing) -> Iterator[Callable[[], int]]:
    """Pictures that nobody has seen, `STORM` at a time, one token asked of each. Yields how many were answered."""
    over_now, numbers, answered = threading.Event(), count(), list[int]()
    until = time.monotonic() + STORM_S

    def keep_asking() -> None:
        while not over_now.is_set() and time.monotonic() < until:
            body = chat("What is in the picture?", noise(next(numbers)), max_tokens=1)
            if launch.post("/v1/chat/completions", body).status_code == 200:
                answered.append(1)

    with ThreadPoolExecutor(STORM) as pool:
        asking = [pool.submit(keep_asking) for _ in range(STORM)]
        try:
            yield lambda: len(answered)
        finally:
            over_now.set()
        for one in asking:
            one.result(timeout=STORM_S)


def noise(seed: int) -> bytes:
    """A picture of random pixels: no two are equal, so none is known."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)
    return png(Image.fromarray(pixels))
