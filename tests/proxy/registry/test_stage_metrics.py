"""What senders report of their KV links, in `/instances` and `/metrics`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from epd_serve import wire
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import KvLink, KvReport
from proxy.background import Background
from proxy.registry.announcements import AnnouncementDispatcher
from proxy.registry.stage_metrics import link_fields, link_views
from proxy.registry.table import InstanceTable
from tests.proxy.fakes import cluster, hangs, replies, settings, text_body
from tests.waiting import PATIENCE_S

P0 = Instance("P0", Role.P, "http://p", "p1", kv_news=("ipc:///n0", "ipc:///n1"))
D0 = Instance("D0", Role.D, "http://d", "d1", kv_workers=("ipc:///D0.kvw0", "ipc:///D0.kvw1"))
BUSY = KvLink(
    "D0",
    0,
    "up",
    transport="shm",
    setup_s=0.001,
    s_per_byte=1e-9,
    queued_bytes=5,
    packets=10,
    layers=40,
    bytes=4_000_000_000,
    transfers=8,
    failed=2,
    cancelled=1,
    retries=3,
    busy_s=2.0,
    exposed_s=0.4,
    transfer_s=1.6,
)
FRESH = KvLink("ipc:///D0.kvw1", 1, "opening", "nobody answers")


def report(rank: int, *links: KvLink, incarnation: str = "p1", sender: str = "P0") -> KvReport:
    return KvReport(sender, incarnation, rank, "adaptive", 0.002, list(links))


def reported(*reports: KvReport) -> InstanceTable:
    table = InstanceTable()
    for one in (P0, D0):
        table.apply(one)
    for one in reports:
        table.report(one)
    return table


def samples(text: str, name: str) -> dict[str, float]:
    """Label sets (as text) and values of one metric."""
    lines = (line for line in text.splitlines() if line.startswith(name + "{"))
    return {line[len(name) : line.rindex(" ")]: float(line[line.rindex(" ") :]) for line in lines}


def test_a_link_is_named_after_the_instance_it_leads_to_before_that_has_answered() -> None:
    links = link_views(reported(report(1, FRESH), report(0, BUSY)).snapshot())
    assert [(one.rank, one.peer, one.link.rank) for one in links] == [(0, "D0", 0), (1, "D0", 1)]
    [stranger] = link_views(reported(report(0, KvLink("ipc:///gone", 0, "down"))).snapshot())
    assert stranger.peer == "ipc:///gone"


def test_the_figures_of_a_link_are_those_of_the_design() -> None:
    def figures(link: KvLink) -> list[float | None]:
        [one] = link_views(reported(report(0, link)).snapshot())
        return [link_fields(one)[name] for name in ("layers_per_packet", "gb_per_s", "exposed_ms", "overlap")]

    assert figures(BUSY) == [4.0, 2.0, 50.0, 0.75]
    assert figures(KvLink("D0", 0, "up", transfers=1, exposed_s=3.0, transfer_s=1.0))[3] == 0.0
    assert figures(FRESH) == [None] * 4


def test_words_of_strangers_past_incarnations_and_ranks_that_are_not_there_are_ignored() -> None:
    table = reported(
        report(0, BUSY, incarnation="p0"),
        report(0, BUSY, sender="P9"),
        report(2, BUSY),
        report(-1, BUSY),
        report(1, BUSY),
    )
    assert [one.rank for one in link_views(table.snapshot())] == [1]


def test_a_new_incarnation_begins_without_the_counters_of_the_last() -> None:
    table = reported(report(0, BUSY))
    table.apply(replace(P0, incarnation="p2"))
    assert not list(link_views(table.snapshot()))


def test_a_sender_that_has_fallen_silent_says_nothing_about_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    table = reported(report(0, BUSY))
    monkeypatch.setattr("proxy.registry.table.KV_TRUST_S", -1.0)
    assert not list(link_views(table.snapshot()))


async def test_instances_and_metrics_show_the_links() -> None:
    async with cluster("P0", "D0") as c:
        sender, receiver = c.table.instance("P0"), c.table.instance("D0")
        c.table.apply(replace(sender, kv_news=P0.kv_news))
        c.table.apply(replace(receiver, kv_workers=D0.kv_workers))
        c.table.report(report(0, BUSY, incarnation=sender.incarnation))
        c.table.report(report(1, FRESH, incarnation=sender.incarnation))
        p, d = (await c.client.get("/instances")).json()["instances"]
        text = (await c.client.get("/metrics")).text
    assert d["kv_links"] == []
    assert p["kv_links"][0] == {
        "rank": 0, "peer": "D0", "peer_rank": 0, "state": "up", "reason": "", "transport": "shm",
        "transfers": 8, "failed": 2, "cancelled": 1, "retries": 3,
        "packets": 10, "bytes": 4_000_000_000, "queued_bytes": 5,
        "layers_per_packet": 4.0, "gb_per_s": 2.0, "exposed_ms": 50.0, "overlap": 0.75,
    }  # fmt: skip
    assert (p["kv_links"][1]["state"], p["kv_links"][1]["overlap"]) == ("opening", None)
    busy = '{instance="P0",peer="D0",peer_rank="0",rank="0",transport="shm"'
    fresh = '{instance="P0",peer="D0",peer_rank="1",rank="1",transport=""'
    expected = {
        "bytes_total": 4e9,
        "packets_total": 10,
        "layers_total": 40,
        "retries_total": 3,
        "busy_seconds_total": 2.0,
        "exposed_seconds_total": 0.4,
        "transfer_seconds_total": 1.6,
        "queued_bytes": 5,
    }
    for name, value in expected.items():
        assert sorted_labels(samples(text, f"epd_kv_{name}")) == {busy + "}": value, fresh + "}": 0}, name
    assert sorted_labels(samples(text, "epd_kv_link_up")) == {busy + "}": 1, fresh + "}": 0}
    assert sorted_labels(samples(text, "epd_kv_bandwidth_bytes_per_second")) == {busy + "}": pytest.approx(1e9)}
    assert sorted_labels(samples(text, "epd_kv_setup_seconds")) == {busy + "}": 0.001}
    outcomes = samples(text, "epd_kv_transfers_total")
    assert {value for labels, value in outcomes.items() if 'outcome="failed"' in labels} == {2, 0}
    assert sum(outcomes.values()) == 8 + 2 + 1
    assert set(samples(text, "epd_kv_layer_seconds").values()) == {0.002}


def sorted_labels(found: dict[str, float]) -> dict[str, float]:
    return {"{" + ",".join(sorted(labels.strip("{}").split(","))) + "}": value for labels, value in found.items()}


async def test_reports_are_heard_at_the_workers_addresses_and_say_nothing_about_features(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/P0.kvnews0"
    table = InstanceTable()
    async with cluster("P0", config=settings()) as c:
        dispatcher = AnnouncementDispatcher(table, c.pipeline.directory, c.pipeline.metrics, Background())
        with zmq.Context() as context, context.socket(zmq.PUB) as worker:
            worker.bind(address)
            table.apply(replace(P0, kv_news=(address,)))
            dispatcher.start()
            async with asyncio.timeout(PATIENCE_S):
                while not list(link_views(table.snapshot())):
                    worker.send(wire.encode(report(0, BUSY)))
                    await asyncio.sleep(0.01)
            assert not dispatcher.listening
            await dispatcher.stop()


async def test_kv_that_was_not_delivered_is_counted_by_cause() -> None:
    reasons = ("decode did not reserve blocks", "prefill cuts it into 3 blocks", "prefill cuts it into 71 blocks")
    async with cluster("P0", "D0", config=settings(retries=0)) as c:
        c["D0"].usual = hangs
        for reason in reasons:
            c["P0"].script.append(replies(200, {"kv_transfer_params": {"ok": False, "reason": reason}}))
            assert (await c.client.post("/v1/chat/completions", json=text_body())).status_code == 502
        text = (await c.client.get("/metrics")).text
    assert samples(text, "epd_proxy_kv_failures_total") == {
        '{cause="decode did not reserve blocks"}': 1,
        '{cause="prefill cuts it into N blocks"}': 2,
    }
    assert 'outcome="kv_not_delivered"' in text


async def test_causes_are_told_apart_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.metrics.MAX_CAUSES", 2)
    async with cluster("P0") as c:
        for reason in ("one", "two", "three", "four", "one"):
            c.pipeline.metrics.kv_failed(reason)
        text = (await c.client.get("/metrics")).text
    counted = samples(text, "epd_proxy_kv_failures_total")
    assert counted == {'{cause="one"}': 2, '{cause="two"}': 1, '{cause="other"}': 2}
