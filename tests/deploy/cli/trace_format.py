"""What a file of the trace event format has to be for Perfetto to show it, held strictly and by hand: the library that
would judge it (`perfetto`'s trace processor) fetches a program of its own when it is first used."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

KNOWN = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "process_labels": "labels",
    "thread_name": "name",
}


def check(text: str) -> list[dict[str, Any]]:
    """The events of a file. Raises AssertionError where Perfetto would drop or misplace one."""
    whole = json.loads(text, parse_constant=lambda name: 1 / 0)  # no NaN, no Infinity
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"} and whole["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = whole["traceEvents"]
    named: dict[int, str] = {}
    rows: dict[int, int] = {}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        kind = event["ph"]
        assert set(event) - {"ph"} == KNOWN[kind] | ({"tid"} if event["name"] == "thread_name" else set()), event
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event.get("tid", 0)) is int
        if kind == "M":
            assert list(event["args"]) == [METADATA[event["name"]]]
            if event["name"] == "process_name":
                assert event["pid"] not in named
                named[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                assert event["tid"] not in rows, "rows have numbers of their own"
                rows[event["tid"]] = event["pid"]
            continue
        assert event["pid"] in named and rows[event["tid"]] == event["pid"], "named before it is used"
        assert math.isfinite(event["ts"]) and (kind != "i" or event["s"] == "t")
        if kind == "X":
            assert event["dur"] >= 0 and math.isfinite(event["dur"])
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif kind in "sf":
            arrows[event["id"]].append(event)
    for one in spans.values():
        nests(one)
    for both in arrows.values():
        start, end = sorted(both, key=lambda event: event["ph"], reverse=True)
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e") and start["ts"] <= end["ts"]
        for event in both:
            assert any(a - 1e-3 <= event["ts"] <= b + 1e-3 for a, b in spans[event["pid"], event["tid"]]), "on a span"
    return events


def nests(spans: list[tuple[float, float]]) -> None:
    """Those of one row are apart or within each other, to the nanosecond."""
    open_ends: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin + 5e-4:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 5e-4, (begin, end, open_ends)
        open_ends.append(end)
