"""E and P of a simulated layout: real bytes in the arena, announced after the put, pinned before the prefill."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.sim.consumer import Consumer, Wait
from epd_serve.sim.profile import Line, Profile
from epd_serve.sim.prompts import CHAT, RESPONSES
from store.keys import part_keys
from tests.epd_serve.sim.served import MODEL, PEERS, Layout, data_url, idle, layout, looking
from tests.waiting import until

FOR_EVER = 3600.0
PREFILL_ONLY = {"max_tokens": 1}


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(f"/dev/shm/epd-test-{secrets.token_hex(8)}-arena")
    yield path
    path.unlink(missing_ok=True)


async def stored(stages: Layout, key: str) -> None:
    await until(lambda: stages.arena.contains(key))


async def test_an_item_is_encoded_stored_announced_and_used(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(stages.wirings["E0"].publish)
            async with asyncio.timeout(60):
                await heard.recv()  # its reports are heard: so will be its announcements
                answer = (await stages.clients["E0"].post(CHAT, json=looking("k"))).json()
                told = []
                while not isinstance(event := wire.announcements.decode(await heard.recv()), wire.FeatureReady):
                    told += [event] if isinstance(event, wire.FeatureExpected) else []
        entry = answer["ec_transfer_params"]["k"]
        assert entry == {"item_indices": [0], "metadata": {"image_grid_thw": [[1, 4, 4]]}}
        assert told == [wire.FeatureExpected({"k": entry["metadata"]}, event.incarnation)]
        assert event.key == "k" and event.host == "here" and event.metadata == entry["metadata"]
        assert event.nbytes == 4 * Profile().feature_bytes_per_token
        assert (await stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY))).status_code == 200
        assert stages.engines["P0"].rates.item_tokens_per_s == 0, "nothing was encoded at P"
        await idle(stages.engines["P0"])
        assert stages.arena.stats().leased == 0


async def test_what_the_arena_has_is_not_encoded_again_unless_asked_to(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        encoder = stages.engines["E0"]
        for expected, more in ((1, {}), (1, {}), (2, {"vllm_xargs": {wire.ENCODE_AGAIN_XARG: "k"}})):
            assert (await stages.clients["E0"].post(CHAT, json=looking("k", "k", **more))).status_code == 200
            await stored(stages, "k")
            assert encoder.item_count == expected


async def test_prefill_waits_for_its_features_without_holding_blocks(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, feature_wait_s=FOR_EVER) as stages:
        waiting = asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY)))
        scheduler = stages.engines["P0"].scheduler
        await until(lambda: len(scheduler.held) == 1)
        assert scheduler.free_blocks == scheduler.blocks
        await stages.clients["E0"].post(CHAT, json=looking("k"))
        assert (await waiting).status_code == 200


async def test_a_lost_feature_is_recomputed_after_the_wait(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, feature_wait_s=0.0) as stages:
        assert (await stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY))).status_code == 200
        assert stages.engines["P0"].item_count == 1


async def test_what_no_encoder_made_is_recomputed_at_once(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, feature_wait_s=FOR_EVER) as stages:
        for number, missing in enumerate(("k", wire.ALL_MISSING), 1):
            body = looking("k", vllm_xargs={wire.MISSING_XARG: missing}, **PREFILL_ONLY)
            assert (await stages.clients["P0"].post(CHAT, json=body)).status_code == 200
            assert stages.engines["P0"].item_count == number


async def test_a_request_that_must_not_recompute_fails_and_says_why(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, feature_wait_s=0.0) as stages:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(stages.wirings["P0"].publish)
            async with asyncio.timeout(60):
                await heard.recv()
                body = looking("k", vllm_xargs={wire.ON_MISSING_XARG: wire.ON_MISSING_FAIL}, **PREFILL_ONLY)
                answer = await stages.clients["P0"].post(CHAT, json=body, headers={"x-request-id": "r" * 32})
                while not isinstance(event := wire.announcements.decode(await heard.recv()), wire.FeatureMissing):
                    pass
    assert answer.status_code == 500 and event.keys == ["k"] and event.cause == "deadline"
    assert "r" * 32 in event.request_id


async def test_parts_are_encoded_by_themselves_and_stand_for_the_item(tmp_path: Path, shm: Path) -> None:
    words = {wire.PARTS_XARG: ",".join(part_keys("k", 3))}
    async with layout(tmp_path, shm, feature_wait_s=FOR_EVER) as stages:
        for key in part_keys("k", 3):
            assert (await stages.clients["E0"].post(CHAT, json=looking(key))).status_code == 200
            await stored(stages, key)
        assert sorted(entry.meta.shape[0] for entry in stages.arena.entries()) == [1, 1, 2], "of four tokens"
        body = looking("k", vllm_xargs=words, **PREFILL_ONLY)
        assert (await stages.clients["P0"].post(CHAT, json=body)).status_code == 200
        assert stages.engines["P0"].item_count == 0
        await idle(stages.engines["P0"])
        assert stages.arena.stats().leased == 0


async def test_an_item_that_lacks_a_part_is_missing(tmp_path: Path, shm: Path) -> None:
    words = {wire.PARTS_XARG: ",".join(part_keys("k", 2)), wire.ON_MISSING_XARG: wire.ON_MISSING_FAIL}
    async with layout(tmp_path, shm, feature_wait_s=0.0) as stages:
        await stages.clients["E0"].post(CHAT, json=looking("k/0-2"))
        await stored(stages, "k/0-2")
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(stages.wirings["P0"].publish)
            async with asyncio.timeout(60):
                await heard.recv()
                answer = await stages.clients["P0"].post(CHAT, json=looking("k", vllm_xargs=words, **PREFILL_ONLY))
                while not isinstance(event := wire.announcements.decode(await heard.recv()), wire.FeatureMissing):
                    pass
    assert answer.status_code == 500 and event.keys == ["k"]


async def test_metadata_alone_cannot_be_recomputed(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, feature_wait_s=0.0) as stages:
        part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [[1, 4, 4]]}, "uuid": "k"}
        body = looking() | PREFILL_ONLY | {"messages": [{"role": "user", "content": [part]}]}
        assert (await stages.clients["P0"].post(CHAT, json=body)).status_code == 500


async def test_only_so_many_requests_recompute_at_a_time(tmp_path: Path, shm: Path) -> None:
    slow = Profile(encode=Line(FOR_EVER))
    async with layout(tmp_path, shm, slow, feature_wait_s=0.0, recompute_limit=1) as stages:
        asked = [
            asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking(key, **PREFILL_ONLY))) for key in "ab"
        ]
        scheduler = stages.engines["P0"].scheduler
        await until(lambda: len(scheduler.running) == 1 and len(scheduler.held) == 1)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await idle(stages.engines["P0"])


async def test_a_slow_encoder_is_waited_for_while_it_renews(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Wait] = []
    need = Consumer.need
    monkeypatch.setattr(Consumer, "need", lambda self, wait, given_up: (waits.append(wait), need(self, wait, given_up)))
    slow = Profile(encode=Line(FOR_EVER))
    async with layout(tmp_path, shm, slow, feature_wait_s=60.0) as stages:
        encoding = asyncio.create_task(stages.clients["E0"].post(CHAT, json=looking("k")))
        await until(lambda: bool(stages.engines["E0"].scheduler.running))
        waiting = asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY)))
        await until(lambda: len(stages.engines["P0"].scheduler.held) == 1)
        await until(lambda: bool(waits))
        for _ in range(3):
            before = waits[0].until["k"]
            await until(lambda before=before: waits[0].until["k"] > before)
        assert not waiting.done()
        for task in (encoding, waiting):
            task.cancel()
        await asyncio.wait([encoding, waiting])


async def test_features_get_lost_on_demand(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        await stages.clients["E0"].post("/sim/faults", json={"drop_features": 1})
        await stages.clients["E0"].post(CHAT, json=looking("lost"))
        await stages.clients["E0"].post("/sim/faults", json={"drop_features": 0})
        await stages.clients["E0"].post(CHAT, json=looking("kept"))
        await stored(stages, "kept")
        assert not stages.arena.contains("lost")


async def test_a_feature_that_another_host_announced_is_fetched(tmp_path: Path, shm: Path) -> None:
    elsewhere = f"ipc://{tmp_path}/E9.events"
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as encoder:
        encoder.setsockopt(zmq.LINGER, 0)
        encoder.bind(elsewhere)
        async with layout(
            tmp_path, shm, peers=[Peer("E9", Role.E, events=elsewhere)], feature_wait_s=FOR_EVER
        ) as stages:
            waiting = asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY)))
            nbytes = 4 * Profile().feature_bytes_per_token
            while not waiting.done():  # the first ones may come before it listens
                await encoder.send(
                    wire.encode(wire.FeatureReady("k", nbytes, "E-elsewhere", host="there", pooled=True))
                )
                await asyncio.wait([waiting], timeout=0.05)
            assert waiting.result().status_code == 200 and stages.engines["P0"].item_count == 0


async def test_an_encoder_that_failed_is_not_waited_for(tmp_path: Path, shm: Path) -> None:
    elsewhere = f"ipc://{tmp_path}/E9.events"
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as encoder:
        encoder.setsockopt(zmq.LINGER, 0)
        encoder.bind(elsewhere)
        async with layout(
            tmp_path, shm, peers=[Peer("E9", Role.E, events=elsewhere)], feature_wait_s=FOR_EVER
        ) as stages:
            waiting = asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY)))
            while not waiting.done():
                await encoder.send(wire.encode(wire.FeatureFailed("k", "no room")))
                await asyncio.wait([waiting], timeout=0.05)
            assert waiting.result().status_code == 200 and stages.engines["P0"].item_count == 1


@pytest.mark.parametrize("by_metadata", [False, True], ids=["as it is", "by its metadata"])
async def test_a_picture_of_a_response_is_a_feature_too(tmp_path: Path, shm: Path, by_metadata: bool) -> None:
    async with layout(tmp_path, shm) as stages:
        encoded = (await stages.clients["E0"].post(CHAT, json=looking("k"))).json()
        await stored(stages, "k")
        picture: dict[str, object] = {"image_url": data_url("PNG", 56, 56)}
        if by_metadata:
            picture = {"image_embeds": encoded["ec_transfer_params"]["k"]["metadata"]}
        given = [{"role": "user", "content": [{"type": "input_image", "uuid": "k", **picture}]}]
        body = {"model": MODEL, "input": given, "max_output_tokens": 1}
        answer = await stages.clients["P0"].post(RESPONSES, json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] > 4
        assert stages.engines["P0"].item_count == 0, "it was encoded elsewhere"


async def test_a_running_p_hears_an_encoder_that_comes(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, peers=(), feature_wait_s=FOR_EVER) as stages:
        waiting = asyncio.create_task(stages.clients["P0"].post(CHAT, json=looking("k", **PREFILL_ONLY)))
        await until(lambda: len(stages.engines["P0"].scheduler.held) == 1)
        write_peers(tmp_path / PEERS, [Peer("E0", Role.E, events=stages.wirings["E0"].publish)])
        while not waiting.done():  # the first announcements may come before it listens
            await stages.clients["E0"].post(CHAT, json=looking("k", vllm_xargs={wire.ENCODE_AGAIN_XARG: "k"}))
            await asyncio.wait([waiting], timeout=0.05)
        assert waiting.result().status_code == 200 and stages.engines["P0"].item_count == 0
