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

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Slice:
    """What lasted, on a track, in nanoseconds. `called`: it is a front door's call of an instance."""

    track: str
    name: str
    begin: int
    end: int
    more: Json = field(default_factory=dict)
    called: bool = False


@dataclass(frozen=True)
class Mark:
    """What happened at a moment."""

    track: str
    name: str
    at: int
    more: Json


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
    where |= {one["door"]: _node(one["door"]) for one in requests}
    drawn = []
    for request in requests:
        node = _node(request["door"])
        if node not in clocks:
            raise EpdError(f"node {node} of request {request['id']} does not answer")
        began = _ns(request["clock"] + clocks[node].offset_s)
        stamps = [stamp for stamp in timeline.stamps(request["id"]) if stamp.instance != PROXY]
        drawn.append((request, _slices(request, began, timeline), [*_marks(request, began), *map(_mark, stamps)]))
    zero = min((one.begin for _, slices, _ in drawn for one in slices), default=0)
    tracks = {name: number for number, name in enumerate(_in_order(drawn), start=1)}
    events = [event for name, pid in tracks.items() for event in _heading(name, pid, clocks.get(where.get(name, "")))]
    rows, arrows = itertools.count(1), itertools.count(1)
    for request, slices, marks in drawn:
        events += _events(request, slices, marks, tracks, zero, rows, arrows)
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


def _slices(request: Json, began: int, timeline: Timeline) -> list[Slice]:
    """The request itself first."""
    door = request["door"]
    head = ("id", "client_id", "outcome", "code", "path", "attempts", "model", "items", "tokens", "finish", "phases_ms")
    whole = Slice(
        door, request["endpoint"], began, began + _ns(request["total_s"]), {key: request[key] for key in head}
    )
    slices = [whole]
    for event in request["events"]:
        if "s" not in event:
            continue
        called = event["event"] in CALLS
        end = began + _ns(event["at_s"])
        name = SPAN_NAMES.get(event["event"], _plain(event["event"]))
        track = event["stage"] if called else door
        begin = max(began, end - _ns(event["s"]))  # both are rounded
        slices.append(Slice(track, name, begin, end, _details(event), called))
    for span in spans_of_stamps(timeline.stamps(request["id"])):
        if span.instance != PROXY:
            slices.append(Slice(span.instance, span.phase.value, _ns(span.begin), _ns(span.end)))
    return slices


def _marks(request: Json, began: int) -> Iterator[Mark]:
    for event in request["events"]:
        if "s" not in event:
            yield Mark(request["door"], _plain(event["event"]), began + _ns(event["at_s"]), _details(event))
    for choice in request["choices"]:
        more = {key: choice[key] for key in ("chosen", "why", "policy")}
        yield Mark(request["door"], f"choice: {choice['work']}", began + _ns(choice["at_s"]), more)


def _mark(stamp: Stamp) -> Mark:
    return Mark(stamp.instance, _plain(stamp.event), _ns(stamp.t), {"subject": stamp.subject, **stamp.more})


def _events(
    request: Json,
    slices: Sequence[Slice],
    marks: Sequence[Mark],
    tracks: Mapping[str, int],
    zero: int,
    rows: Iterator[int],
    arrows: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """Of one request, with rows of its own on each track."""
    first_rows: dict[str, int] = {}
    name = (request["client_id"] or request["id"])[:NAME_CHARS]
    for track in dict.fromkeys([one.track for one in slices] + [one.track for one in marks]):
        layers = _layers([one for one in slices if one.track == track]) or [[]]
        for layer in layers:
            row = next(rows)
            first_rows.setdefault(track, row)
            here: dict[str, Any] = {"pid": tracks[track], "tid": row}
            yield {"ph": "M", "name": "thread_name", **here, "args": {"name": name}}
            for one in layer:
                dur = (one.end - one.begin) / 1000
                at = {**here, "ts": (one.begin - zero) / 1000}
                yield {"ph": "X", "cat": "request", "name": one.name, **at, "dur": dur, "args": dict(one.more)}
                if one.called:
                    arrow = {"cat": "call", "name": "call", "id": next(arrows)}
                    door = {"pid": tracks[request["door"]], "tid": first_rows[request["door"]], "ts": at["ts"]}
                    yield {"ph": "s", **arrow, **door}
                    yield {"ph": "f", "bp": "e", **arrow, **at}
    for mark in marks:
        here = {"pid": tracks[mark.track], "tid": first_rows[mark.track], "ts": (mark.at - zero) / 1000}
        yield {"ph": "i", "s": "t", "cat": "request", "name": mark.name, **here, "args": dict(mark.more)}


def _layers(slices: Iterable[Slice]) -> list[list[Slice]]:
    """As few rows as it takes for those of one to lie apart or within each other."""
    layers: list[tuple[list[Slice], list[int]]] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
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


def _in_order(drawn: Iterable[tuple[Json, Sequence[Slice], Sequence[Mark]]]) -> list[str]:
    """Front doors first, then the instances by name."""
    doors, tracks = set(), set()
    for request, slices, marks in drawn:
        doors.add(request["door"])
        tracks |= {one.track for one in slices} | {one.track for one in marks}
    return [*sorted(doors), *sorted(tracks - doors)]


def _heading(track: str, pid: int, node: NodeTrace | None) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    if node is not None and node.node:
        label = f"node {node.node}, clock ± {1000 * node.uncertainty_s:.3f} ms"
        yield {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}}


def _node(door: str) -> str:
    """Of `n1/front.0`; "" of `front.0`."""
    return door.rpartition("/")[0]


def _details(event: Json) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("at_s", "s", "event") and value not in ("", None)}


def _plain(event: str) -> str:
    return event.replace("_", " ")


def _ns(seconds: float) -> int:
    return round(seconds * NS)
