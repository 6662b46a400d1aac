"""Front doors as their parent has them: real processes, told of the deployment, killed, stopped, replaced."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest

from deploy.agent.stage_life import Record
from deploy.front import doors as front_doors
from deploy.front import lives as front_lives
from deploy.front import shared as front_shared
from deploy.front.doors import FrontDoors
from deploy.front.lives import SECTION, Door, Mark
from deploy.front.shared import SLOTS, Shared
from deploy.host import processes
from deploy.host.ports import private_socket
from deploy.host.spawned import NOT_BEGUN
from deploy.runtime.protocol import Observed, Order, Phase, Spec
from epd_serve.errors import EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.limits import AdmissionLimits, Timeouts
from proxy.config.settings import ProxySettings
from proxy.registry.instance_state import Work
from proxy.workers.shared_counters import Asked, Cell
from tests.deploy.rooted_here import RootHere, root_here
from tests.proxy.fakes import FakeStage, answer, bound, once, served, settings, text_body
from tests.waiting import PATIENCE_S, until

PATIENT = settings(timeouts=Timeouts())  # requests are held for as long as a test takes


@dataclass
class House:
    """Front doors with instances behind them, which this process plays."""

    doors: FrontDoors
    url: str
    stages: dict[str, FakeStage]
    observed: dict[str, Observed]
    serving: asyncio.Task[None]
    lines: list[str]
    shared: Shared
    root: RootHere
    folder: Path
    config: ProxySettings

    async def die(self) -> None:
        """Whoever looks after them does."""
        self.serving.cancel()
        await asyncio.wait([self.serving])

    def follow(self) -> None:
        """Another one goes on, and knows nothing but what is written down."""
        self.doors = made(self.config, life_of(self.shared), self.root, self.lines)
        self.serving = asyncio.create_task(self.doors.serve())

    def publish(self) -> None:
        self.doors.publish(self.observed.values(), {Role.PD})

    def phase(self, name: str, phase: Phase, **more: Any) -> None:
        self.observed[name] = replace(self.observed[name], phase=phase, **more)
        self.publish()

    async def ask(self, path: str = "") -> httpx.Response:
        """On a connection of its own, so that any of them may take it."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False) as client:
            if path:
                return await client.get(path)
            return await client.post("/v1/chat/completions", json=text_body())

    async def is_answered(self) -> bool:
        """Or its connection broke."""
        with suppress(httpx.TransportError):
            return (await self.ask()).status_code == 200
        return False

    async def in_all(self, path: str, **expected: Any) -> None:
        async def told() -> bool:
            answers = [(await self.ask(path)).json() for _ in range(4)]
            return all(one.get(name) == value for one in answers for name, value in expected.items())

        await until(told, f"{expected} of {path}")

    def pid(self, number: int = 0) -> int:
        return self.doors.pids[f"front.{number}"]

    def leases(self, name: str) -> Mapping[Work, int]:
        """What all of them have under way on an instance; nothing of one that is not known."""
        views = (view for view in self.doors.table.snapshot() if view.instance.id == name)
        return next((view.in_flight for view in views), {})

    def noted(self) -> list[Door]:
        return msgspec.msgpack.decode(self.root.state().read(SECTION) or b"", type=list[Door])

    def log(self, number: int = 0) -> str:
        return (self.folder / f"front.{number}.log").read_text()

    async def metric(self, name: str) -> float:
        lines = (await self.doors.metrics()).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def life_of(shared: Shared) -> Shared:
    """As one that looks after them has it."""
    return replace(shared, feed=shared.feed.dup())


def made(config: ProxySettings, shared: Shared, root: RootHere, lines: list[str]) -> FrontDoors:
    return FrontDoors(config, shared, root.children, root.state(), grace_s=1.0, drain_s=PATIENCE_S, say=lines.append)


@asynccontextmanager
async def house(*names: str, workers: int = 1, config: ProxySettings = PATIENT) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        listening = stack.enter_context(bound())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        stages, observed = {}, {}
        for name in names:
            stages[name] = FakeStage(name, Role.PD)
            instance = Instance(name, Role.PD, await stack.enter_async_context(served(stages[name])), "one")
            observed[name] = Observed(Order(name, Spec(Role.PD, (0,), "d")), Phase.UP, instance, ever_up=True, up_s=1.0)
        lines: list[str] = []
        shared = Shared.of(listening, stack.enter_context(private_socket(folder / "feed")), workers)
        stack.callback(shared.close)
        root = stack.enter_context(root_here())
        doors = made(config, life_of(shared), root, lines)
        serving = asyncio.create_task(doors.serve())
        one = House(doors, url, stages, observed, serving, lines, shared, root, folder, config)
        one.publish()
        try:
            await doors.ready()
            yield one
        finally:
            await one.doors.end()
            one.serving.cancel()
            await asyncio.wait([one.serving])
        assert not one.doors.pids


async def test_one_that_is_killed_leaves_the_others_serving_and_is_followed_by_another() -> None:
    released = asyncio.Event()
    async with house("PD0", workers=2) as h:
        h.stages["PD0"].usual = once(released, answer)
        asked = [asyncio.create_task(h.is_answered()) for _ in range(8)]
        await until(lambda: h.stages["PD0"].active == 8)
        assert h.leases("PD0")[Work.DECODE] == 8
        victim, other = h.pid(0), h.pid(1)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: any(one.done() for one in asked))
        await until(lambda: h.leases("PD0")[Work.DECODE] == 8 - sum(one.done() for one in asked))
        await until(lambda: h.doors.pids.get("front.0") not in (victim, None), "another one")
        released.set()
        answered = await asyncio.gather(*asked)
        assert True in answered and False in answered, "those of the one that was killed, and no others, were cut"
        assert (await h.ask()).status_code == 200
        assert h.pid(1) == other
        assert any("killed by SIGKILL" in line and "another starts" in line for line in h.lines), h.lines


async def test_where_there_is_only_one_connections_wait_for_the_next() -> None:
    async with house("PD0") as h:
        os.kill(h.pid(), signal.SIGKILL)
        answers = await asyncio.gather(*(h.is_answered() for _ in range(8)))
        assert answers.count(False) <= 1, "one may have been taken just before"
        assert (await h.ask()).status_code == 200


async def test_all_have_seen_what_was_said_when_seen_returns() -> None:
    async with house("PD0", "PD1", workers=2) as h:
        for _ in range(20):
            for drained, left in (("PD0", "PD1"), ("PD1", "PD0")):
                h.doors.drain(left, False)
                h.doors.drain(drained)
                await h.doors.seen()
                before = len(h.stages[drained].calls)
                assert {(await h.ask()).status_code for _ in range(2)} == {200}
                assert len(h.stages[drained].calls) == before
        assert not any("ended" in line for line in h.lines)


async def test_one_that_hangs_is_replaced_when_all_have_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("PD0", workers=2) as h:
        hung = h.pid(0)
        os.kill(hung, signal.SIGSTOP)
        h.doors.drain("PD0")
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.seen()
        assert h.doors.pids.get("front.0") != hung and processes.stat(hung) is None
        await h.in_all("/health", status="unavailable")


async def test_one_that_hangs_is_replaced_when_it_has_said_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = replace(front_lives.PATIENCE, hung_s=1.0, health_every_s=0.1, health_timeout_s=0.5)
    monkeypatch.setattr(front_lives, "PATIENCE", impatient)
    async with house("PD0", workers=2) as h:
        hung, other = h.pid(0), h.pid(1)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: h.doors.pids.get("front.0") not in (hung, None), "another one")
        assert any("front.0 ended: hung" in line for line in h.lines)
        assert {(await h.ask()).status_code for _ in range(4)} == {200} and h.pid(1) == other


async def test_what_one_had_counted_that_was_killed_stays_counted() -> None:
    async with house("PD0") as h:
        for _ in range(5):
            assert (await h.ask()).status_code == 200
        assert await h.metric("epd_proxy_requests_total") == 5
        victim = h.pid()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: h.doors.pids.get("front.0") not in (victim, None), "another one")
        assert (await h.ask()).status_code == 200
        await until(lambda: _is(h.metric("epd_proxy_workers "), 1))
        assert await h.metric("epd_proxy_requests_total") == 6
        assert await h.metric("epd_proxy_workers_ended_total") == 1


async def _is(value: Any, expected: float) -> bool:
    return bool(await value == expected)


async def test_each_has_a_log_which_says_what_becomes_of_its_feed() -> None:
    async with house("PD0", workers=2) as h:
        await h.die()
        await until(lambda: all("the feed has ended" in h.log(number) for number in range(2)))
        h.follow()
        h.publish()
        await until(lambda: all("the feed is back" in h.log(number) for number in range(2)))


async def test_one_that_was_never_told_to_go_on_is_followed_by_another() -> None:
    """Control was killed between noting its pid and the word that lets it go on."""
    async with house("PD0", workers=2) as h:
        await h.die()
        first, second = h.noted()
        os.kill(second.record.pid, signal.SIGKILL)
        not_begun = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({NOT_BEGUN})"])
        found = await until(lambda: (stat := processes.stat(not_begun.pid)) is not None and stat.dead and stat)
        second.record = Record(pid=not_begun.pid, born_ticks=found.start_ticks, lives=1)
        h.root.state().write(SECTION, msgspec.msgpack.encode([first, second]))
        h.follow()
        h.publish()
        await h.doors.ready()
        assert len(h.doors.pids) == 2 and h.pid(1) != not_begun.pid
        assert {(await h.ask()).status_code for _ in range(4)} == {200}
        assert not any("cannot be supervised" in line for line in h.lines), h.lines


async def test_a_stranger_with_the_number_of_one_that_has_ended_is_let_be() -> None:
    async with house("PD0", workers=2) as h:
        await h.die()
        noted = h.noted()
        stranger = await h.root.children.spawn(["sleep", "60"], dict(os.environ), output=2)
        processes.signal_process(noted[0].record.pid, signal.SIGKILL)
        noted[0].record.pid, noted[0].mark = stranger.pid, Mark.RETIRED
        h.root.state().write(SECTION, msgspec.msgpack.encode(noted))
        h.follow()
        h.publish()
        await h.doors.ready()
        assert len(h.doors.pids) == 2 and (await h.ask()).status_code == 200
        assert stranger.poll() is None


async def test_who_drains_is_given_nothing_and_finishes_what_it_has() -> None:
    released = asyncio.Event()
    async with house("PD0", "PD1", workers=2) as h:
        h.stages["PD0"].usual = once(released, answer)
        h.phase("PD1", Phase.DRAINING)
        await h.doors.seen()
        held = [asyncio.create_task(h.ask()) for _ in range(4)]
        await until(lambda: h.stages["PD0"].active == 4)
        h.phase("PD1", Phase.UP)
        h.phase("PD0", Phase.DRAINING)
        await h.doors.seen()
        assert {(await h.ask()).status_code for _ in range(4)} == {200}
        assert h.leases("PD0") == {Work.ENCODE: 0, Work.PREFILL: 0, Work.DECODE: 4}
        await until(lambda: not h.leases("PD1")[Work.DECODE])
        assert len(h.stages["PD1"].calls) == 4
        released.set()
        assert {(await one).status_code for one in held} == {200}
        await until(lambda: not h.leases("PD0")[Work.DECODE])
        del h.observed["PD0"]
        h.publish()
        await h.doors.seen()
        assert h.leases("PD0") == {} and (await h.ask()).status_code == 200


async def test_an_instance_that_was_drained_by_name_is_so_until_it_is_taken_back() -> None:
    async with house("PD0") as h:
        h.doors.drain("PD0")
        h.phase("PD0", Phase.DOWN, reason="died")
        h.phase("PD0", Phase.UP, instance=replace(h.doors.table.instance("PD0"), incarnation="two"))
        await h.in_all("/health", status="unavailable")
        h.doors.drain("PD0", False)
        await h.in_all("/health", status="ok")


async def test_requests_wait_in_a_pause_through_a_change_and_are_answered_after_it() -> None:
    async with house("PD0", workers=2) as h:
        h.doors.pause(PATIENCE_S)
        await h.doors.seen()
        asked = [asyncio.create_task(h.ask()) for _ in range(8)]
        await until(lambda: h.doors.running == 8)
        instance = h.observed["PD0"].instance
        assert instance is not None and h.leases("PD0")[Work.DECODE] == 0
        h.phase("PD0", Phase.STOPPING)
        await h.in_all("/ready", status="paused")
        h.phase("PD0", Phase.UP, instance=replace(instance, incarnation="two"))
        h.doors.pause(0.0)
        assert {(await one).status_code for one in asked} == {200} and h.doors.paused_s == 0


async def test_a_pause_may_last_until_a_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = AdmissionLimits(text_queue=10_000, media_queue=1)
    async with house("PD0", workers=2, config=replace(PATIENT, admission=limits, max_in_flight=10_000)) as h:
        assert await h.doors.pausable_s() == math.inf
        asking = asyncio.create_task(h.doors.pausable_s())
        for _ in range(20):
            await h.ask()
        room_s = await asking
        assert 10_000 * front_shared.RATE_S / 25 < room_s < math.inf, "twenty in a second, or fewer"


async def test_they_are_replaced_one_by_one_and_nobody_notices() -> None:
    released = asyncio.Event()
    async with house("PD0", workers=2) as h:
        before = dict(h.doors.pids)
        h.stages["PD0"].usual = once(released, answer)
        held = [asyncio.create_task(h.ask()) for _ in range(6)]
        await until(lambda: h.stages["PD0"].active == 6)
        await h.doors.configure(replace(PATIENT, served_models=("demo", "another")))
        replacing = asyncio.create_task(h.doors.restart())
        await until(lambda: len(set(h.doors.pids.values()) - set(before.values())) == 1)
        assert {(await h.ask("/health")).status_code for _ in range(8)} == {200}
        released.set()
        await replacing
        assert {(await one).status_code for one in held} == {200}
        assert not set(h.doors.pids.values()) & set(before.values()) and len(h.doors.pids) == 2
        assert [one["id"] for one in (await h.ask("/v1/models")).json()["data"]] == ["demo", "another"]
        assert {(await h.ask()).status_code for _ in range(4)} == {200}
        await until(lambda: not h.leases("PD0")[Work.DECODE])


async def test_those_there_are_stay_where_another_one_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("PD0") as h:
        before = dict(h.doors.pids)
        assert h.doors._lives is not None
        broken = {**os.environ, "PYTHONHOME": "/nonexistent"}
        monkeypatch.setattr(h.doors._lives, "environment", broken)
        with pytest.raises(EpdError, match="did not start: "):
            await h.doors.restart()
        assert h.doors.pids == before and (await h.ask()).status_code == 200


async def test_another_one_that_looks_after_them_finds_them_as_they_are() -> None:
    released = asyncio.Event()
    async with house("PD0", "PD1", workers=2) as h:
        h.stages["PD0"].usual = h.stages["PD1"].usual = once(released, answer)
        held = [asyncio.create_task(h.ask()) for _ in range(8)]
        await until(lambda: h.stages["PD0"].active + h.stages["PD1"].active == 8)
        before, counters = dict(h.doors.pids), h.shared.counters()
        number, slots = counters.said(0, Cell.ROSTER), h.root.state().read(SLOTS)
        await h.die()
        assert (await h.ask("/health")).json() == {"status": "ok"}
        h.follow()
        await until(lambda: h.doors.pids == before)
        assert counters.said(0, Cell.ROSTER) == number and (await h.ask("/health")).json() == {"status": "ok"}
        h.phase("PD1", Phase.DRAINING)
        await h.doors.ready()
        assert min(counters.said(row, Cell.ROSTER) for row in range(2)) > number and h.doors.pids == before
        assert slots and h.root.state().read(SLOTS) == slots
        assert sum(h.leases(name)[Work.DECODE] for name in h.observed) == 8
        released.set()
        assert {(await one).status_code for one in held} == {200}
        calls = len(h.stages["PD1"].calls)
        assert {(await h.ask()).status_code for _ in range(4)} == {200} and len(h.stages["PD1"].calls) == calls
        assert not any("ended" in line for line in h.lines)


async def test_who_dies_while_nobody_looks_is_settled_and_followed_later() -> None:
    async with house("PD0", workers=2) as h:
        h.stages["PD0"].usual = once(asyncio.Event(), answer)
        held = [asyncio.create_task(h.is_answered()) for _ in range(8)]
        await until(lambda: h.stages["PD0"].active == 8)
        victims = set(h.doors.pids.values())
        await h.die()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert set(await asyncio.gather(*held)) == {False}
        h.stages["PD0"].usual = answer
        waiting = asyncio.create_task(h.ask())
        h.follow()
        h.publish()
        await h.doors.ready()
        assert (await waiting).status_code == 200 and not victims & set(h.doors.pids.values())
        await until(lambda: not h.leases("PD0")[Work.DECODE])


async def test_who_hangs_while_nobody_looks_goes_by_no_old_roster_later() -> None:
    async with house("PD0", "PD1", workers=2) as h:
        hung, other = h.pid(0), h.pid(1)
        await h.die()
        os.kill(hung, signal.SIGSTOP)
        h.follow()
        h.phase("PD0", Phase.DRAINING)
        await h.doors.ready()
        assert processes.stat(hung) is None and any("has not taken in the roster" in line for line in h.lines)
        before = len(h.stages["PD0"].calls)
        assert {(await h.ask()).status_code for _ in range(4)} == {200} and len(h.stages["PD0"].calls) == before
        await until(lambda: h.doors.pids.get("front.0") not in (hung, None), "another one")
        assert h.pid(1) == other


async def test_they_go_on_being_replaced_by_who_follows() -> None:
    released = asyncio.Event()
    async with house("PD0", workers=2) as h:
        before = dict(h.doors.pids)
        h.stages["PD0"].usual = once(released, answer)
        held = [asyncio.create_task(h.ask()) for _ in range(6)]
        await until(lambda: h.stages["PD0"].active == 6)
        replacing = asyncio.create_task(h.doors.restart())
        await until(lambda: len(h.doors.pids) == 3, "a follower beside the first")
        replacing.cancel()
        await h.die()
        h.follow()
        h.publish()
        await until(lambda: h.doors.replacing)
        released.set()
        assert {(await one).status_code for one in held} == {200}
        await until(lambda: not h.doors.replacing)
        assert not set(h.doors.pids.values()) & set(before.values()) and len(h.doors.pids) == 2
        assert {(await h.ask()).status_code for _ in range(4)} == {200}


async def test_where_all_die_that_were_to_be_replaced_there_are_as_many_as_before() -> None:
    released = asyncio.Event()
    async with house("PD0", workers=2) as h:
        before = dict(h.doors.pids)
        h.stages["PD0"].usual = once(released, answer)
        held = [asyncio.create_task(h.is_answered()) for _ in range(6)]
        await until(lambda: h.stages["PD0"].active == 6)
        replacing = asyncio.create_task(h.doors.restart())
        await until(lambda: len(h.doors.pids) == 3, "a follower beside the first")
        replacing.cancel()
        await h.die()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        released.set()
        await asyncio.gather(*held)
        h.follow()
        h.publish()
        await h.doors.ready()
        await until(lambda: len(h.noted()) == 2, "no more than there are to be")
        await until(lambda: len(h.doors.pids) == 2)
        assert not set(h.doors.pids.values()) & set(before.values())
        assert {(await h.ask()).status_code for _ in range(4)} == {200}


async def test_the_end_waits_for_what_is_under_way_in_all_of_them() -> None:
    released = asyncio.Event()
    async with house("PD0", workers=2) as h:
        h.stages["PD0"].usual = once(released, answer)
        held = [asyncio.create_task(h.ask()) for _ in range(4)]
        await until(lambda: h.stages["PD0"].active == 4)
        h.doors.ask(Asked.LEAVE)
        await h.in_all("/ready", status="draining")
        h.doors.ask(Asked.DRAIN)
        idle = asyncio.create_task(h.doors.idle())
        counters = h.shared.counters()
        await until(
            lambda: all(counters.said(row, Cell.OBEYED) == Asked.DRAIN for row in range(2)), "both take on nothing more"
        )
        os.kill(h.pid(min(range(2), key=lambda row: counters.said(row, Cell.REQUESTS))), signal.SIGKILL)
        await until(lambda: h.doors.running == 4 - sum(one.done() for one in held))
        assert not idle.done()
        assert (await h.ask()).status_code == 503, "the one that follows knows of it, too"
        released.set()
        async with asyncio.timeout(PATIENCE_S):
            await idle
        await asyncio.gather(*held, return_exceptions=True)


async def test_the_end_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_lives, "ENDING_S", 0.5)
    async with house("PD0", workers=2) as h:
        h.stages["PD0"].usual = once(asyncio.Event(), answer)
        held = [asyncio.create_task(h.is_answered()) for _ in range(4)]
        await until(lambda: h.stages["PD0"].active == 4)
        pids = set(h.doors.pids.values())
        os.kill(h.pid(), signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.end()
        assert not any(map(processes.stat, pids)) and not h.noted()
        assert await asyncio.gather(*held) == [False] * 4, "their time was over"


async def test_one_that_does_not_start_ends_the_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = {"PYTHONHOME": "/nonexistent"}  # installed or not, Python itself does not start
    monkeypatch.setattr(front_doors, "module_environment", lambda: {**os.environ, **broken})
    with bound() as listening, private_socket(tmp_path / "feed") as feed, root_here() as root:
        doors = made(PATIENT, Shared.of(listening, feed, 1), root, [])
        with pytest.raises(EpdError, match=r"front\.0 did not start: "):
            async with asyncio.timeout(PATIENCE_S):
                await doors.serve()
