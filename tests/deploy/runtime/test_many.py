"""Several nodes as one runtime, beyond what every runtime does: nodes that come, fall silent, go, and come again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec
import pytest

from deploy.agent.specs import orders
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_api import LostError, NodeStatus, SilentError
from deploy.runtime.node_api import Seen as Answer
from deploy.runtime.protocol import Observed, Order, Phase
from epd_serve.roles import Role
from tests.deploy.fake_node import FakeNode
from tests.waiting import PATIENCE_S, until

E, P, D = orders(draw(DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4)))
Seen = dict[str, Observed]


def on(node: str, order: Order, name: str = "") -> Order:
    return Order(name or order.id, replace(order.spec, node=node))


async def seen(nodes: ManyNodes, when: Callable[[Seen], object] = lambda _: True) -> Seen:
    """What a new watch shows once it is so."""
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(nodes.watch()) as watch:  # type: ignore[type-var]
        async for item in watch:
            found = {one.order.id: one for one in item}
            assert len(found) == len(item), "an id is one instance's"
            if when(found):
                return found
    raise AssertionError("a watch never ends")


@contextlib.asynccontextmanager
async def joined(*names: str, silent_s: float = 0.1) -> AsyncIterator[tuple[ManyNodes, list[FakeNode]]]:
    """Nodes of these names, all of which are reachable."""
    nodes, agents = ManyNodes(print, silent_s=silent_s, first_word_s=0.3), [FakeNode(name) for name in names]
    for agent in agents:
        nodes.join(agent.name, agent)
    try:
        yield nodes, agents
    finally:
        await nodes.disconnect()
        for agent in agents:
            await agent.runtime.__aexit__()


async def up(nodes: ManyNodes, *some: Order) -> Seen:
    for order in some:
        await nodes.start(order)
    return await seen(nodes, lambda all_: all(order.id in all_ and all_[order.id].serves for order in some))


async def test_each_instance_runs_where_its_spec_says_and_is_found_there() -> None:
    async with joined("a", "b") as (nodes, (a, b)):
        await up(nodes, on("a", E), on("b", P), on("b", D))
        assert (a.running(), b.running()) == ({"E0"}, {"P0", "D0"})
        await nodes.drain("P0")
        assert (await seen(nodes))["P0"].phase is Phase.DRAINING
        await nodes.stop("D0", 0.0)
        assert set(await seen(nodes)) == {"E0", "P0"} and b.running() == {"P0"}
        assert [node.id for node in await nodes.nodes()] == ["a", "b"]
        assert await nodes.groups() == {"a/E0": 1, "b/P0": 1}
        await nodes.close()
        assert not a.running() and not b.running()


async def test_a_node_that_is_not_there_is_refused_at_once() -> None:
    async with joined("a") as (nodes, _):
        with pytest.raises(LostError):
            await nodes.start(on("b", E))
        await nodes.stop("E0", 0.0)


async def test_nobody_is_told_anything_before_all_have_spoken() -> None:
    async with joined("a", "b") as (nodes, _):
        await up(nodes, on("a", E), on("b", P))
        later = FakeNode("c", reachable=False)
        await later.runtime.start(on("c", D))
        nodes.join("c", later)
        first = asyncio.create_task(seen(nodes))
        await asyncio.sleep(0.1)
        assert not first.done()
        later.reachable.set()
        assert set(await first) == {"E0", "P0", "D0"}


async def test_who_does_not_speak_in_time_holds_nobody_up() -> None:
    async with joined("a") as (nodes, _):
        nodes.join("b", FakeNode("b", reachable=False))
        await up(nodes, on("a", E))
        assert set(await seen(nodes)) == {"E0"}


async def test_who_watches_is_not_held_up_by_one_that_joins_and_does_not_speak() -> None:
    async with joined("a") as (nodes, _), contextlib.aclosing(nodes.watch()) as watch:  # type: ignore[type-var]
        assert await anext(watch) == ()
        nodes.join("b", FakeNode("b", reachable=False))
        await nodes.start(on("a", E))
        async with asyncio.timeout(PATIENCE_S):
            async for item in watch:
                if item:
                    return


async def test_a_silent_nodes_instances_are_down_until_it_speaks_again() -> None:
    async with joined("a", "b") as (nodes, (_, b)):
        before = await up(nodes, on("a", E), on("b", P))
        b.reachable.clear()
        found = await seen(nodes, lambda all_: all_["P0"].phase is Phase.DOWN)
        assert "silent" in found["P0"].reason and not found["P0"].over and found["E0"].serves
        assert [node.id for node in await nodes.nodes()] == ["a", "b"], "what it is, is remembered"
        b.reachable.set()
        assert (await seen(nodes, lambda all_: all_["P0"].serves))["P0"].instance == before["P0"].instance


async def test_a_call_to_a_silent_node_fails_at_once_and_one_under_way_when_it_falls_silent() -> None:
    async with joined("a", "b") as (nodes, (_, b)):
        await up(nodes, on("b", P))
        b.reachable.clear()
        start = asyncio.create_task(nodes.start(on("b", D)))
        with pytest.raises(SilentError):
            await asyncio.wait_for(start, PATIENCE_S)
        for call in (nodes.start(on("b", D)), nodes.stop("P0", 0.0), nodes.drain("P0")):
            with pytest.raises(SilentError):
                await asyncio.wait_for(call, 0.05)
        b.reachable.set()
        await seen(nodes, lambda all_: all_["P0"].serves)
        await up(nodes, on("b", D))


async def test_an_answer_that_a_newer_one_has_overtaken_changes_nothing() -> None:
    async with joined("a", silent_s=PATIENCE_S) as (nodes, (a,)):
        await up(nodes, on("a", E))
        status, late, shown = a.status, asyncio.Event(), list[set[str]]()

        async def overtaken(after: int = 0) -> Answer[NodeStatus] | None:
            answer = await status(after)
            if after and answer is not None:
                await late.wait()
            return answer

        async def watch() -> None:
            async for item in nodes.watch():
                shown.append({one.order.id for one in item})

        a.status = overtaken  # type: ignore[method-assign]
        await asyncio.sleep(0.1)  # what was asked before is answered
        await nodes.start(on("a", P))
        await nodes.stop("P0", 0.0)
        watching = asyncio.create_task(watch())
        await until(lambda: shown)
        late.set()
        await nodes.start(on("a", D))
        await until(lambda: shown[-1] == {"E0", "D0"})
        watching.cancel()
        assert not any("P0" in ids for ids in shown)


async def test_calls_under_way_end_when_their_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.runtime.many.ASK_S", 10 * PATIENCE_S)
    async with joined("a", "b", silent_s=PATIENCE_S) as (nodes, (_, b)):
        await up(nodes, on("a", E), on("b", P))
        b.reachable.clear()
        groups = asyncio.create_task(nodes.groups())
        stop, start = asyncio.create_task(nodes.stop("P0", 0.0)), asyncio.create_task(nodes.start(on("b", D)))
        await asyncio.sleep(0.05)
        assert not stop.done() and not start.done()
        nodes.lose("b")
        assert await asyncio.wait_for(groups, PATIENCE_S) == {"a/E0": 1}
        await asyncio.wait_for(stop, PATIENCE_S)
        with pytest.raises(LostError):
            await asyncio.wait_for(start, PATIENCE_S)
        assert set(await seen(nodes)) == {"E0"}
        await until(lambda: b.parted)


async def test_one_that_comes_again_with_nothing_has_nothing() -> None:
    async with joined("a", "b") as (nodes, (_, b)):
        await up(nodes, on("a", E), on("b", P))
        b.begin_again()
        await seen(nodes, lambda all_: set(all_) == {"E0"})
        await up(nodes, on("b", P))


async def test_a_node_that_rests_is_still_there_and_asked_nothing_until_it_joins_again() -> None:
    async with joined("a", "b") as (nodes, (_, b)):
        await up(nodes, on("a", E))
        nodes.rest("b")
        await until(lambda: b.parted)
        assert [node.id for node in await nodes.nodes()] == ["a", "b"] and set(await seen(nodes)) == {"E0"}
        with pytest.raises(SilentError):
            await nodes.start(on("b", P))
        nodes.join("b", again := FakeNode("b"))
        await up(nodes, on("b", P))
        assert again.running() == {"P0"} and not b.running()


async def test_what_was_started_elsewhere_meanwhile_is_ended_by_the_one_that_comes_back() -> None:
    async with joined("a", "b") as (nodes, (a, b)):
        await up(nodes, on("b", P))
        nodes.lose("b")
        await up(nodes, on("a", P))
        nodes.join("b", b)
        await until(lambda: not b.running())
        assert (await seen(nodes))["P0"].order.spec.node == "a" and a.running() == {"P0"}


async def test_what_is_remembered_is_down_until_its_node_speaks_or_is_lost() -> None:
    async with joined("a", "b") as (nodes, (a, b)):
        remembered = tuple((await up(nodes, on("a", E), on("b", P), on("b", D))).values())
        again = msgspec.json.decode(msgspec.json.encode(remembered), type=tuple[Observed, ...])
        await b.runtime.stop("D0", 0.0)
        later = ManyNodes(print, again, silent_s=0.1, first_word_s=0.1)
        later.join("a", a)
        found = await seen(later)
        assert found["E0"].serves and found["P0"].phase is found["D0"].phase is Phase.DOWN
        later.join("b", b)
        found = await seen(later)
        assert found["P0"].serves and set(found) == {"E0", "P0"}
        later.lose("b")
        assert set(await seen(later)) == {"E0"}
        await later.disconnect()


async def test_each_agent_knows_who_is_there_on_the_others() -> None:
    async with joined("a", "b") as (nodes, (a, b)):
        await up(nodes, on("a", E), on("a", replace(P, spec=replace(P.spec, both=True))), on("b", D))
        await until(lambda: b.known is not None and {one.instance for one in b.known} == {"E0", "P0"})
        await until(lambda: a.known is not None and [one.instance for one in a.known] == ["D0"])
        await nodes.flip("P0", Role.D)
        await until(lambda: {one.instance: one.role for one in b.known or ()} == {"E0": Role.E, "P0": Role.D})
        a.reachable.clear()
        await seen(nodes, lambda all_: all_["E0"].phase is Phase.DOWN)
        assert {one.instance for one in b.known or ()} == {"E0", "P0"}, "who is silent may serve on"
        nodes.lose("a")
        await until(lambda: b.known == ())


async def test_no_agent_is_told_of_fewer_than_there_may_be() -> None:
    """Its stages would part from the others."""
    async with joined("a", "b") as (nodes, (a, b)):
        await up(nodes, on("a", E), on("b", P))
        await until(lambda: a.known)
        told: list[int] = []
        later, know = ManyNodes(print, silent_s=5.0, first_word_s=5.0), a.know

        async def noted(peers: tuple[object, ...]) -> None:
            told.append(len(peers))
            await know(peers)

        a.know = noted
        b.reachable.clear()
        later.join("a", a)
        later.join("b", b)
        await asyncio.sleep(0.1)
        assert told == []
        b.reachable.set()
        await until(lambda: told)
        assert told == [1]
        await later.disconnect()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_nodes_do_all_that_runs_is_seen_in_the_end_and_nothing_twice(seed: int) -> None:
    chance, names = random.Random(seed), ["a", "b", "c"]
    async with joined(*names) as (nodes, agents):
        there = set(names)
        watching = asyncio.create_task(seen(nodes, lambda _: False))
        for number in range(40):
            agent = chance.choice(agents)
            match chance.choice(("start", "start", "stop", "silent", "speak", "empty", "lose", "join")):
                case "start":
                    with contextlib.suppress(TimeoutError, LostError, SilentError):
                        order = on(agent.name, E, f"E{number % 6}")
                        if not any(order.id in one.running() for one in agents if one is not agent):
                            await asyncio.wait_for(nodes.start(order), 0.05)
                case "stop":
                    with contextlib.suppress(TimeoutError, SilentError):
                        await asyncio.wait_for(nodes.stop(f"E{number % 6}", 0.0), 0.3)
                case "silent":
                    agent.reachable.clear()
                case "speak":
                    agent.reachable.set()
                case "empty":
                    agent.begin_again()
                case "lose":
                    nodes.lose(agent.name)
                    there.discard(agent.name)
                case "join":
                    nodes.join(agent.name, agent)
                    there.add(agent.name)
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.02)))
        for agent in agents:
            agent.reachable.set()
            nodes.join(agent.name, agent)

        async def agreed() -> bool:
            found = {name: one.order.spec.node for name, one in (await seen(nodes)).items() if one.serves}
            return found == {id: agent.name for agent in agents for id in agent.running()} and not watching.done()

        await until(agreed)
        assert sum(len(agent.running()) for agent in agents) == len(await seen(nodes))
        watching.cancel()
