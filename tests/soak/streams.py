"""`python -m tests.soak.streams`: 2 000 streams at once, each a token a second, opened within 20 s, all to end well.

How many were really open together comes from the answers themselves: between its first byte and its end a stream is
open. Memory per stream is what the proxy holds more when all are open than before the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.measurement import Goal
from bench.served import simulated
from bench.statistic import percentile
from bench.workloads.synthetic import text_body
from tests.soak.front_door import held, until
from tests.soak.harness import Result, Soak
from tests.soak.resident import resident

STREAMS = 2_000
LAYOUT = "1P-2D"
STEP_S = 1.0
PROFILE = {
    "prefill": {"setup_s": 0.001},
    "decode_step_s": [[1, STEP_S]],
    "capacity": {"max_running": 1024, "kv_tokens": 1 << 20},
}
OPENED_PER_S = 100.0
LOOK_S = 0.5
LIMIT_S = 240.0
EMPTY_S = 20.0


def measure(arguments: argparse.Namespace) -> Result:
    stay_s = 20.0 if arguments.quick else 60.0
    ramp_s = STREAMS / OPENED_PER_S
    with simulated(LAYOUT, PROFILE) as launch, SenderProcess() as sender:
        pids = launch.cpu_parts["proxy"]

        def flow(dues: Sequence[float], answer: int) -> Flow:
            return Flow(requests([text_body(launch.model, tokens=16, answer=answer, stream=True)]), dues=dues)

        sender.run(launch.url, flow([0.0] * 20, 2), limit_s=LIMIT_S)  # first-time imports
        before = resident(pids)
        dues = [turn / OPENED_PER_S for turn in range(STREAMS)]
        sender.start(launch.url, flow(dues, round((ramp_s + stay_s) / STEP_S)), limit_s=LIMIT_S)
        seen = [before]
        end = time.monotonic() + ramp_s + stay_s
        while time.monotonic() < end:
            seen.append(resident(pids))
            time.sleep(LOOK_S)
        records = sender.finish().rows
        until(lambda: not held(launch.url), EMPTY_S)
        after, still_held = resident(pids), held(launch.url)
    peak, at_once = max(seen, key=lambda memory: memory.rss_mb), most_at_once(records)
    bad = [one for one in records if not one.ok]
    figures = {
        "streams_at_once": float(at_once),
        "streams_failed": float(len(bad)),
        "streams_held_after": float(sum(still_held.values())),
        "rss_kb_per_stream": round((peak.rss_mb - before.rss_mb) * 1024 / max(at_once, 1), 2),
        "uss_kb_per_stream": round((peak.uss_mb - before.uss_mb) * 1024 / max(at_once, 1), 2),
        "streams_first_p99_ms": round(percentile([one.wait_s() for one in records], 99) * 1e3, 1),
    }
    errors = sorted({f"{one.fault}: {one.error}" for one in bad})[:5]
    memory = ", ".join(
        f"{name} {one.rss_mb:.1f}" for name, one in {"before": before, "peak": peak, "after": after}.items()
    )
    return figures, [{"errors": errors, "held": still_held}], "\n".join([f"resident MiB: {memory}", *errors])


SOAK = Soak(
    "streams",
    f"{STREAMS} slow streams at once",
    measure,
    (
        Goal("streams_at_once", ">=", float(STREAMS), "open together, each between its first byte and its end"),
        Goal("streams_failed", "==", 0.0),
        Goal("streams_held_after", "==", 0.0),
    ),
)


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """Returns the most streams that were open at the same moment."""
    begun = [one for one in records if one.first_byte_s is not None]
    turns = sorted([(one.first_byte_s, 1) for one in begun] + [(one.ended_s, -1) for one in begun])
    most = now = 0
    for _, change in turns:
        now += change
        most = max(most, now)
    return most


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
