"""What a simulated stage says of its load, and at which pace."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.roles import Role
from epd_serve.sim.engine import Engine
from epd_serve.sim.load import stage_report
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.sim.prompts import CHAT
from epd_serve.sim.publishing import RateLimitedPublisher
from epd_serve.sim.sequence import Sequence
from epd_serve.wiring import StageWiring
from tests.epd_serve.sim.served import chat, served

FOR_EVER = 3600.0


def nothing(number: int, last: bool) -> None:
    """Nobody listens."""


async def test_a_report_counts_what_is_not_done_yet() -> None:
    capacity = Capacity(max_running=1, kv_tokens=128, block_tokens=32, step_tokens=16)
    engine = Engine(Profile(capacity=capacity), "P0")
    wiring = StageWiring(instance="P0", role=Role.P, incarnation="life")
    engine.submit(Sequence(40, 1, nothing, items=(5, 7)))
    engine.submit(Sequence(10, 1, nothing), held=True)
    scheduler = engine.scheduler
    scheduler.complete(scheduler.plan())
    report = stage_report(wiring, engine, 3)
    assert (report.instance, report.incarnation, report.seq) == ("P0", "life", 3)
    assert (report.running, report.waiting, report.max_running) == (1, 1, 1)
    assert (report.pending_prompt_tokens, report.pending_item_tokens) == (24 + 10, 0)
    assert report.kv_used == 0.5 and report.kv_tokens == 128


async def test_an_encoder_reports_items_and_no_kv() -> None:
    engine = Engine(Profile(), "E0")
    engine.submit(Sequence(0, 1, nothing, items=(5, 7)))
    report = stage_report(StageWiring(instance="E0", role=Role.E, incarnation="life"), engine, 1)
    assert (report.pending_item_tokens, report.kv_tokens, report.kv_used) == (12, 0, 0.0)


async def test_every_role_announces_its_load_also_when_idle(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/load"
    wiring = StageWiring(instance="PD0", role=Role.PD, incarnation="life", load_publish=address)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        heard.connect(address)
        async with served(Profile(prefill=Line(FOR_EVER)), wiring=wiring) as (_, client), asyncio.timeout(60):
            idle = wire.announcements.decode(await heard.recv())
            assert isinstance(idle, wire.StageReport) and idle.running == 0
            asked = asyncio.create_task(client.post(CHAT, json=chat()))
            report, seqs = idle, [idle.seq]
            while not report.running:
                message = wire.announcements.decode(await heard.recv())
                assert isinstance(message, wire.StageReport)
                report = message
                seqs.append(report.seq)
            assert report.pending_prompt_tokens > 0 and seqs == sorted(set(seqs))
            asked.cancel()
            await asyncio.wait([asked])


async def test_reports_come_at_most_so_often_and_at_least_so_often() -> None:
    times: list[float] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report() -> None:
        times.append(loop.time())
        if len(times) == 6:
            enough.set()
        limited.changed()

    limited = RateLimitedPublisher(report, change_s=0.02, idle_s=FOR_EVER)
    limited.start()
    await asyncio.wait_for(enough.wait(), 60)
    limited.close()
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert min(gaps) >= 0.02 - 0.002, "the resolution of timers"
