"""What decodes of a PD feel of features that come to its device meanwhile, on stages that run. Part of `transfer ep`.

Real: E-PD as a user starts it, with the model and the feature sizes of `idle_prefill`. PD decodes one long answer, and
has no place for another request: images in 4K that are sent meanwhile are encoded, and their features come to PD, while
their requests wait for the answer's end. So no prefill is in the way, which would be longer than any copy.

    alone      gaps between the ends of PD's decode steps, nothing else being asked
    encoding   the same while E encodes as many images, which nobody asks PD for
    beside     the same while their features come to PD, from the first image on until the last feature is there

PD's engine, with all of its threads, has the cores of its device to itself; all else that runs (encoder, servers,
proxy, this client) has the others. So gaps are those of PD's steps: tokens on their way to a client share cores with
the encoder, and the figures that begin with `token` say what that does. Cores share memory, and in a virtual machine
often a physical core: what that takes from PD while E computes is in `encoding` and in `beside`.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import numpy as np

from bench.clients.results import RequestRecord
from bench.clients.sender import ask
from bench.micro.cores import kept_apart
from bench.micro.ep.idle_prefill import LAYOUT, ROOM, SIDES, STAMPS_S, WIDE
from bench.micro.measurement import Goal, Row, in_turns
from bench.micro.rows import grouped
from bench.served import Served, scratch, served
from bench.workloads.synthetic import image_body, text_body
from epd_serve.demo.presets import write_preset
from epd_serve.endpoint import socket_path
from epd_serve.errors import StageError
from epd_serve.phases.stamps import read_stamps
from epd_serve.trace import STEP

STAGE_ARGS = (
    f"all:--dtype float32 --max-model-len {ROOM} --max-num-batched-tokens {ROOM} --no-enable-prefix-caching",
    "PD:--max-num-seqs 1",
)
PROMPT_TOKENS, ANSWER_TOKENS = 32, 600
IMAGES = 3
ENCODE_S = 120.0
GAP_P = 99
KINDS = ("alone", "encoding", "beside")
GOALS = (Goal("decode_gap_p99_beside_features", "<=", 1.1, "a stream of its own, and nothing in the step"),)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each answer: P99 of its gaps, alone or beside images. The first is not counted."""
    with scratch() as folder:
        write_preset(folder / "model", WIDE)
        flags = [word for words in STAGE_ARGS for word in ("--stage-args", words)]
        with served(LAYOUT, [str(folder / "model"), *flags]) as launch:
            engine = launch.cpu_parts["PD0/engine"]
            others = [pid for part in launch.cpu_parts.values() for pid in part if pid not in engine]
            with kept_apart(engine, others):
                _gaps(launch, "beside", 0)
                for turn, kind in in_turns(KINDS, arguments.rounds, arguments.budget_s):
                    yield {"kind": kind, "round": turn, **_gaps(launch, kind, turn + 1)}


def _gaps(launch: Served, kind: str, turn: int) -> dict[str, float]:
    """Of one answer, while images of this turn's own are encoded, and come to PD.

    `features`: so many, before it ended.
    """
    answers: list[RequestRecord] = []
    body = text_body(launch.model, tokens=PROMPT_TOKENS, answer=ANSWER_TOKENS, stream=True, seed=turn)
    decoding = threading.Thread(target=lambda: answers.append(ask(launch.url, {**body, "ignore_eos": True})))
    decoding.start()
    time.sleep(0.2)  # it has begun to decode
    begun = time.monotonic()
    asking: list[threading.Thread] = []
    if kind != "alone":
        seeds = range((2 * turn + KINDS.index(kind)) * IMAGES, (2 * turn + KINDS.index(kind) + 1) * IMAGES)
        send, url = (ask, launch.url) if kind == "beside" else (_encode, launch.stage_urls("E")[0])
        bodies = [image_body(launch.model, side=SIDES["4k"], answer=1, stream=send is ask, seed=seed) for seed in seeds]
        asking = [threading.Thread(target=send, args=(url, body)) for body in bodies]
    for one in asking:
        one.start()
    for one in (decoding, *asking):
        one.join()
    time.sleep(STAMPS_S)
    stamps, ends = read_stamps(launch.traces), {"encoding": "feature_put", "beside": "feature_pinned"}
    done = [stamp.t for stamp in stamps if stamp.event == ends.get(kind) and stamp.t > begun]
    if not answers or len(done) < len(asking):
        raise StageError(f"{len(done)} of {len(asking)} features came, {len(answers)} answers", stage=LAYOUT)
    until = done[IMAGES - 1] if asking else answers[0].token_s[-1]
    steps = [stamp.t for stamp in stamps if (stamp.instance, stamp.event) == ("PD0", STEP) and stamp.more["decodes"]]
    gaps_ms, token_gaps_ms = (_gaps_ms(times, begun, until) for times in (steps, answers[0].token_s))
    found = {"gap_p99_ms": gaps_ms, "token_gap_p99_ms": token_gaps_ms}
    counts = {"gaps": len(gaps_ms), "features": sum(at <= steps[-1] for at in done[: len(asking)])}
    return {**{name: round(float(np.percentile(gaps, GAP_P)), 4) for name, gaps in found.items()}, **counts}


def _encode(stage_url: str, body: Mapping[str, Any]) -> None:
    """Has an encoder encode an image that nobody else hears of. Its answer is empty."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path(stage_url)), timeout=ENCODE_S) as client:
        client.post("http://stage/v1/chat/completions", json=body).raise_for_status()


def _gaps_ms(times_s: Sequence[float], since: float, until: float) -> list[float]:
    """Between those that fall into this time."""
    within = [at for at in times_s if since <= at <= until]
    if len(within) < 2:
        raise StageError("the answer was over before a feature came", stage=LAYOUT)
    return [1e3 * (later - at) for at, later in pairwise(within)]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`decode_gap_p99_beside_features`: beside over alone, of medians; `decode_gap_p99_beside_encoding`; the same of
    tokens at the client; and the times."""
    named: dict[str, float] = {}
    for of, name in (("decode", "gap_p99_ms"), ("token", "token_gap_p99_ms")):
        found = {
            kind: float(np.median([row[name] for row in own]))
            for (kind,), own in grouped(rows, "kind").items()
            if all(name in row for row in own)
        }
        named |= {f"{of}_gap_p99_ms_{kind}": ms for kind, ms in found.items()}
        for kind, what in (("beside", "features"), ("encoding", "encoding")):
            if found.get("alone") and kind in found:
                named[f"{of}_gap_p99_beside_{what}"] = found[kind] / found["alone"]
    return named
