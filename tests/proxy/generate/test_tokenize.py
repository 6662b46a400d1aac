"""`/tokenize` and `/detokenize` are answered by any stage with a language model, and by none that cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd_serve.errors import DeadlineError
from epd_serve.instances import Instance
from proxy.config.limits import AdmissionLimits
from proxy.generate.tokenize import TIMEOUT_S
from tests.proxy.fakes import (
    answer,
    breaks,
    cluster,
    data_url,
    image_body,
    image_file,
    in_flight,
    once,
    replies,
    settings,
    text_body,
)

TOKENS = {"count": 2, "max_model_len": 64, "tokens": [1, 2]}


async def test_a_prompt_is_tokenized_by_a_stage_that_has_a_tokenizer() -> None:
    async with cluster("E0", "P0", "D0") as c:
        for stage in c.stages.values():
            stage.usual = replies(200, TOKENS)
        response = await c.client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})
        assert response.status_code == 200 and response.json() == TOKENS
        (call,) = c["P0"].calls + c["D0"].calls
        assert call.path == "/tokenize" and call.body["model"] == "demo" and not call.body["add_special_tokens"]
        assert not c["E0"].calls and in_flight(c.table) == 0


async def test_images_of_a_tokenized_chat_are_loaded_here_and_have_no_name() -> None:
    url = data_url(image_file())
    async with cluster("E0", "P0", "D0") as c:
        for stage in c.stages.values():
            stage.usual = replies(200, TOKENS)
        messages = image_body(url)["messages"]
        assert (await c.client.post("/tokenize", json={"messages": messages})).status_code == 200
        (call,) = c["P0"].calls + c["D0"].calls
        part = call.body["messages"][0]["content"][1]
        assert part == {"type": "image_url", "image_url": {"url": url}}
        messages[0]["content"][1]["image_url"]["url"] = "http://169.254.169.254/latest/"
        refused = await c.client.post("/tokenize", json={"messages": messages})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "media_address_refused"


async def test_tokens_become_text_again() -> None:
    async with cluster("PD0") as c:
        c["PD0"].usual = replies(200, {"prompt": "hello"})
        response = await c.client.post("/detokenize", json={"model": "demo", "tokens": [1, 2]})
        assert response.json() == {"prompt": "hello"} and c["PD0"].calls[0].path == "/detokenize"


@pytest.mark.parametrize("tokens", [None, "1", [1.0], [True], [-1], [1 << 63], ["a"]])
async def test_what_is_no_list_of_tokens_is_refused(tokens: object) -> None:
    async with cluster("PD0") as c:
        response = await c.client.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == ("tokens[0]" if tokens and isinstance(tokens, list) else "tokens")
        assert not c["PD0"].calls


async def test_another_stage_answers_for_one_that_broke() -> None:
    async with cluster("PD0", "PD1") as c:
        broken = iter([breaks])
        for stage in c.stages.values():

            async def once(stage, call, receive, send):  # type: ignore[no-untyped-def]
                await next(broken, replies(200, TOKENS))(stage, call, receive, send)

            stage.usual = once
        response = await c.client.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 200
        assert len(c["PD0"].calls) == len(c["PD1"].calls) == 1


async def test_one_that_is_suspended_is_asked_last() -> None:
    async with cluster("PD0", "PD1") as c:
        c["PD1"].usual = replies(200, TOKENS)
        c.table.suspend("PD0", "PD0-life1", True)
        for _ in range(16):
            assert (await c.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        assert len(c["PD1"].calls) == 16
        c["PD1"].usual, c["PD0"].usual = breaks, replies(200, TOKENS)
        assert (await c.client.post("/tokenize", json={"prompt": "x"})).status_code == 200


async def test_one_that_hangs_costs_its_own_time_only_and_another_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("PD0", "PD1") as c:
        posts: list[tuple[str, float | None]] = []

        async def post(instance: Instance, *_: Any, timeout_s: float | None) -> dict[str, Any]:
            posts.append((instance.id, timeout_s))
            if len(posts) == 1:
                raise DeadlineError("no answer in time")
            return TOKENS

        monkeypatch.setattr(c.pipeline._stages, "post", post)
        response = await c.client.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 200 and response.json() == TOKENS
        assert sorted(name for name, _ in posts) == ["PD0", "PD1"]
        assert {timeout_s for _, timeout_s in posts} == {TIMEOUT_S}
        assert TIMEOUT_S * 3 < 60, "all of it within a client's patience"


async def test_it_neither_waits_behind_generation_nor_takes_a_place_from_it() -> None:
    one = AdmissionLimits(sequences_per_instance=1, text_queue=1)
    async with cluster("PD0", config=settings(admission=one)) as c:
        released = asyncio.Event()
        c["PD0"].script.extend([once(released, answer), replies(200, TOKENS)])
        served = asyncio.create_task(c.client.post("/v1/chat/completions", json=text_body()))
        await c["PD0"].until(lambda stage: stage.active == 1)
        waiting = asyncio.create_task(c.client.post("/v1/chat/completions", json=text_body()))
        await c.until_metric("epd_proxy_queue_waiting", 1, kind="text")
        assert (await c.client.post("/tokenize", json={"prompt": "x"})).json() == TOKENS
        released.set()
        assert [(await one).status_code for one in (served, waiting)] == [200, 200]


async def test_as_many_are_with_the_stages_as_may_and_the_rest_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.generate.tokenize.MAX_CONCURRENT", 1)
    async with cluster("PD0") as c:
        released = asyncio.Event()
        c["PD0"].script.append(once(released, replies(200, TOKENS)))
        first = asyncio.create_task(c.client.post("/tokenize", json={"prompt": "x"}))
        await c["PD0"].until(lambda stage: stage.active == 1)
        monkeypatch.setattr("proxy.generate.tokenize.TIMEOUT_S", 0.01)
        refused = await c.client.post("/tokenize", json={"prompt": "x"})
        assert refused.status_code == 429 and refused.headers["retry-after"]
        released.set()
        assert (await first).status_code == 200


async def test_when_all_are_broken_there_is_one_error_and_no_endless_round() -> None:
    async with cluster("PD0", "PD1", config=settings(retries=9)) as c:
        for stage in c.stages.values():
            stage.usual = breaks
        response = await c.client.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 502
        assert len(c["PD0"].calls) == len(c["PD1"].calls) == 1


async def test_with_encoders_only_there_is_no_tokenizer() -> None:
    async with cluster("E0") as c:
        response = await c.client.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 503 and response.headers["retry-after"]
