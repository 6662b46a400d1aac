"""`epd-bench transfer ep`: what of the E→P transfer a request sees, and what the store costs beyond moving the bytes.

In parts (`--only`), whose rows are told apart by `part`:

    transfers   features through E→P links beside an emulated prefill, after EPD-Serve's Table 3; events
    idle        what a request waits for its feature on stages that run, at a P with nothing else to do
    gaps        what decodes feel of features that come to their device meanwhile
    store       put and get of the arena over a plain copy, a fetch from Mooncake over its own client's
    duplicates  encodes of one image that many clients send at once, behind two proxies
    fetched     bytes that four P and four D fetch, over those that they need
    tiles       the first token after a 4K image whose tiles two encoders share, over one encoder
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from bench.micro.ep import decode_gaps, duplicates, fetched, idle_prefill, store_speed, tiles, transfers
from bench.micro.measurement import Measurement, Row, Usually, flag, one_of, several, whole
from bench.micro.rows import grouped

PARTS = {
    "transfers": transfers,
    "idle": idle_prefill,
    "gaps": decode_gaps,
    "store": store_speed,
    "duplicates": duplicates,
    "fetched": fetched,
    "tiles": tiles,
}
"""Each with `measure`, from flags to rows, and `figures`, from these to named numbers."""
KIND = "real processes, bytes, sockets, stores and stages; in `transfers` emulated prefill (scheduling latency)"
FLAGS = {
    "--only": flag("parts of it", tuple(PARTS), several(one_of(*PARTS))),
    "--rounds": flag("of all but the store's", Usually(12, quick=4), whole()),
    **transfers.FLAGS,
}
SETTINGS = {"budget_s": Usually(86_400.0, quick=30.0), **transfers.SETTINGS, **store_speed.SETTINGS}
"""budget_s: after so long a part begins no further round."""


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of the parts that were asked for."""
    for name in arguments.only:
        yield from ({"part": name, **row} for row in PARTS[name].measure(arguments))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Those of the parts that there are. A row that names none is of a result from before there were others."""
    named: dict[str, float] = {}
    for (part,), own in grouped(({"part": "transfers", **row} for row in rows), "part").items():
        named |= PARTS[part].figures(own)
    return named


MEASUREMENT = Measurement(
    quick="4 rounds, 2 on a slow machine",
    flags=FLAGS,
    settings=SETTINGS,
    about=lambda arguments: {"kind": KIND},
    measure=measure,
    figures=figures,
    goals=(
        *transfers.GOALS,
        *idle_prefill.GOALS,
        *decode_gaps.GOALS,
        *store_speed.GOALS,
        *fetched.GOALS,
        *tiles.GOALS,
    ),
    required=duplicates.GOALS,
)
add_arguments = MEASUREMENT.add_arguments
