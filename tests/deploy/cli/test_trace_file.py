"""A request as a file for Perfetto: by the format's rules, spans where and as long as things were, clocks moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cli.trace_file import Slice, _layers, trace_file
from deploy.front.traced import NodeTrace
from epd_serve.errors import EpdError
from epd_serve.phases.stamps import Stamp, Timeline, read_stamps
from epd_serve.trace import PROXY
from proxy.records.record import Record
from proxy.records.report import report
from tests.deploy.cli.trace_format import check, nests

RECORDED = Path(__file__).parents[2] / "bench" / "clients" / "stamps" / "(E-P)-D"


def told(record: Record, door: str = "front.0") -> dict[str, Any]:
    """As `GET /requests/NAME` tells it."""
    return {**json.loads(json.dumps(report(record))), "door": door}


def record(clock: float = 100.0, **more: Any) -> Record:
    one = Record("7f3a", "/v1/chat/completions", "order-17", outcome="200", status=200, clock=clock, **more)
    one.total_s = 1.0
    one.events = [
        (0.1, "received", {"s": 0.1}),
        (0.4, "encode_call", {"s": 0.25, "stage": "E0", "outcome": "ok"}),
        (0.42, "encoded", {"s": 0.3}),
        (0.43, "admitted", {}),
        (0.7, "prefilled", {"s": 0.26, "stage": "P0", "outcome": "ok"}),
        (1.0, "answered", {"s": 0.55, "stage": "D0", "outcome": "ok"}),
    ]
    return one


def drawn(*requests: dict[str, Any], nodes: list[NodeTrace]) -> list[dict[str, Any]]:
    return check(json.dumps(trace_file(requests, nodes)))


def tracks(events: list[dict[str, Any]]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def spans(events: list[dict[str, Any]], track: str) -> dict[str, tuple[float, float]]:
    """Begin and length in milliseconds, by name; of several the last."""
    own = [event for event in events if event["ph"] == "X" and event["pid"] == tracks(events)[track]]
    return {event["name"]: (event["ts"] / 1e3, event["dur"] / 1e3) for event in own}


def test_each_front_door_and_instance_has_a_track_with_what_it_did() -> None:
    events = drawn(told(record()), nodes=[NodeTrace()])
    assert list(tracks(events)) == ["front.0", "D0", "E0", "P0"]
    assert spans(events, "front.0") == {
        "/v1/chat/completions": (0, 1000), "body": (0, 100), "encode": pytest.approx((120, 300)),
    }  # fmt: skip
    assert spans(events, "E0") == {"encode call": pytest.approx((150, 250))}
    assert spans(events, "P0") == {"prefill call": pytest.approx((440, 260))}
    assert spans(events, "D0") == {"answer call": pytest.approx((450, 550))}
    (mark,) = (event for event in events if event["ph"] == "i")
    assert (mark["name"], mark["ts"]) == ("admitted", 430_000)
    assert sum(event["ph"] == "s" for event in events) == 3, "an arrow to each call"


@pytest.mark.parametrize("spec", ["new image", "repeated image", "text"])
def test_stamps_of_real_stages_are_spans_within_the_calls_of_their_stages(spec: str) -> None:
    requests = json.loads((RECORDED / "requests.json").read_bytes())
    (name,) = (one["id"] for one in requests if one["spec"] == spec)
    stamps = Timeline(read_stamps(RECORDED)).named(name)
    request = of_stamps(stamps)
    events = drawn(request, nodes=[NodeTrace(stamps=stamps)])
    stages = {stamp.instance for stamp in stamps} - {PROXY}
    assert stages <= set(tracks(events)) and stages >= {"P0", "D0"}
    assert {"preprocess P", "prefill queue", "prefill"} <= spans(events, "P0").keys()
    assert {"decode queue", "first token", "answer D"} <= spans(events, "D0").keys()
    assert ("encode" in spans(events, "E0")) is (spec == "new image") if "E0" in stages else spec != "new image"
    computed = [stamp.t for stamp in stamps if (stamp.instance, stamp.event) == ("D0", "computed")]
    began, took = spans(events, "D0")["first token"]
    assert began + took == pytest.approx(1e3 * (computed[0] - request["clock"]), abs=1e-3)


def of_stamps(stamps: list[Stamp]) -> dict[str, Any]:
    """The report of a request that ended when the last stamp was made."""
    own = [stamp for stamp in stamps if stamp.instance == PROXY]
    one = Record(own[0].subject, "/v1/chat/completions", outcome="200", status=200, clock=own[0].t)
    one.total_s = own[-1].t - own[0].t
    return told(one)


def test_a_host_whose_clock_is_elsewhere_is_moved_and_its_track_says_how_sure_that_is() -> None:
    stamps = [
        Stamp(5000.5, "P0", "7f3a", "received", {}),
        Stamp(5000.6, "P0", "7f3a", "handed_over", {}),
        Stamp(5000.65, "P0", "7f3a", "scheduled", {}),
    ]
    nodes = [NodeTrace("n1"), NodeTrace("n2", -4900.0, 0.0004, stamps)]
    made = trace_file([told(record(), "n1/front.0")], nodes)
    events = check(json.dumps(made))
    assert spans(events, "P0")["preprocess P"] == pytest.approx((500, 100))
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    assert labels[tracks(events)["P0"]] == "node n2, clock ± 0.400 ms"
    assert {"node": "n2", "offset_s": -4900.0, "uncertainty_s": 0.0004} in made["otherData"]["clocks"]


def test_front_doors_of_two_hosts_have_one_time() -> None:
    one, other = told(record(clock=100.0), "n1/front.0"), told(record(clock=7000.2), "n2/front.0")
    events = drawn(one, other, nodes=[NodeTrace("n1"), NodeTrace("n2", -6900.0, 0.001)])
    assert spans(events, "n1/front.0")["body"][0] == 0
    assert spans(events, "n2/front.0")["body"][0] == pytest.approx(200)


def test_a_node_whose_clock_nobody_knows_is_not_guessed_at() -> None:
    with pytest.raises(EpdError, match="n2"):
        trace_file([told(record(), "n2/front.0")], [NodeTrace("n1")])


def test_a_request_that_runs_and_one_that_was_refused_are_drawn_too() -> None:
    running = Record("1", "/v1/chat/completions", clock=100.0)
    running.total_s = 0.2
    running.note("waits", line="serve", with_stages=3)
    refused = Record("2", "/v1/chat/completions", clock=100.1, outcome="429", status=429)
    assert drawn(told(running), told(refused), nodes=[NodeTrace()])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_a_row_holds_only_what_lies_apart_or_within(times: list[tuple[int, int]]) -> None:
    slices = [Slice("P0", "x", begin, begin + length) for begin, length in times]
    layers = _layers(slices)
    assert sorted((one.begin, one.end) for layer in layers for one in layer) == sorted(
        (one.begin, one.end) for one in slices
    )
    for layer in layers:
        nests([(float(one.begin), float(one.end)) for one in layer])
