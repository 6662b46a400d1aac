"""What decodes of a PD feel of features that come to its device meanwhile, on stages that run. Part of `transfer ep`.

Real: E-PD as a user starts it, with the model and the feature sizes of `idle_prefill`. PD decodes one long answer, and
has no place for another request: images in 4K that are sent meanwhile are encoded, and their features go to PD's slab,
while their requests wait for the answer's end. So no prefill is in the way, which would be longer than any copy.

    alone     gaps between the answer's tokens, nothing else being asked
    beside    the same, from the first image on until the last feature is there
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from bench.clients.results import RequestRecord
from bench.clients.sender import ask
from bench.micro.ep.idle_prefill import LAYOUT, ROOM, SIDES, WIDE
from bench.micro.measurement import Goal, Row, in_turns
from bench.micro.rows import grouped
from bench.served import Served, scratch, served
from bench.workloads.synthetic import image_body, text_body
from epd_serve.demo.presets import write_preset
from epd_serve.errors import StageError
from epd_serve.phases.stamps import read_stamps

STAGE_ARGS = (
    f"all:--dtype float32 --max-model-len {ROOM} --max-num-batched-tokens {ROOM} --no-enable-prefix-caching",
    "PD:--max-num-seqs 1",
)
PROMPT_TOKENS, ANSWER_TOKENS = 32, 600
IMAGES = 3
GAP_P = 99
GOALS = (Goal("decode_gap_p99_beside_features", "<=", 1.1, "a stream of its own, and nothing in the step"),)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each answer: P99 of its gaps, alone or beside images. The first of each kind is not counted."""
    with scratch() as folder:
        write_preset(folder / "model", WIDE)
        flags = [word for words in STAGE_ARGS for word in ("--stage-args", words)]
        with served(LAYOUT, [str(folder / "model"), *flags]) as launch:
            _beside(launch, 0)
            for turn, kind in in_turns(["alone", "beside"], arguments.rounds, arguments.budget_s):
                gaps_ms = _alone(launch, turn) if kind == "alone" else _beside(launch, turn + 1)
                gap_ms = float(np.percentile(gaps_ms, GAP_P))
                yield {"kind": kind, "round": turn, "gap_p99_ms": round(gap_ms, 4), "gaps": len(gaps_ms)}


def _alone(launch: Served, seed: int) -> list[float]:
    return _gaps_ms(_answer(launch, seed))


def _answer(launch: Served, seed: int) -> RequestRecord:
    body = text_body(launch.model, tokens=PROMPT_TOKENS, answer=ANSWER_TOKENS, stream=True, seed=seed)
    return ask(launch.url, {**body, "ignore_eos": True})


def _beside(launch: Served, turn: int) -> list[float]:
    answers: list[RequestRecord] = []
    decoding = threading.Thread(target=lambda: answers.append(_answer(launch, turn)))
    decoding.start()
    time.sleep(0.2)  # it has begun to decode
    begun = time.monotonic()
    seeds = range(1 + turn * IMAGES, 1 + (turn + 1) * IMAGES)
    bodies = [image_body(launch.model, side=SIDES["4k"], answer=1, stream=True, seed=seed) for seed in seeds]
    asking = [threading.Thread(target=ask, args=(launch.url, body)) for body in bodies]
    for one in asking:
        one.start()
    for one in (decoding, *asking):
        one.join()
    there = [stamp.t for stamp in read_stamps(launch.traces) if stamp.event == "feature_pinned" and stamp.t > begun]
    if not answers or len(there) < IMAGES:
        raise StageError(f"{len(there)} of {IMAGES} features came, {len(answers)} answers", stage=LAYOUT)
    return _gaps_ms(answers[0], begun, there[IMAGES - 1])


def _gaps_ms(record: RequestRecord, since: float = 0.0, until: float = float("inf")) -> list[float]:
    """Between tokens that came in this time."""
    within = [at for at in record.token_s if since <= at <= until]
    if len(within) < 2:
        raise StageError("the answer was over before a feature came", stage=LAYOUT)
    return [1e3 * (later - at) for at, later in pairwise(within)]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`decode_gap_p99_beside_features`: beside over alone, of medians; and the two."""
    named = {
        f"decode_gap_p99_ms_{kind}": float(np.median([row["gap_p99_ms"] for row in own]))
        for (kind,), own in grouped(rows, "kind").items()
    }
    alone, beside = named.get("decode_gap_p99_ms_alone"), named.get("decode_gap_p99_ms_beside")
    if alone and beside:
        named["decode_gap_p99_beside_features"] = beside / alone
    return named
