"""Features through E→P links in the shape of EPD-Serve's Table 3. A part of `epd-bench transfer ep`.

Real: the features' bytes ([tokens, 3584] fp16, random), an encoder and a prefill process per mode with the stages' own
producer and consumer, their threads and sockets, the arena, Mooncake with its master over TCP on loopback. No vision
tower runs and no language model: P's compute is emulated, as a scheduling latency during which its engine thread waits
for the device and asks for nothing (`bench/micro/ep/stages.py`). Models of P:

    waiting     the request waits already: the bare transfer, nothing to hide behind
    busy        the scheduling latency that EPD-Serve measured for the same image, on its NPUs

    transfer    admission, with a request that was waiting already, minus the end of encoding: nothing hides anything
    scheduling  from the end of encoding to the moment at which P could admit the request if its feature were local
    exposed     (admission time) - (admission time of the same request with its feature already local)
    overlap     1 - exposed / transfer, of the medians, between 0 and 1

Our transfers are those of this machine, so `busy` mixes two machines: it shows which transfers fit behind a scheduler
like the paper's, and is no claim to be faster than it. All modes take turns within a round, in an order drawn anew.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.micro.ep.links import MODES, WAITING, installed_modes, links
from bench.micro.measurement import Goal, Row, Usually, flag, in_turns, one_of, several
from bench.micro.rows import grouped, median
from bench.served import scratch
from bench.statistic import percentile
from epd_serve.phases.stamps import Stamp, read_stamps


class Table3Row(NamedTuple):
    """A feature's way from E to P, as EPD-Serve prints it of openPangu-7B-VL on an Atlas 800I A2.

    Attributes:
        tokens: rows of the feature, [tokens, 3584]. The paper has 529 for 640x960, where 28x28 pixels would give 782.
        overlap: as printed. 1 - (729.724 - 728.109) / 729.724 is its 99.78 %.
    """

    picture: str
    tokens: int
    transfer_ms: float
    scheduling_ms: float
    overlap: float

    @property
    def exposed_ms(self) -> float:
        """What follows from the two latencies."""
        return max(0.0, self.transfer_ms - self.scheduling_ms)


TABLE_3 = (
    Table3Row("280x280", 100, 8.145, 30.803, 1.0),
    Table3Row("560x560", 400, 15.819, 42.406, 1.0),
    Table3Row("640x960", 529, 17.019, 49.549, 1.0),
    Table3Row("720p", 1196, 38.776, 81.028, 1.0),
    Table3Row("1080p", 2691, 80.771, 151.77, 1.0),
    Table3Row("4k", 16206, 729.724, 728.109, 0.9978),
)

IMAGES = {row.picture: row for row in TABLE_3}
BUSY = "busy"
PREFILL = {
    WAITING: dict.fromkeys(IMAGES, 0.0),
    BUSY: {row.picture: row.scheduling_ms / 1e3 for row in TABLE_3},
}
"""Models of P: its scheduling latency by image, in seconds; fixed before anything is measured."""
EVENT_TOKENS = 1
EVENTS_EVERY_S = 0.005
GOALS = (
    Goal("overlap_1080p_arena", ">=", 0.99, "the paper's 100 %, within the resolution of a measurement"),
    Goal("overlap_4k_arena", ">=", 0.9978, "the paper's 99.78 %"),
    Goal("overlap_1080p_mooncake", ">=", 0.99, "as the arena's"),
    Goal("exposed_ms_4k_arena", "<=", 1.615, "the paper's 729.724 - 728.109 ms"),
    Goal("event_p50_ms", "<=", 1.0),
    Goal("event_p99_ms", "<=", 5.0),
)
FLAGS = {
    "--pictures": flag("sizes of images", tuple(IMAGES), several(one_of(*IMAGES))),
    "--modes": flag(f"of {','.join(MODES)} (default all that are installed)", type=several(one_of(*MODES))),
}
SETTINGS = {"events": Usually(2000, quick=300)}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of features sent in every mode, and of `event_ms`: from the put in E to P having the event in hand."""
    modes = arguments.modes or installed_modes()
    tokens = {image: IMAGES[image].tokens for image in arguments.pictures}
    keys = [f"burst-{number}" for number in range(arguments.events)]
    with scratch() as folder, links(modes, [EVENT_TOKENS, *tokens.values()], folder) as opened:
        for link in opened:
            if link.mode == "arena":
                link.encode(keys, EVENT_TOKENS, EVENTS_EVERY_S)
            for image in tokens:  # each size once, unmeasured: page tables, buffers
                link.send(image, tokens[image], WAITING, 0.0, -1)
        cases = [*itertools.product(tokens, PREFILL, opened)]
        for turn, (image, model, link) in in_turns(cases, arguments.rounds, arguments.budget_s):
            yield link.send(image, tokens[image], model, PREFILL[model][image], turn)
        if "arena" in modes:
            yield from ({"event_ms": round(ms, 4)} for ms in event_latencies_ms(read_stamps(folder / "arena"), keys))


def event_latencies_ms(stamps: Sequence[Stamp], keys: Sequence[str]) -> list[float]:
    """From the end of the put in E's writer thread to P's listener having the event in hand, the first time."""
    put = {stamp.subject: stamp.t for stamp in stamps if stamp.event == "feature_put"}
    got = {stamp.subject: stamp.t for stamp in reversed(stamps) if stamp.event == "feature_event"}
    return [(got[key] - put[key]) * 1e3 for key in keys if key in got and key in put]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`transfer_ms_4k_arena`, `exposed_ms_4k_arena`, `overlap_4k_arena`, … per image and mode; `event_p50_ms`."""
    sent = grouped((row for row in rows if "mode" in row), "mode", "picture", "prefill")
    named: dict[str, float] = {}
    for mode, image, model in sent:
        if model == BUSY:
            transfer_ms = median(sent[mode, image, WAITING], "transfer_ms")
            exposed_ms = median(sent[mode, image, BUSY], "exposed_ms")
            named[f"transfer_ms_{image}_{mode}"] = transfer_ms
            named[f"exposed_ms_{image}_{mode}"] = max(0.0, exposed_ms)
            # Beyond 0 and 1 lies the noise of two measurements that were subtracted.
            named[f"overlap_{image}_{mode}"] = min(1.0, max(0.0, 1.0 - exposed_ms / transfer_ms))
    if events := [row["event_ms"] for row in rows if "event_ms" in row]:
        named |= {f"event_p{percent}_ms": percentile(events, percent) for percent in (50, 99)}
    return named
