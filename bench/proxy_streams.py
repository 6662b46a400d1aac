"""2 000 streams at once: each a token a second, opened one after another within some seconds, all to end well.

How many were really open together comes from the answers themselves: between its first byte and its end a stream is
open. Memory per stream is what the proxy holds more when all are open than before the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.flow_process import FlowGenerator
from bench.flows import GOOD, Flow, Outcome
from bench.front_door import held, until
from bench.goals import Goal
from bench.proxy_part import Found, Options, Part
from bench.proxy_speed import simulated
from bench.resident import Resident, resident
from bench.scenario_bodies import text
from bench.statistic import percentile
from deploy.placement_table import table

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


def measure(options: Options) -> Found:
    stay_s = 20.0 if options.quick else 60.0
    ramp_s = STREAMS / OPENED_PER_S
    answer = round((ramp_s + stay_s) / STEP_S)
    with simulated(LAYOUT, PROFILE) as launch, FlowGenerator() as generator:
        pids = launch.cpu_parts["proxy"]
        generator.run(launch.url, [_flow(launch.model, [0.0] * 20, 2)], limit_s=LIMIT_S)  # first-time imports
        before = resident(pids)
        dues = [turn / OPENED_PER_S for turn in range(STREAMS)]
        generator.start(launch.url, [_flow(launch.model, dues, answer)], limit_s=LIMIT_S)
        seen = [before]
        end = time.monotonic() + ramp_s + stay_s
        while time.monotonic() < end:
            seen.append(resident(pids))
            time.sleep(LOOK_S)
        run = generator.finish()
        until(lambda: not held(launch.url), EMPTY_S)
        after = resident(pids)
        still_held = held(launch.url)
    peak = max(seen, key=lambda memory: memory.rss_mb)
    at_once = most_at_once(run.outcomes)
    bad = [one for one in run.outcomes if one.verdict != GOOD]
    figures = {
        "streams_at_once": float(at_once),
        "streams_failed": float(len(bad)),
        "streams_held_after": float(sum(still_held.values())),
        "rss_kb_per_stream": round((peak.rss_mb - before.rss_mb) * 1024 / max(at_once, 1), 2),
        "uss_kb_per_stream": round((peak.uss_mb - before.uss_mb) * 1024 / max(at_once, 1), 2),
        "streams_first_p99_ms": round(percentile([one.first_s for one in run.outcomes], 99) * 1e3, 1),
    }
    said = sorted({f"{one.verdict}: {one.said}" for one in bad})[:5]
    shown = _table(at_once, len(bad), before, peak, after)
    return Found(figures, [{"errors": said, "held": still_held}], "\n".join([shown, *said]))


PART = Part(
    "streams",
    f"{STREAMS} slow streams at once",
    measure,
    (
        Goal("streams_at_once", ">=", float(STREAMS), "open together, each between its first byte and its end"),
        Goal("streams_failed", "==", 0.0),
        Goal("streams_held_after", "==", 0.0),
    ),
)


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most streams that were open at the same moment."""
    turns = sorted(
        [(one.first, 1) for one in outcomes if one.begun] + [(one.ended, -1) for one in outcomes if one.begun]
    )
    most = now = 0
    for _, change in turns:
        now += change
        most = max(most, now)
    return most


def _flow(model: str, dues: Sequence[float], answer: int) -> Flow:
    return Flow("stream", [text(model, tokens=16, answer=answer, stream=True)], dues)


def _table(at_once: int, bad: int, before: Resident, peak: Resident, after: Resident) -> str:
    lines = [
        ("streams open at once", "failed", "RSS MiB before", "at the peak", "after"),
        (str(at_once), str(bad), *(f"{memory.rss_mb:.1f}" for memory in (before, peak, after))),
    ]
    return table(lines)
