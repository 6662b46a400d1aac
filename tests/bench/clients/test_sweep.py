"""Rows and phase stamps of one request, put together."""

from __future__ import annotations

import pytest

from bench.clients.sweep import joined
from bench.phases import mean_phases
from bench.stamps import Stamp, Timeline
from tests.bench.clients.made import failed, row


def stamps(client_id: str, at: float) -> list[Stamp]:
    events = [("arrived", 0.02), ("media_loaded", 0.03), ("dispatched", 0.05), ("first_byte", 0.09), ("done", 0.5)]
    return [
        Stamp(at + after, "proxy", "ours", event, {"client_id": client_id} if event == "arrived" else {})
        for event, after in events
    ]


def test_phases_from_the_scheduled_arrival_add_up_to_the_ttft():
    one = row(3, 10.0, ttft=0.1, sent_s=10.01)
    found = joined(one, Timeline(stamps("x-3", 10.0)))

    assert found is not None
    assert found["phases_ms"]["generator: late, connecting"] == pytest.approx(10.0)
    assert found["phases_ms"]["client to proxy"] == pytest.approx(10.0)
    assert sum(found["phases_ms"].values()) + found["residual_ms"] == pytest.approx(100.0)
    assert sum(found["groups_ms"].values()) == pytest.approx(100.0)


def test_where_stages_do_not_stamp_the_proxy_says_what_it_saw_of_them():
    more = [Stamp(10.035, "proxy", "ours", "encode_sent", {}), Stamp(10.045, "proxy", "ours", "encode_done", {})]
    found = joined(
        row(3, 10.0, ttft=0.1, sent_s=10.01), Timeline(sorted([*stamps("x-3", 10.0), *more], key=lambda s: s.t))
    )

    assert found is not None
    assert found["phases_ms"]["E, with its queue"] == pytest.approx(10.0)
    assert found["phases_ms"]["prefill and first decode, with their queues"] == pytest.approx(40.0)
    assert found["residual_ms"] == pytest.approx(0.0)


def test_where_they_do_each_of_their_phases_is_there():
    more = [Stamp(10.06, "P0", "ours", "prefill_start", {}), Stamp(10.08, "P0", "ours", "prefill_end", {})]
    found = joined(
        row(3, 10.0, ttft=0.1, sent_s=10.01), Timeline(sorted([*stamps("x-3", 10.0), *more], key=lambda s: s.t))
    )

    assert found is not None
    assert found["phases_ms"]["P: forward pass"] == pytest.approx(20.0)


def test_requests_that_the_stamps_do_not_know_are_left_out():
    timeline = Timeline(stamps("x-3", 10.0))

    assert joined(row(4, 10.0), timeline) is None
    assert joined(failed(3, 10.0), timeline) is None


def test_means_are_over_all_requests_whether_or_not_they_have_the_phase():
    rows = [{"phases_ms": {"a": 4.0}, "groups_ms": {"g": 4.0}}, {"phases_ms": {"b": 2.0}, "groups_ms": {"g": 2.0}}]

    assert mean_phases(rows) == {"joined": 2, "phases_ms": {"a": 2.0, "b": 1.0}, "groups_ms": {"g": 3.0}}
    assert mean_phases([]) == {}
