"""Requests as a file of Chrome's trace event format, which Perfetto opens. Pure.

A track ("process") for each front door and instance; on it a row ("thread") for each request, and another one wherever
two of its spans overlap without one being within the other, which no row can show. What a front door has noted is its
record; what happened within a stage are its stamps, where they are made. Arrows lead from a front door to its calls.

All times are by the clock of whoever controls the deployment: those of other hosts are moved by what is between the two
clocks, and a track's label says by how much that may be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from deploy.front.traced import NodeTrace
from epd_serve.errors import EpdError
from epd_serve.phases.join import spans_of_stamps
from epd_serve.phases.stamps import Stamp, Timeline
from epd_serve.trace import PROXY
from proxy.records.record import CALLS, SPAN_NAMES

NS = 1_000_000_000
NAME_CHARS = 12

HEAD = ("id", "client_id", "outcome", "code", "path", "attempts", "model", "items", "tokens", "finish", "phases_ms")
SHOWN = ("at_s", "s", "event")
"""Of an event, what its place and its name say."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Slice:
    """What lasted, on a track, in nanoseconds; a moment where `end` is None. `called`: a front door's call of an
    instance."""

    track: str
    name: str
    begin: int
    end: int | None
    more: Json = field(default_factory=dict)
    called: bool = False


def trace_file(requests: Sequence[Json], nodes: Sequence[NodeTrace]) -> dict[str, Any]:
    """Args:
        requests: as `GET /requests/NAME` tells them. nodes: as `GET /traces`, of these requests.

    Raises:
        EpdError: a node of a request has not said what its clock is.
    """
    clocks = {node.node: node for node in nodes}
    moved = [replace(stamp, t=stamp.t + node.offset_s) for node in nodes for stamp in node.stamps]
    timeline = Timeline(sorted(moved, key=lambda stamp: stamp.t))
    where = {stamp.instance: node.node for node in nodes for stamp in node.stamps if stamp.instance != PROXY}
    drawn: list[tuple[Json, list[Slice]]] = []
    for request in requests:
        where[request["door"]] = node = request["door"].rpartition("/")[0]  # of `n1/front.0`; "" of `front.0`
        if node not in clocks:
            raise EpdError(f"node {node} of request {request['id']} does not answer")
        began = _ns(request["clock"] + clocks[node].offset_s)
        drawn.append((request, [*_recorded(request, began), *_stamped(timeline.stamps(request["id"]))]))
    doors, names = ({request["door"] for request in requests}, {one.track for _, slices in drawn for one in slices})
    tracks = {name: number for number, name in enumerate([*sorted(doors), *sorted(names - doors)], start=1)}
    zero = min((one.begin for _, slices in drawn for one in slices), default=0)
    events = [event for name, pid in tracks.items() for event in _heading(name, pid, clocks.get(where.get(name, "")))]
    rows, arrows = itertools.count(1), itertools.count(1)
    for request, slices in drawn:
        events += _events(request, slices, tracks, zero, rows, arrows)
    first = min(requests, key=lambda one: one["began"], default=None)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "began": datetime.fromtimestamp(first["began"], UTC).isoformat() if first is not None else "",
            "clocks": [
                {"node": node.node, "offset_s": node.offset_s, "uncertainty_s": node.uncertainty_s} for node in nodes
            ],
        },
    }


def _recorded(request: Json, began: int) -> Iterator[Slice]:
    """What its front door has noted: the request itself, what it did, what it chose."""
    door = request["door"]
    yield Slice(door, request["endpoint"], began, began + _ns(request["total_s"]), {key: request[key] for key in HEAD})
    for event in request["events"]:
        what, end, called = event["event"], began + _ns(event["at_s"]), event["event"] in CALLS
        more = {key: value for key, value in event.items() if key not in SHOWN and value not in ("", None)}
        if "s" in event:
            begin = max(began, end - _ns(event["s"]))  # both are rounded
            name = SPAN_NAMES.get(what, _plain(what))
            yield Slice(event["stage"] if called else door, name, begin, end, more, called)
        else:
            yield Slice(door, _plain(what), end, None, more)
    for choice in request["choices"]:
        more = {key: choice[key] for key in ("chosen", "why", "policy")}
        yield Slice(door, f"choice: {choice['work']}", began + _ns(choice["at_s"]), None, more)


def _stamped(stamps: Sequence[Stamp]) -> Iterator[Slice]:
    """What happened within stages."""
    for span in spans_of_stamps(stamps):
        if span.instance != PROXY:
            yield Slice(span.instance, span.phase.value, _ns(span.begin), _ns(span.end))
    for stamp in stamps:
        if stamp.instance != PROXY:
            more = {"subject": stamp.subject, **stamp.more}
            yield Slice(stamp.instance, _plain(stamp.event), _ns(stamp.t), None, more)


def _events(
    request: Json,
    slices: Sequence[Slice],
    tracks: Mapping[str, int],
    zero: int,
    rows: Iterator[int],
    arrows: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """Of one request, with rows of its own on each track; those of its front door are the first."""
    title = {"name": (request["client_id"] or request["id"])[:NAME_CHARS]}
    door_row = None
    for track in dict.fromkeys(one.track for one in slices):
        own = [one for one in slices if one.track == track]
        for at, layer in enumerate(_layers([one for one in own if one.end is not None]) or [[]]):
            here: dict[str, Any] = {"pid": tracks[track], "tid": next(rows)}
            door_row = door_row or here
            yield {"ph": "M", "name": "thread_name", **here, "args": title}
            moments = [one for one in own if one.end is None] if at == 0 else []
            for one in (*layer, *moments):
                ts = (one.begin - zero) / 1000
                what = {"cat": "request", "name": one.name, **here, "ts": ts, "args": dict(one.more)}
                if one.end is None:
                    yield {"ph": "i", "s": "t", **what}
                else:
                    yield {"ph": "X", **what, "dur": (one.end - one.begin) / 1000}
                if one.called:
                    arrow = {"cat": "call", "name": "call", "id": next(arrows), "ts": ts}
                    yield {"ph": "s", **arrow, **door_row}
                    yield {"ph": "f", "bp": "e", **arrow, **here}


def _layers(slices: Iterable[Slice]) -> list[list[Slice]]:
    """As few rows as it takes for those of one to lie apart or within each other."""
    layers: list[tuple[list[Slice], list[int]]] = []
    for one in sorted(slices, key=lambda one: (one.begin, -(one.end or 0))):
        assert one.end is not None, "a moment overlaps with nothing"
        for layer, open_ends in layers:
            while open_ends and open_ends[-1] <= one.begin:
                open_ends.pop()
            if not open_ends or one.end <= open_ends[-1]:
                layer.append(one)
                open_ends.append(one.end)
                break
        else:
            layers.append(([one], [one.end]))
    return [layer for layer, _ in layers]


def _heading(track: str, pid: int, node: NodeTrace | None) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    if node is not None and node.node:
        label = f"node {node.node}, clock ± {1000 * node.uncertainty_s:.3f} ms"
        yield {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}}


def _plain(event: str) -> str:
    return event.replace("_", " ")


def _ns(seconds: float) -> int:
    return round(seconds * NS)
