"""What a link says of itself: counters for reports, stamps for traces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from epd_serve import wire
from epd_serve.trace import Trace
from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends, PrefillEnd, chunk, key_of
from tests.waiting import wait_for


def stamps(path: Path, event: str) -> list[dict[str, Any]]:
    return [stamp for stamp in map(json.loads, path.read_text().splitlines()) if stamp["event"] == event]


def report(p: PrefillEnd) -> wire.KvLink:
    (link,) = p.sender.report()
    return link


def test_packets_bytes_and_transfers_are_counted(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=2)
    p.wait_up(d)
    began = time.monotonic()
    p.step([chunk(d, "a", [1, 2], [5, 6], last=True), chunk(d, "b", [3], [7], last=True)])
    p.step([chunk(d, "c", [4], [8], last=True)])
    wait_for(lambda: report(p).transfers == 3)
    found = report(p)
    assert (found.peer, found.rank, found.state, found.transport) == ("D0", 0, "up", "shm")
    assert (found.packets, found.layers, found.bytes) == (6, 10, (3 + 1) * 5 * 64)
    assert (found.failed, found.cancelled, found.retries, found.queued_bytes) == (0, 0, 0, 0)
    assert 0 < found.busy_s < found.transfer_s  # two transfers share the first packets, each counts them
    # DONE goes after the step that computed the last layer, so something is exposed; at most all since it began.
    assert 0 < found.exposed_s < 3 * (time.monotonic() - began)


def test_slices_of_a_packet_count_as_one_packet(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5, link_options={"slice_bytes": 64})
    p.step([chunk(d, "a", [1, 2], [5, 6], last=True)])
    wait_for(lambda: report(p).transfers == 1)
    assert (report(p).packets, report(p).layers, report(p).bytes) == (1, 5, 2 * 5 * 64)


def test_every_slice_teaches_the_link_its_cost(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5, link_options={"slice_bytes": 2 * 64})
    seen: list[tuple[int, float]] = []
    p.wait_up(d)._cost.observe = lambda *measured: seen.append(measured)
    p.step([chunk(d, "a", [1], [5], last=True)])
    wait_for(lambda: report(p).transfers == 1)
    assert [nbytes for nbytes, _ in seen] == [128, 128, 64]
    assert all(seconds > 0 for _, seconds in seen)
    assert sum(seconds for _, seconds in seen) == pytest.approx(report(p).busy_s)


def test_a_cancelled_transfer_is_neither_sent_nor_failed(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd)
    p.step([chunk(d, "a", [1], [5], last=False)])
    p.step(stops=["a"], finished=["a"])
    p.wait_over({"a"})
    wait_for(lambda: report(p).cancelled == 1)
    assert (report(p).transfers, report(p).failed) == (0, 0)


def test_a_transfer_that_cannot_be_sent_has_failed(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, dtype="torch.float16")
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    assert (report(p).transfers, report(p).failed, report(p).cancelled) == (0, 1, 0)
    assert "dtype" in report(p).reason


def test_news_are_announced(start: Ends) -> None:
    news: list[int] = []
    d, p = start(DecodeEnd), start(PrefillEnd, link_options={"on_change": lambda: news.append(1)})
    p.wait_up(d)
    wait_for(lambda: news)
    before = len(news)
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    wait_for(lambda: len(news) > before)


def test_packets_and_transfers_are_stamped(start: Ends, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=3, trace=Trace(str(path), "P0"))
    p.wait_up(d)
    for name, block in (("a", 5), ("b", 6)):
        d.expect(key_of(name), [block])
    p.step([chunk(d, "a", [1], [5], last=True), chunk(d, "b", [2], [6], last=True)])
    wait_for(lambda: len(stamps(path, "kv_sent")) == 2)
    packets = stamps(path, "kv_packet")
    assert [(s["subject"], s["first"], s["last"], s["bytes"], s["transfers"]) for s in packets] == [
        ("link:D0", 0, 3, 2 * 3 * 64, ["t-a", "t-b"]),
        ("link:D0", 3, 5, 2 * 2 * 64, ["t-a", "t-b"]),
    ]
    assert all(s["t0"] <= s["t1"] for s in packets)
    sent = stamps(path, "kv_sent")[0]
    assert (sent["ok"], sent["bytes"], sent["packets"], sent["groups"]) == (True, 5 * 64, 2, [3, 2])
    exposed_ms = [s["exposed_ms"] for s in stamps(path, "kv_sent")]
    assert all(ms > 0 for ms in exposed_ms)
    assert sum(exposed_ms) == pytest.approx(1e3 * report(p).exposed_s, abs=2e-3)  # stamps are rounded to microseconds
    (first, _) = stamps(path, "kv_first")
    assert first["t"] <= packets[0]["t1"]
    (step,) = stamps(path, "prefill_step")
    assert (step["subject"], len(step["layers"]), step["tokens"]) == ("step", 5, 16)
