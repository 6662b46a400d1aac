"""What every runtime does: the one in memory, and the agent with processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.waits import Patience
from deploy.host import processes
from deploy.host.ports import private_socket
from deploy.host.rundir import RunDir
from deploy.memory.shared_memory import SharedMemory
from deploy.node.routes import NodeWatch, serve_node
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_client import NodeClient
from deploy.runtime.protocol import SHARED_MEMORY, Observed, Order, Phase, Runtime
from epd_serve.engine.argv import stage_command
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan
from store.arena import Arena
from tests.deploy.agent_world import World, world_below
from tests.deploy.fake_node import FakeNode
from tests.deploy.fake_runtime import AnswerLostError, FakeRuntime, Fate, Harshness
from tests.deploy.node_socket import NODE_SOCKET, on_socket
from tests.deploy.one_node import OneNode
from tests.deploy.rooted_here import root_here
from tests.waiting import PATIENCE_S, until

FAKE_STAGE = str(Path(__file__).parents[1] / "fake_stage.py")
LAYOUT = draw(DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4))
E, P, D = orders(LAYOUT)
QUICK = Patience(poll_s=0.03, backoff_s=0.1, health_every_s=0.05, stop_grace_s=1.0)


class Subject:
    """A runtime under test, and the world around it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def fails(self, name: str) -> None:
        """Its next start does."""
        raise NotImplementedError

    def forgives(self, name: str) -> None:
        """It does not, after all."""
        raise NotImplementedError

    def lingers(self, name: str) -> None:
        """Its next life takes all the time it is given to end."""

    async def kill(self, name: str) -> None:
        raise NotImplementedError

    async def seen(self, when: Callable[[dict[str, Observed]], object]) -> dict[str, Observed]:
        """What a new watch shows once it is so."""
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(self.runtime.watch()) as watch:  # type: ignore[type-var]
            async for item in watch:
                if when(found := {one.order.id: one for one in item}):
                    return found
        raise AssertionError("a watch never ends")

    async def phase(self, name: str, phase: Phase) -> Observed:
        return (await self.seen(lambda all_: name in all_ and all_[name].phase is phase))[name]

    async def up(self, *some: Order) -> None:
        for order in some:
            await self.runtime.start(order)
        for order in some:
            await self.phase(order.id, Phase.UP)

    async def comes_back(self, name: str, restarts: int = 1) -> Observed:
        return (await self.seen(lambda all_: all_[name].restarts == restarts and all_[name].phase is Phase.UP))[name]


class InMemory(Subject):
    def __init__(self, runtime: Runtime, fake: FakeRuntime) -> None:
        super().__init__(runtime)
        self._fake = fake

    def fails(self, name: str) -> None:
        self._fake.fates[name] = deque([Fate.FAILS])

    def forgives(self, name: str) -> None:
        self._fake.fates.pop(name, None)

    async def kill(self, name: str) -> None:
        self._fake.kill(name)


@dataclass
class _Stages:
    """Makes commands of stand-ins for vLLM."""

    failing: set[str] = field(default_factory=set)
    lingering: set[str] = field(default_factory=set)

    def __call__(self, plan: StagePlan) -> StageCommand:
        flags = ("--fail", "no such dtype") if plan.instance in self.failing else ()
        self.failing.discard(plan.instance)
        if plan.instance in self.lingering:
            flags = (*flags, "--ignore-term")
        self.lingering.discard(plan.instance)
        return StageCommand((sys.executable, FAKE_STAGE, plan.uds or str(plan.port), *flags), stage_command(plan).env)


class OfProcesses(Subject):
    def __init__(self, runtime: Runtime, stages: _Stages) -> None:
        super().__init__(runtime)
        self._stages = stages

    def fails(self, name: str) -> None:
        self._stages.failing.add(name)

    def forgives(self, name: str) -> None:
        self._stages.failing.discard(name)

    def lingers(self, name: str) -> None:
        self._stages.lingering.add(name)

    async def kill(self, name: str) -> None:
        one = (await self.seen(lambda all_: all_[name].pid))[name]
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)


class Mortal(Subject):
    """An agent that is killed again and again."""

    def __init__(self, world: World, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._world = world

    def fails(self, name: str) -> None:
        self._world.next_life(name, "--fail 'no such dtype'")

    def forgives(self, name: str) -> None:
        self._world.next_life(name, "")

    def lingers(self, name: str) -> None:
        self._world.next_life(name, "--ignore-term")

    async def kill(self, name: str) -> None:
        one = (await self.seen(lambda all_: all_[name].pid))[name]
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)

    async def dies(self) -> None:
        """Until cancelled."""
        chance = random.Random(0)
        while True:
            await asyncio.sleep(chance.uniform(0.0, 0.6))
            await self._world.kill()


@pytest.fixture(
    params=[
        "in memory",
        "harsh watch",
        "agent",
        "agent over its socket",
        "nodes in memory",
        pytest.param("nodes, one of them with an agent", marks=pytest.mark.slow),
        pytest.param("agent that is killed again and again", marks=pytest.mark.slow),
        pytest.param("nodes, one of them with an agent that is killed again and again", marks=pytest.mark.slow),
    ]
)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    match request.param:
        case "agent":
            async with processes_below(tmp_path) as (agent, stages, _):
                yield OfProcesses(agent, stages)
        case "agent over its socket":
            async with served_below(tmp_path) as (runtime, stages):
                yield OfProcesses(runtime, stages)
        case "nodes in memory":
            local = FakeNode("local")
            async with local.runtime as fake, several_with(local) as nodes:
                yield InMemory(nodes, fake)
        case "nodes, one of them with an agent":
            async with served_below(tmp_path) as (runtime, stages), several_with(runtime.another()) as nodes:
                yield OfProcesses(nodes, stages)
        case "agent that is killed again and again":
            async with world_below(tmp_path) as world, dying(Mortal(world, world.runtime)) as mortal:
                yield mortal
        case "nodes, one of them with an agent that is killed again and again":
            async with world_below(tmp_path) as world, several_with(world.runtime.another()) as nodes:
                async with dying(Mortal(world, nodes)) as mortal:
                    yield mortal
        case _:
            harshness = Harshness(skips_s=0.02, first_item_s=0.02) if request.param == "harsh watch" else None
            async with FakeRuntime(harshness=harshness) as fake:
                yield InMemory(fake, fake)


@contextlib.asynccontextmanager
async def dying(mortal: Mortal) -> AsyncIterator[Mortal]:
    """All the while."""
    task = asyncio.create_task(mortal.dies())
    yield mortal
    assert not task.done()
    task.cancel()


@contextlib.asynccontextmanager
async def several_with(agent: NodeClient) -> AsyncIterator[ManyNodes]:
    """Of nodes one of which has this agent, which is disconnected with them."""
    nodes = ManyNodes(print)
    nodes.join("local", agent)
    nodes.join("other", FakeNode("other"))
    try:
        yield nodes
    finally:
        await nodes.disconnect()


@contextlib.asynccontextmanager
async def processes_below(folder: Path) -> AsyncIterator[tuple[Agent, _Stages, RunDir]]:
    stages = _Stages()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        run = RunDir.create(folder / "run")
        stack.callback(run.remove)
        setup = AgentSetup.of(run, LAYOUT, stages, patience=QUICK)
        agent = Agent(setup, root.children, root.state(), say=print)
        async with agent.running():
            try:
                yield agent, stages, run
            finally:
                await agent.close()


@contextlib.asynccontextmanager
async def served_below(folder: Path) -> AsyncIterator[tuple[OneNode, _Stages]]:
    stages = _Stages()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        run = RunDir.create(folder / "run")
        stack.callback(run.remove)
        listening = stack.enter_context(private_socket(run.socket(NODE_SOCKET)))
        listening.listen()
        setup, watch, state = AgentSetup.of(run, LAYOUT, stages, patience=QUICK), NodeWatch(), root.state()
        agent = Agent(setup, root.children, state, say=watch.say)
        async with agent.running():
            serving = asyncio.create_task(serve_node(on_socket(listening.dup()), state, watch, agent, None))
            runtime = OneNode(run.path, print)
            try:
                yield runtime, stages
            finally:
                await runtime.close()
                await runtime.disconnect()
                serving.cancel()
                await asyncio.wait([serving])


async def test_who_watches_sees_everything_at_once_however_late(subject: Subject) -> None:
    assert await subject.seen(lambda _: True) == {}
    await subject.up(E, P)
    assert set(await subject.seen(lambda _: True)) == {"E0", "P0"}


async def test_an_instance_comes_up_with_an_address_and_a_life_of_its_own(subject: Subject) -> None:
    await subject.up(E, P)
    found = await subject.seen(lambda _: True)
    one, other = found["E0"], found["P0"]
    assert one.instance is not None and other.instance is not None
    assert (one.instance.id, one.instance.role, one.order) == ("E0", Role.E, E)
    assert one.instance.url != other.instance.url and one.instance.incarnation != other.instance.incarnation
    assert one.ever_up and one.serves and one.start_s > 0 and one.up_s > 0
    assert (one.restarts, one.over, one.retry_in_s, one.reason) == (0, False, None, "")


async def test_a_start_that_is_asked_for_again_changes_nothing(subject: Subject) -> None:
    await subject.up(E)
    before = (await subject.seen(lambda _: True))["E0"]
    await subject.runtime.start(E)
    after = (await subject.seen(lambda _: True))["E0"]
    assert after.instance == before.instance and after.pid == before.pid


async def test_a_name_is_one_instances(subject: Subject) -> None:
    await subject.up(E)
    with pytest.raises(ConfigError):
        await subject.runtime.start(Order("E0", P.spec))
    with pytest.raises(ConfigError):
        await subject.runtime.start(Order("E1", replace(E.spec, node="elsewhere")))
    assert set(await subject.seen(lambda _: True)) == {"E0"}


async def test_one_that_dies_comes_back_as_another_life_at_the_same_address(subject: Subject) -> None:
    await subject.up(E, P)
    before = (await subject.seen(lambda _: True))["P0"].instance
    await subject.kill("P0")
    after = (await subject.comes_back("P0")).instance
    assert before is not None and after is not None
    assert after.incarnation != before.incarnation and after.url == before.url
    assert (await subject.seen(lambda _: True))["E0"].restarts == 0


async def test_a_first_start_that_fails_is_over_and_concerns_no_other(subject: Subject) -> None:
    subject.fails("P0")
    await subject.runtime.start(P)
    await subject.up(E)
    one = await subject.phase("P0", Phase.DOWN)
    assert one.over and not one.ever_up and not one.serves and one.reason
    await subject.runtime.start(P)
    assert (await subject.seen(lambda _: True))["P0"].over, "it has to be stopped first"
    await subject.runtime.stop("P0", 1.0)
    await subject.up(P)


async def test_one_that_drains_serves_and_is_not_started_again(subject: Subject) -> None:
    await subject.up(E, P)
    await subject.runtime.drain("P0")
    await subject.runtime.drain("P0")
    assert (await subject.phase("P0", Phase.DRAINING)).serves
    await subject.kill("P0")
    one = (await subject.seen(lambda all_: all_["P0"].over))["P0"]
    assert (one.phase, one.retry_in_s, one.ever_up) == (Phase.DOWN, None, True)
    await subject.runtime.start(P)
    assert not (await subject.phase("P0", Phase.UP)).over


async def test_one_that_drains_is_taken_back_by_a_start(subject: Subject) -> None:
    await subject.up(P)
    before = (await subject.seen(lambda _: True))["P0"].instance
    await subject.runtime.drain("P0")
    await subject.phase("P0", Phase.DRAINING)
    await subject.runtime.start(P)
    assert (await subject.phase("P0", Phase.UP)).instance == before
    await subject.kill("P0")
    await subject.comes_back("P0")


def _stops_or_has_stopped(all_: dict[str, Observed]) -> bool:
    """A watch may skip that it stops."""
    return "P0" not in all_ or all_["P0"].phase is Phase.STOPPING


async def test_one_that_is_stopped_is_gone(subject: Subject) -> None:
    subject.lingers("P0")
    await subject.up(E, P)
    stops = [asyncio.create_task(subject.runtime.stop("P0", 3.0)) for _ in range(2)]
    if (await subject.seen(_stops_or_has_stopped)).keys() != {"E0"}:
        with pytest.raises(ConfigError):
            await subject.runtime.start(P)
    await asyncio.wait_for(asyncio.gather(*stops), PATIENCE_S)
    assert set(await subject.seen(lambda _: True)) == {"E0"}
    await subject.runtime.stop("P0", 1.0)
    await subject.up(P)


async def test_a_stop_goes_on_when_whoever_asked_has_gone(subject: Subject) -> None:
    await subject.up(P)
    asking = asyncio.create_task(subject.runtime.stop("P0", 1.0))
    await subject.seen(_stops_or_has_stopped)
    asking.cancel()
    assert await subject.seen(lambda all_: not all_) == {}


async def test_a_start_is_stopped_as_well(subject: Subject) -> None:
    await subject.runtime.start(P)
    await subject.runtime.stop("P0", 1.0)
    assert await subject.seen(lambda _: True) == {}


async def test_what_is_not_there_cannot_be_drained_flipped_or_stopped_and_that_is_no_error(subject: Subject) -> None:
    await subject.runtime.drain("P7")
    await subject.runtime.flip("P7", Role.D)
    await subject.runtime.stop("P7", 1.0)
    assert await subject.seen(lambda _: True) == {}


async def test_one_with_both_halves_takes_the_other_part_in_the_same_life(subject: Subject) -> None:
    both = Order("P0", replace(P.spec, both=True))
    await subject.up(both)
    before = (await subject.seen(lambda _: True))["P0"].instance
    await subject.runtime.flip("P0", Role.D)
    one = (await subject.seen(lambda all_: all_["P0"].order.spec.role is Role.D))["P0"]
    assert before is not None and one.instance == replace(before, role=Role.D)
    await subject.runtime.start(both)
    assert (await subject.seen(lambda _: True))["P0"].order.spec.role is Role.D, "a start is no flip"
    await subject.kill("P0")
    back = await subject.comes_back("P0")
    assert back.instance is not None and back.instance.role is Role.D


async def test_one_with_one_half_stays_what_it_is(subject: Subject) -> None:
    await subject.up(P)
    with pytest.raises(ConfigError):
        await subject.runtime.flip("P0", Role.D)
    await subject.runtime.flip("P0", Role.P)
    assert (await subject.seen(lambda _: True))["P0"].order == P


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_asked_the_last_word_counts(subject: Subject, seed: int) -> None:
    chance = random.Random(seed)

    async def asks(order: Order) -> None:
        for _ in range(8):
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.02, 0.2)))
            match chance.choice(("start", "drain", "stop", "give up on a stop", "kill", "fail")):
                case "start":
                    await subject.runtime.start(order)
                case "drain":
                    await subject.runtime.drain(order.id)
                case "stop":
                    await subject.runtime.stop(order.id, chance.choice((0.0, 1.0)))
                case "give up on a stop":
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(subject.runtime.stop(order.id, 1.0), 0.01)
                    await subject.runtime.stop(order.id, 1.0)
                case "kill":
                    if (await subject.seen(lambda _: True)).get(order.id, Observed(order, Phase.DOWN)).pid:
                        with contextlib.suppress(ProcessLookupError, TimeoutError):
                            await asyncio.wait_for(subject.kill(order.id), 1.0)
                case "fail":
                    subject.fails(order.id)
        await subject.runtime.stop(order.id, 1.0)
        subject.forgives(order.id)
        await subject.runtime.start(order)

    all_ = (E, P, D, Order("D1", D.spec))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for order in all_:
            group.create_task(asks(order))
    found = await subject.seen(lambda seen: len(seen) == 4 and all(one.phase is Phase.UP for one in seen.values()))
    assert {one.order for one in found.values()} == set(all_)
    for order in all_:
        await subject.runtime.stop(order.id, 1.0)
    assert await subject.seen(lambda _: True) == {}


# --- the agent alone ----------------------------------------------------------------------------------------------


async def test_the_arena_is_made_when_features_first_travel_and_is_whole_when_it_is_there(tmp_path: Path) -> None:
    async with processes_below(tmp_path) as (agent, stages, run):
        subject = OfProcesses(agent, stages)
        await subject.up(Order("D0", replace(D.spec, featured=False)))
        assert not run.arena.exists()
        await subject.up(E, P)
        assert run.arena.stat().st_size >= 8 << 20
        inode = run.arena.stat().st_ino
        await subject.kill("E0")
        await subject.comes_back("E0")
        assert run.arena.stat().st_ino == inode
        assert [path.name for path in run.shm.glob(f"epd-{run.launch_id}-arena*")] == [run.arena.name]
    assert not run.arena.exists()


async def test_an_agent_that_ends_while_its_arena_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, create = threading.Event(), threading.Event(), Arena.create

    def slowly(path: Path, capacity_bytes: int) -> Arena:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return create(path, capacity_bytes)

    monkeypatch.setattr(Arena, "create", slowly)
    async with processes_below(tmp_path) as (agent, _, run):
        await agent.start(E)
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.1, goes_on.set)
    await asyncio.get_running_loop().shutdown_default_executor()  # whatever still went on has ended
    assert list(run.shm.glob(f"epd-{run.launch_id}-*")) == []


async def test_an_arena_that_finds_no_room_fails_those_that_need_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    setup = replace(AgentSetup.of(run, LAYOUT, _Stages()), memory=SharedMemory(1 << 40, 4))
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        stack.callback(run.remove)
        agent = Agent(setup, root.children, root.state(), say=print)
        async with agent.running():
            subject = OfProcesses(agent, _Stages())
            await agent.start(E)
            assert "arena" in (await subject.phase("E0", Phase.DOWN)).reason
            await subject.up(Order("D0", replace(D.spec, featured=False)))
            await agent.close()


async def test_nothing_is_left_of_one_that_was_stopped_nor_of_all_when_the_agent_ends(tmp_path: Path) -> None:
    async with processes_below(tmp_path) as (agent, stages, run):
        subject = OfProcesses(agent, stages)
        await subject.up(E, P)
        groups = await agent.groups()
        run.socket("P0.load").touch()
        await agent.stop("P0", 1.0)
        assert not processes.group_members(groups["P0"]) and not run.socket("P0.load").exists()
        assert processes.group_members(groups["E0"])
    assert not processes.group_members(groups["E0"])


async def test_a_full_disk_keeps_nobody_from_being_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes_below(tmp_path) as (agent, stages, run):
        subject = OfProcesses(agent, stages)
        await subject.up(E, P)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("deploy.agent.instances.write_peers", full)
            await agent.stop("P0", 1.0)
            assert set(await subject.seen(lambda _: True)) == {"E0"}
            assert "P0" in run.peers.read_text()
        await agent.drain("E0")
        assert "P0" not in run.peers.read_text()


async def test_a_node_tells_its_room_and_how_long_starts_take(tmp_path: Path) -> None:
    async with processes_below(tmp_path) as (agent, stages, _):
        (node,) = await agent.nodes()
        assert (node.id, node.kind, node.start_s) == ("local", "cpu", {})
        assert node.room[SHARED_MEMORY] > 0
        await OfProcesses(agent, stages).up(P)
        (node,) = await agent.nodes()
        assert set(node.start_s) == {Role.P} and node.start_s[Role.P] > 0


# --- the one in memory alone --------------------------------------------------------------------------------------


async def test_in_memory_an_answer_may_be_lost_and_asking_again_helps() -> None:
    async with FakeRuntime(harshness=Harshness(lost_answers=1.0)) as runtime:
        subject = InMemory(runtime, runtime)
        for _ in range(2):
            with pytest.raises(AnswerLostError):
                await runtime.start(P)
        await subject.phase("P0", Phase.UP)
        for _ in range(2):
            with pytest.raises(AnswerLostError):
                await runtime.stop("P0", 1.0)
        assert await subject.seen(lambda _: True) == {}


async def test_in_memory_too_little_room_costs_a_neighbour_its_life() -> None:
    memory = {"host memory": 3}
    node = replace((await FakeRuntime().nodes())[0], room={"host memory": 5})
    async with FakeRuntime(node) as runtime:
        subject = InMemory(runtime, runtime)
        await subject.up(Order("P0", replace(P.spec, needs=memory)))
        await runtime.start(Order("D0", replace(D.spec, needs=memory)))
        await subject.seen(lambda all_: all_["P0"].restarts)
        assert "host memory" in runtime.overfull


@pytest.mark.parametrize(("fate", "ever_up"), [(Fate.HANGS, False), (Fate.LATE, True), (Fate.DIES, True)])
async def test_in_memory_lives_have_their_fates(fate: Fate, ever_up: bool) -> None:
    async with FakeRuntime() as runtime:
        subject = InMemory(runtime, runtime)
        runtime.fates["P0"] = deque([fate])
        await runtime.start(P)
        found = await subject.seen(lambda all_: all_["P0"].ever_up or all_["P0"].over)
        assert found["P0"].ever_up is ever_up
        if fate is Fate.DIES:
            await subject.comes_back("P0")
