"""P and D of a simulated layout: D reserves before P sends, by the real desks, whatever ends a transfer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.sim.prompts import CHAT, COMPLETIONS
from epd_serve.wiring import StageWiring
from tests.epd_serve.sim.served import PEERS, Layout, chat, idle, layout, served
from tests.waiting import PATIENCE_S, until

FOR_EVER = 3600.0


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(f"/dev/shm/epd-test-{secrets.token_hex(8)}-arena")
    yield path
    path.unlink(missing_ok=True)


async def ask(stages: Layout, body: dict[str, object], path: str = CHAT) -> tuple[dict[str, object], dict[str, object]]:
    """The answers of P and D to one request."""
    to_p, to_d = stages.kv_params
    headers = {"x-request-id": "r"}
    at_d = asyncio.create_task(stages.clients["D0"].post(path, json={**body, **to_d}, headers=headers))
    at_p = await stages.clients["P0"].post(path, json={**body, **to_p}, headers=headers)
    return at_p.json(), (await at_d).json()


async def test_a_request_runs_through_both_and_leaves_nothing(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, Profile(kv=Line(0.001))) as stages:
        p, d = await ask(stages, chat())
        assert p["kv_transfer_params"] == {"ok": True, "reason": ""}
        assert d["usage"]["completion_tokens"] == 4  # type: ignore[index]
        assert stages.engines["D0"].rates.prompt_tokens_per_s == 0, "D computes the last prompt token alone"
        for name in ("P0", "D0"):
            await idle(stages.engines[name])


async def test_every_child_of_a_request_has_a_transfer_of_its_own(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        p, d = await ask(stages, {"prompt": ["one", "two"], "n": 2, "max_tokens": 2}, COMPLETIONS)
        assert p["kv_transfer_params"] == {"ok": True, "reason": ""}
        assert len(d["choices"]) == 4  # type: ignore[arg-type]


async def test_prefill_waits_until_decode_has_reserved(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        to_p, to_d = stages.kv_params
        headers = {"x-request-id": "r"}
        at_p = asyncio.create_task(stages.clients["P0"].post(CHAT, json={**chat(), **to_p}, headers=headers))
        engine = stages.engines["P0"]
        await until(lambda: len(engine.scheduler.held) == 1)
        assert engine.scheduler.free_blocks == engine.scheduler.blocks, "it holds no blocks meanwhile"
        at_d = await stages.clients["D0"].post(CHAT, json={**chat(), **to_d}, headers={"x-request-id": "r"})
        assert at_d.status_code == (await at_p).status_code == 200


async def test_prefill_keeps_its_kv_until_the_transfer_is_over(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, Profile(kv=Line(FOR_EVER))) as stages:
        to_p, to_d = stages.kv_params
        headers = {"x-request-id": "r"}
        decode = asyncio.create_task(stages.clients["D0"].post(CHAT, json={**chat(), **to_d}, headers=headers))
        await stages.clients["P0"].post(CHAT, json={**chat(), **to_p}, headers=headers)
        p, d = (stages.engines[name].scheduler for name in ("P0", "D0"))
        assert p.free_blocks < p.blocks and d.free_blocks < d.blocks
        decode.cancel()
        await until(lambda: not d.held)
        assert d.free_blocks < d.blocks, "prefill may still write there"


async def test_a_client_that_leaves_before_the_prefill_frees_both(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, Profile(prefill=Line(FOR_EVER))) as stages:
        to_p, to_d = stages.kv_params
        headers = {"x-request-id": "r"}
        asked = [
            asyncio.create_task(stages.clients[name].post(CHAT, json={**chat(), **params}, headers=headers))
            for name, params in (("D0", to_d), ("P0", to_p))
        ]
        await until(lambda: bool(stages.engines["P0"].scheduler.running))
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        for name in ("P0", "D0"):
            await idle(stages.engines[name])


async def test_what_prefill_refuses_fails_at_decode(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        _, to_d = stages.kv_params
        params = to_d["kv_transfer_params"]
        assert isinstance(params, dict)
        params["peer"]["incarnation"] = "a former life"
        answer = await stages.clients["D0"].post(CHAT, json={**chat(), **to_d})
        assert answer.status_code == 500 and "KV load failure" in answer.json()["error"]["message"]
        await idle(stages.engines["D0"])


async def test_different_prompts_do_not_pass_for_one(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        to_p, to_d = stages.kv_params
        headers = {"x-request-id": "r"}
        at_d = asyncio.create_task(stages.clients["D0"].post(CHAT, json={**chat("here"), **to_d}, headers=headers))
        at_p = await stages.clients["P0"].post(CHAT, json={**chat("elsewhere"), **to_p}, headers=headers)
        assert at_p.json()["kv_transfer_params"]["ok"] is False
        assert (await at_d).status_code == 500


async def test_decode_computes_alone_what_nobody_prefills(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        answer = await stages.clients["D0"].post(CHAT, json=chat())
        assert answer.json()["usage"]["completion_tokens"] == 4


async def test_a_tiny_cache_at_both_ends_serves_many_requests(tmp_path: Path, shm: Path) -> None:
    capacity = Capacity(kv_tokens=64, block_tokens=4, max_running=4)
    async with layout(tmp_path, shm, Profile(capacity=capacity)) as stages:

        async def one(number: int) -> int:
            to_p, to_d = stages.kv_params
            headers, body = {"x-request-id": f"r{number}"}, chat("a prompt of forty bytes and a little more")
            at_p = asyncio.create_task(stages.clients["P0"].post(CHAT, json={**body, **to_p}, headers=headers))
            answer = await stages.clients["D0"].post(CHAT, json={**body, **to_d}, headers=headers)
            return max(answer.status_code, (await at_p).status_code)

        assert set(await asyncio.gather(*(one(number) for number in range(30)))) == {200}
        for name in ("P0", "D0"):
            await idle(stages.engines[name])


async def test_links_report_themselves_and_who_is_there(tmp_path: Path, shm: Path) -> None:
    import zmq.asyncio

    async with layout(tmp_path, shm) as stages:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.connect(stages.wirings["P0"].kv_publish.format(rank=0))
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            await ask(stages, chat())
            async with asyncio.timeout(60):
                while True:
                    report = wire.announcements.decode(await heard.recv())
                    assert isinstance(report, wire.KvReport)
                    (link,) = report.links
                    if link.transfers:
                        break
    assert (link.peer, link.state, link.transport) == ("D0", "up", "sim/shm") and link.bytes > 0


async def test_a_link_refuses_a_real_stage_by_the_name_of_its_transport(tmp_path: Path, shm: Path) -> None:
    import zmq.asyncio

    async with layout(tmp_path, shm) as stages:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(stages.wirings["D0"].kv_worker_endpoint.format(rank=0))
            await dealer.send(wire.encode(wire.Hello(wire.VERSION, "P9:x", "shm", {})))
            answer = wire.to_prefill_worker.decode(await dealer.recv())
    assert isinstance(answer, wire.HelloRefused) and "simulated here, shm there" in answer.reason


async def test_a_running_p_opens_a_link_to_a_d_that_comes_and_closes_it_when_that_has_left(
    tmp_path: Path, shm: Path
) -> None:
    async with layout(tmp_path, shm, peers=()) as stages:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(stages.wirings["P0"].kv_publish.format(rank=0))

            async def links_are(*wanted: tuple[str, str]) -> None:
                found: list[tuple[str, str]] | None = None
                while found != list(wanted):
                    report = wire.announcements.decode(await heard.recv())
                    assert isinstance(report, wire.KvReport)
                    found = [(link.peer, link.state) for link in report.links]

            async with asyncio.timeout(PATIENCE_S):
                await links_are()
                write_peers(tmp_path / PEERS, [Peer("D0", Role.D, kv_workers=(f"ipc://{tmp_path}/D0.kvw0",))])
                await links_are(("D0", "up"))
                write_peers(tmp_path / PEERS, [])
                await links_are()


async def test_two_with_both_halves_change_parts_without_a_word_to_them(tmp_path: Path, shm: Path) -> None:
    async with AsyncExitStack() as stack:
        wirings = {
            name: StageWiring(
                name,
                role,
                f"{name}-life",
                peers=str(tmp_path / PEERS),
                kv_endpoint=f"ipc://{tmp_path}/{name}.kv",
                kv_worker_endpoint=f"ipc://{tmp_path}/{name}.kvw{{rank}}",
                kv_publish=f"ipc://{tmp_path}/{name}.kvnews{{rank}}",
                both=True,
            )
            for name, role in (("P0", Role.P), ("D0", Role.D))
        }
        stages = {name: await stack.enter_async_context(served(wiring=one)) for name, one in wirings.items()}

        async def ask(p: str, d: str) -> None:
            transfer = f"{p}{d}"
            peer = {"instance": p, "incarnation": wirings[p].incarnation, "endpoint": wirings[p].kv_endpoint}
            to_p = {"transfer_id": transfer, "incarnation": wirings[p].incarnation}
            to_d = {"transfer_id": transfer, "peer": peer}
            headers = {"x-request-id": transfer}
            answers = await asyncio.gather(
                stages[p][1].post(CHAT, json={**chat(), "max_tokens": 1, "kv_transfer_params": to_p}, headers=headers),
                stages[d][1].post(CHAT, json={**chat(), "kv_transfer_params": to_d}, headers=headers),
            )
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[0].json()["kv_transfer_params"] == {"ok": True, "reason": ""}
            assert answers[1].json()["usage"]["completion_tokens"] == 4

        await ask("P0", "D0")
        await ask("D0", "P0")
        for engine, _ in stages.values():
            await idle(engine)
