"""A stage is used once its KV links have been tried: in every order of starts, for a while at most, once per
incarnation."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import KvLink, KvReport
from proxy.registry.instance_state import why_cold
from proxy.registry.table import InstanceTable
from tests.waiting import until

FOREVER_S = 3600.0
P0 = Instance("P0", Role.P, "http://p", "p1", kv_news=("ipc:///P0.kvnews0",))
D0 = Instance("D0", Role.D, "http://d", "d1", kv_workers=("ipc:///D0.kvw0",))
D1 = Instance("D1", Role.D, "http://d1", "d1", kv_workers=("ipc:///D1.kvw0",))
OPENING = KvLink("ipc:///D0.kvw0", 0, "opening", "decode has been silent for 10 s")
UP = KvLink("D0", 0, "up", transport="shm")
DOWN = KvLink("D0", 0, "down", "broken")


def report(*links: KvLink, rank: int = 0, incarnation: str = "p1", sender: str = "P0") -> KvReport:
    return KvReport(sender, incarnation, rank, "adaptive", 0.0, list(links))


def tabled(*instances: Instance, grace_s: float = FOREVER_S) -> InstanceTable:
    table = InstanceTable(link_grace_s=grace_s)
    for one in instances:
        table.apply(one, up=False)
    return table


def up(table: InstanceTable) -> set[str]:
    return {view.instance.id for view in table.snapshot() if view.up}


def reason(table: InstanceTable, name: str) -> str:
    return next(view.reason for view in table.snapshot() if view.instance.id == name)


# --- one pair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [UP, KvLink("ipc:///D0.kvw0", 0, "up")])
def test_a_pair_is_warm_when_its_links_are_up(link: KvLink) -> None:
    assert why_cold(P0, {0: report(link)}, D0) == ""


@pytest.mark.parametrize("link", [OPENING, DOWN])
def test_a_link_that_is_not_up_is_named_with_its_reason(link: KvLink) -> None:
    cold = why_cold(P0, {0: report(link)}, D0)
    assert cold == f"KV link from P0 rank 0 to D0 rank 0 is {link.state} ({link.reason})"


def test_links_to_others_do_not_count() -> None:
    assert why_cold(P0, {0: report(OPENING)}, D1) == ""


def test_every_worker_has_to_have_reported() -> None:
    wide = replace(P0, kv_news=("ipc:///0", "ipc:///1"))
    assert why_cold(wide, {}, D0) == "P0 rank 0 has not reported its KV links"
    assert why_cold(wide, {0: report(UP)}, D0) == "P0 rank 1 has not reported its KV links"
    assert "P0 rank 1 to D0 rank 0" in why_cold(wide, {0: report(UP), 1: report(OPENING, rank=1)}, D0)
    assert why_cold(wide, {0: report(UP), 1: report(rank=1)}, D0) == "", "a rank may have nothing to send there"


@pytest.mark.parametrize(
    ("sender", "receiver"), [(replace(P0, kv_news=()), D0), (D0, P0), (replace(P0, role=Role.PD), D0), (P0, P0)]
)
def test_where_there_is_no_link_or_no_news_nothing_is_waited_for(sender: Instance, receiver: Instance) -> None:
    assert why_cold(sender, {}, receiver) == ""


# --- in the table -----------------------------------------------------------------------------------------------------


async def test_a_sender_that_is_last_serves_once_its_links_are_up() -> None:
    table = tabled(P0, D0)
    table.mark_up("D0")
    table.mark_up("P0")
    assert up(table) == {"D0"} and "has not reported" in reason(table, "P0")
    table.report(report(OPENING))
    assert up(table) == {"D0"} and "is opening" in reason(table, "P0")
    waiting = asyncio.create_task(table.changed(5))
    await asyncio.sleep(0)
    table.report(report(UP))
    assert up(table) == {"D0", "P0"} and reason(table, "P0") == ""
    assert await waiting, "who waits for a prefill instance is told"


async def test_a_sender_that_is_first_waits_for_nobody_and_the_receiver_for_its_links() -> None:
    table = tabled(P0, D0)
    table.mark_up("P0")
    table.report(report(OPENING))
    assert up(table) == {"P0"}
    table.mark_up("D0")
    assert up(table) == {"P0"} and "to D0" in reason(table, "D0")
    table.report(report(UP))
    assert up(table) == {"P0", "D0"}


async def test_only_the_one_that_is_not_reached_waits() -> None:
    table = tabled(P0, D0, D1)
    for name in ("P0", "D0", "D1"):
        table.report(report(OPENING, KvLink("D1", 0, "up")))
        table.mark_up(name)
    assert up(table) == {"P0", "D1"}


async def test_a_receiver_that_fails_meanwhile_is_not_waited_for() -> None:
    table = tabled(P0, D0)
    table.mark_up("D0")
    table.mark_up("P0")
    table.mark_down("D0", "killed")
    assert up(table) == {"P0"}


async def test_a_receiver_that_is_taken_away_meanwhile_is_not_waited_for() -> None:
    table = tabled(P0, D0)
    table.mark_up("D0")
    table.mark_up("P0")
    table.remove("D0")
    assert up(table) == {"P0"}


async def test_a_link_that_breaks_later_takes_nobody_out_of_service() -> None:
    table = tabled(P0, D0)
    table.report(report(UP))
    for name in ("P0", "D0"):
        table.mark_up(name)
    table.report(report(DOWN))
    assert up(table) == {"P0", "D0"}
    table.mark_down("P0", "no beat for 5 s")
    table.mark_up("P0")
    assert up(table) == {"P0", "D0"}, "the same incarnation, whose links have been warm"


async def test_every_incarnation_begins_with_cold_links() -> None:
    table = tabled(P0, D0)
    table.report(report(UP))
    for name in ("P0", "D0"):
        table.mark_up(name)
    table.apply(replace(P0, incarnation="p2"), up=False)
    table.mark_up("P0")
    table.report(report(UP, incarnation="p1"))
    assert up(table) == {"D0"}, "a late word of the former incarnation"
    table.report(report(UP, incarnation="p2"))
    assert up(table) == {"P0", "D0"}


async def test_a_receiver_that_the_sender_does_not_know_yet_is_met_with_its_first_transfer() -> None:
    table = tabled(P0, D0)
    table.mark_up("P0")
    table.report(report())
    table.mark_up("D0")
    assert up(table) == {"P0", "D0"}


async def test_after_the_grace_a_stage_serves_anyhow_and_the_link_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = tabled(P0, D0, grace_s=0.05)
    table.mark_up("P0")
    table.report(report(OPENING))
    with caplog.at_level(logging.WARNING, logger="proxy.registry.table"):
        table.mark_up("D0")
        table.mark_up("D0")
        assert up(table) == {"P0"}
        assert await table.changed(5)
        table.report(report(OPENING))
        table.mark_up("D0")
    assert up(table) == {"P0", "D0"}
    assert [record.getMessage() for record in caplog.records] == [
        f"D0 serves although KV link from P0 rank 0 to D0 rank 0 is opening ({OPENING.reason})"
    ]


async def test_the_grace_of_a_stage_that_went_away_meanwhile_changes_nothing() -> None:
    table = tabled(P0, D0, D1, grace_s=0.01)
    table.mark_up("P0")
    table.mark_up("D0")
    table.apply(replace(D0, incarnation="d2"), up=False)
    table.mark_up("D1")  # its grace began later, so when it is over that of D0 is
    await until(lambda: "D1" in up(table))
    assert up(table) == {"P0", "D1"}


def test_stages_without_news_are_up_at_once() -> None:
    table = tabled(replace(P0, kv_news=()), D0)
    table.mark_up("D0")
    table.mark_up("P0")
    assert up(table) == {"P0", "D0"}
