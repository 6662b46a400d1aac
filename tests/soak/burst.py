"""`python -m tests.soak.burst`: how long text waits while ten times as many images come.

To its first token, in the order of deadlines, and in order of arrival ("single").

2E-2P-2D of finite capacity. Text alone keeps the prefilling instances about two thirds busy and images a tenth; for
the time of the burst images ask for more than there is, so that a queue grows, and the question is who waits in it.
The same again with `--proxy admission.order=fcfs`. Each is set against the time before its own burst. A request
without a good answer counts as one that took as long as any may.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.measurement import Goal
from bench.micro.rows import table_of
from bench.served import Served, simulated
from bench.statistic import percentile
from bench.workloads.requests import Poisson, arrivals_within
from bench.workloads.synthetic import image_body, text_body
from tests.soak.harness import Result, Soak

LAYOUT = "2E-2P-2D"
PROFILE = {
    "comment": "made up: prefill is what is short, 20 000 tokens a second over two instances",
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00003},
    "prefill": {"setup_s": 0.002, "per_unit_s": 0.0001},
    "kv": {"setup_s": 0.001, "per_unit_s": 2e-11},
    "decode_step_s": [[1, 0.01], [64, 0.03]],
    "jitter": 0.05,
    "seed": 1,
    "feature_bytes_per_token": 64,
    "capacity": {"max_running": 64, "step_tokens": 1024, "kv_tokens": 65536},
}
TEXT_PER_S, TEXT_TOKENS = 40.0, 320
IMAGES_PER_S, IMAGE_SIDE = 1.0, 1344  # 48 x 48 tokens
BURST = 10.0
ANSWER = 8
SETTLE_S = 3.0
Row = dict[str, Any]
LINES = {"per modality": (), "single": ("--proxy", "admission.order=fcfs")}


def measure(arguments: argparse.Namespace) -> Result:
    before_s, burst_s = (15.0, 12.0) if arguments.quick else (60.0, 30.0)
    rows: list[Row] = []
    with SenderProcess() as sender:
        for line, flags in LINES.items():
            with simulated(LAYOUT, PROFILE, flags) as launch:
                run = sender.run(launch.url, *_flows(launch, before_s, burst_s))
            rows += phases(line, run.rows, run.begun_s + SETTLE_S, run.begun_s + SETTLE_S + before_s)
    columns = {"lines": "{line}", "requests": "{kind}", "when": "{phase}", "sent": "{requests}", "bad": "{bad}"}
    return figures(rows), rows, table_of(rows, columns | {f"p{p} ms": f"{{first_p{p}_ms:.0f}}" for p in (50, 90, 99)})


def figures(rows: Sequence[Row]) -> dict[str, float]:
    return {
        "text_p99_burst_over_idle": over_idle(rows, "per modality"),
        "text_p99_single_queue_over_idle": over_idle(rows, "single"),
        **{f"{row['kind']}_p99_{row['phase']}_{row['line'].replace(' ', '_')}_ms": row["first_p99_ms"] for row in rows},
        "burst_errors": float(sum(row["bad"] for row in rows)),
    }


def phases(line: str, records: Sequence[RequestRecord], settled_s: float, burst_at_s: float) -> list[Row]:
    """Returns a row per kind for the time before the burst and for the burst, by when a request was due."""
    rows: list[Row] = []
    for kind in ("text", "picture"):
        for phase, begin_s, end_s in (("idle", settled_s, burst_at_s), ("burst", burst_at_s, float("inf"))):
            own = [one for one in records if one.kind == kind and begin_s <= one.due_s < end_s]
            if own:
                bad = [one for one in own if not one.ok]
                waits = {f"first_p{p}_ms": percentile([one.wait_s() for one in own], p) * 1e3 for p in (50, 90, 99)}
                row = {"line": line, "kind": kind, "phase": phase, "requests": len(own), "bad": len(bad)}
                errors = sorted({f"{one.fault}: {one.error}" for one in bad})[:5]
                rows.append({**row, "errors": errors, **{name: round(ms, 2) for name, ms in waits.items()}})
    return rows


def over_idle(rows: Sequence[Row], line: str) -> float:
    """Text's p99 in the burst over that before it."""
    p99 = {row["phase"]: row["first_p99_ms"] for row in rows if row["line"] == line and row["kind"] == "text"}
    return float(round(p99["burst"] / p99["idle"], 3))


def _flows(launch: Served, before_s: float, burst_s: float) -> list[Flow]:
    calm_s, end_s = SETTLE_S + before_s, SETTLE_S + before_s + burst_s
    dues = list(arrivals_within(Poisson(IMAGES_PER_S), calm_s, seed=2))
    dues += [calm_s + due for due in arrivals_within(Poisson(IMAGES_PER_S * BURST), burst_s, seed=3)]
    texts = [text_body(launch.model, tokens=TEXT_TOKENS, answer=ANSWER, stream=True, seed=turn) for turn in range(16)]
    images = [
        image_body(launch.model, side=IMAGE_SIDE, answer=ANSWER, stream=True, seed=turn) for turn in range(len(dues))
    ]
    return [
        Flow(requests(texts), "text", dues=arrivals_within(Poisson(TEXT_PER_S), end_s, seed=1)),
        Flow(requests(images), "picture", dues=dues),
    ]


SOAK = Soak(
    "burst",
    "text's time to first token under a burst of images, and the same with a single queue",
    measure,
    (Goal("burst_errors", "<=", 0.0, "everything fits into the queues"),),
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
