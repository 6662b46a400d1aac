"""Announcements over real sockets: who is heard, and what does no harm."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from epd_serve import wire
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.background import Background
from proxy.registry.announcements import Announcements, MissingFeatures
from proxy.registry.table import InstanceTable
from tests.proxy.fakes import cluster
from tests.waiting import PATIENCE_S

READY = wire.FeatureReady("k", 100, "E0-life1")


@contextmanager
def publisher(address: str) -> Iterator[zmq.Socket[bytes]]:
    """XPUB, so that a test can wait for the subscription."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        socket.bind(address)
        yield socket


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A publisher at `tmp_path/E0`."""
    with publisher(f"ipc://{tmp_path}/E0") as socket:
        yield socket


async def subscription(stage: zmq.Socket[bytes]) -> bytes:
    """The next subscription (b"\\x01") or its end (b"\\x00")."""
    async with asyncio.timeout(PATIENCE_S):
        while not stage.poll(0):
            await asyncio.sleep(0.005)
    return stage.recv()


class Ear:
    """A listener, and what it heard."""

    def __init__(self, table: InstanceTable) -> None:
        self.received: asyncio.Queue[wire.Announcement] = asyncio.Queue()
        self.background = Background()
        self.announcements = Announcements(table, self.hear, self.background)

    def hear(self, message: wire.Announcement) -> None:
        self.received.put_nowait(message)

    def metric(self, name: str, **labels: str) -> float:
        return self.background.registry.get_sample_value(name, labels) or 0.0

    def broken(self, kind: str) -> float:
        return self.metric("epd_proxy_broken_messages_total", kind=kind)

    async def next(self) -> wire.Announcement:
        return await asyncio.wait_for(self.received.get(), PATIENCE_S)


@asynccontextmanager
async def listening(table: InstanceTable) -> AsyncIterator[Ear]:
    ear = Ear(table)
    ear.announcements.start()
    try:
        yield ear
    finally:
        await ear.announcements.stop()


def instance(name: str, address: str | None) -> Instance:
    return Instance(name, Role.E, "http://x", f"{name}-life1", events=address)


async def test_an_instance_is_heard_also_when_it_joins_later_and_not_any_more_when_it_is_gone(
    stage: zmq.Socket[bytes], tmp_path: Path
) -> None:
    table = InstanceTable()
    async with listening(table) as ear:
        table.apply(instance("D0", None))
        assert not ear.announcements.listening
        table.apply(instance("E0", f"ipc://{tmp_path}/E0"))
        assert await subscription(stage) == b"\x01"
        stage.send(wire.encode(READY))
        assert await ear.next() == READY and ear.announcements.listening
        table.remove("E0")
        assert await subscription(stage) == b"\x00"
        assert not ear.announcements.listening


async def test_an_address_that_several_share_is_connected_once(stage: zmq.Socket[bytes], tmp_path: Path) -> None:
    table = InstanceTable()
    for name in ("E0", "E1", "P0"):
        table.apply(instance(name, f"ipc://{tmp_path}/E0"))
    async with listening(table) as ear:
        await subscription(stage)
        table.apply(replace(instance("E1", f"ipc://{tmp_path}/E0"), incarnation="E1-life2"))
        stage.send(wire.encode(READY))
        stage.send(wire.encode(replace_key("last")))
        assert [await ear.next(), await ear.next()] == [READY, replace_key("last")]
        assert not stage.poll(50), "nobody else subscribed"


def replace_key(key: str) -> wire.FeatureReady:
    return wire.FeatureReady(key, 100, "E0-life1")


async def test_malformed_messages_are_counted_and_not_said_again_at_once(
    stage: zmq.Socket[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = InstanceTable()
    table.apply(instance("E0", f"ipc://{tmp_path}/E0"))
    with caplog.at_level(logging.WARNING, logger="proxy.background"):
        async with listening(table) as ear:
            await subscription(stage)
            for raw in (b"", b"\xff", wire.encode(wire.Hello(1, "x", "shm", {})), wire.encode(READY)):
                stage.send(raw)
            assert await ear.next() == READY
            assert ear.broken("malformed") == 3 and len(caplog.records) == 1


async def test_what_a_handler_fails_on_is_counted_by_kind_and_skipped(
    stage: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Ear, message: wire.Announcement) -> None:
        if isinstance(message, wire.FeatureFailed):
            raise KeyError("oops")
        self.received.put_nowait(message)

    monkeypatch.setattr(Ear, "hear", fails)
    table = InstanceTable()
    table.apply(instance("E0", f"ipc://{tmp_path}/E0"))
    async with listening(table) as ear:
        await subscription(stage)
        for message in (wire.FeatureFailed("k", "boom"), READY, wire.FeatureFailed("k", "boom"), READY):
            stage.send(wire.encode(message))
        assert [await ear.next(), await ear.next()] == [READY, READY]
        assert ear.broken("FeatureFailed") == 2 and not ear.background.down


GARBAGE = (
    b"",
    b"\x91" * 200_000,  # nested too deeply to be decoded: RecursionError
    b"\xff\xfe" * 10,
    wire.encode(READY)[:-1],
    wire.encode(READY).replace(b"E0-life1", b"\xff\xff-life1"),  # text that is no UTF-8
)


@settings_of_hypothesis(max_examples=60, deadline=None)
@given(frames=st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(GARBAGE)), max_size=8))
def test_no_frame_from_a_publisher_makes_it_deaf(frames: list[bytes]) -> None:
    async def hear() -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder, publisher(f"ipc://{folder}/E0") as stage:
            table = InstanceTable()
            table.apply(instance("E0", f"ipc://{folder}/E0"))
            async with listening(table) as ear:
                await subscription(stage)
                for frame in frames:
                    stage.send_multipart([frame] if len(frame) % 2 else [b"topic", frame])
                stage.send(wire.encode(READY))
                while await ear.next() != READY:
                    pass
                assert ear.metric("epd_proxy_background_failed_total", task="announcements") == 0

    asyncio.run(hear())


async def test_after_an_error_of_its_socket_it_listens_again_and_says_so_meanwhile(
    stage: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.background.SETTLED_S", 0.05)
    table = InstanceTable()
    table.apply(instance("E0", f"ipc://{tmp_path}/E0"))
    receive, broken = Announcements._receive, [zmq.ZMQError(zmq.ENOTSOCK), zmq.ZMQError(zmq.EFSM)]

    async def breaks(self: Announcements, socket: zmq.asyncio.Socket) -> None:
        if broken:
            raise broken.pop()
        await receive(self, socket)

    monkeypatch.setattr(Announcements, "_receive", breaks)
    async with listening(table) as ear:
        async with asyncio.timeout(PATIENCE_S):
            while not ear.background.down:
                await asyncio.sleep(0.001)
        assert "ZMQError" in ear.background.down["announcements"]
        assert ear.metric("epd_proxy_background_down", task="announcements") == 1
        async with asyncio.timeout(PATIENCE_S):
            while ear.received.empty():  # whose subscription it is that comes, only the news can tell
                stage.send(wire.encode(READY))
                await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            while ear.background.down:
                await asyncio.sleep(0.001)
        assert ear.metric("epd_proxy_background_failed_total", task="announcements") == 2
        assert ear.metric("epd_proxy_background_down", task="announcements") == 0


async def test_an_address_that_makes_no_sense_does_not_silence_the_others(
    stage: zmq.Socket[bytes], tmp_path: Path
) -> None:
    table = InstanceTable()
    table.apply(instance("E0", "nonsense"))
    table.apply(instance("E1", f"ipc://{tmp_path}/E0"))
    async with listening(table) as ear:
        await subscription(stage)
        stage.send(wire.encode(READY))
        assert await ear.next() == READY


async def test_without_addresses_and_without_a_start_it_ends_quietly() -> None:
    async with listening(InstanceTable()):
        pass
    await Ear(InstanceTable()).announcements.stop()


async def test_what_stages_announce_reaches_the_directory_the_table_and_the_metrics(
    stage: zmq.Socket[bytes], tmp_path: Path
) -> None:
    async with cluster("E0", "PD0") as c:
        assert (await c.ask()).status_code == 200
        [[key]] = c["E0"].keys
        c.table.apply(replace(c.instances["E0"], events=f"ipc://{tmp_path}/E0"))
        await subscription(stage)
        counters = {"encoded": 7, "recomputed.deadline": 1}
        report = wire.StoreReport("E0", "E0-life1", 1000, 400, 2, "up", 1, 3, counters, seq=9)
        past = wire.StoreReport("E0", "E0-life0", 1000, 999, 0)
        for message in (wire.FeatureReady(key, 100, "E0-life1", pooled=True), report, past):
            stage.send(wire.encode(message))
        stage.send(b"\xff")
        await c.until_metric("epd_proxy_broken_messages_total", 1, kind="malformed")
        assert (await c.ask()).status_code == 200
        assert len(c["E0"].calls) == 1, "announced, so not encoded"
        encoder, other = (await c.client.get("/instances")).json()["instances"]
        assert encoder["store"] == {
            "capacity_bytes": 1000, "used_bytes": 400, "leased": 2, "pool": "up", "waiting_puts": 1, "encoding": 3,
            "counters": counters, "seq": 9,
        }  # fmt: skip
        assert other["store"] is None
        text = (await c.client.get("/metrics")).text
        for message in (
            'epd_store_used_bytes{instance="E0"} 400.0',
            'epd_store_waiting_puts{instance="E0"} 1.0',
            'epd_store_pool{instance="E0",state="up"} 1.0',
            'epd_store_events_total{event="recomputed.deadline",instance="E0"} 1.0',
            'epd_proxy_announcements_total{kind="StoreReport"} 2.0',
        ):
            assert message in text


async def test_why_a_request_failed_is_told_whether_the_word_or_the_failure_comes_first() -> None:
    missing = MissingFeatures(limit=2)
    ours = "0123456789abcdef" * 2
    missing_event = wire.FeatureMissing(f"chatcmpl-{ours}-1a2b3c4d", ["k"], "evicted")
    missing.announced(missing_event)
    assert await missing.of(ours, timeout_s=0) == missing_event
    assert await missing.of(ours, timeout_s=0) is None, "given out once"
    asking = asyncio.create_task(missing.of(ours, timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    missing.announced(missing_event)
    assert await asking == missing_event
    assert await missing.of(ours, timeout_s=0.01) is None
    for name in ("a", "b", "c"):
        missing.announced(wire.FeatureMissing(name, [], "x"))
    assert await missing.of("a", timeout_s=0) is None and await missing.of("c", timeout_s=0) is not None


async def test_a_report_that_was_missed_is_asked_for_by_subscribing(tmp_path: Path, stage: zmq.Socket[bytes]) -> None:
    async with cluster("P0") as c:
        address = f"ipc://{tmp_path}/E0"
        c.table.apply(replace(c.instances["P0"], load_news=address))
        assert await subscription(stage) == b"\x01"
        incarnation = c.instances["P0"].incarnation
        stage.send(wire.encode(wire.CacheReport("P0", incarnation, 1, 16, stored=bytes(8))))
        stage.send(wire.encode(wire.CacheReport("P0", incarnation, 3, 16)))
        assert await subscription(stage) == b"\x01whole:P0" and await subscription(stage) == b"\x00whole:P0"
        assert c.table.prefixes.held_by(("P0", incarnation)) == 16
        stage.send(wire.encode(wire.CacheReport("P0", "another life", 9, 16)))
        stage.send(wire.encode(wire.CacheReport("P0", incarnation, 4, 16, part="first")))
        async with asyncio.timeout(PATIENCE_S):
            while c.table.prefixes.held_by(("P0", incarnation)):
                await asyncio.sleep(0.005)
        c.table.remove("P0")
        assert c.table.prefixes.held_by(("P0", incarnation)) is None
