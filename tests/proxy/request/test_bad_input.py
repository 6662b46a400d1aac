"""Every bad input is one OpenAI-shaped 4xx that names the field, reaches no stage, and leaves the server up."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from typing import Any

import pytest

from epd_serve.errors import RequestError
from proxy.admission.gate import sequences_of
from proxy.config.limits import MemoryLimits
from proxy.request.parse import Endpoint, parse
from tests.proxy.fakes import answer, cluster, data_url, hangs, image_body, image_file, once, settings, text_body

CHAT, COMPLETIONS = Endpoint.CHAT.value, Endpoint.COMPLETIONS.value
ITEM = "messages[0].content[1].image_url"


def part(**fields: Any) -> dict[str, Any]:
    return text_body(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, fields]}])


def image(url: Any, **more: Any) -> dict[str, Any]:
    return part(type="image_url", image_url={"url": url}, **more)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", **fields}


def deep(levels: int) -> bytes:
    return json.dumps(text_body(tools="?")).replace('"?"', "[" * levels + "]" * levels).encode()


PNG = data_url(image_file())
JPEG = image_file(64, 64, kind="JPEG")
ROWS: list[tuple[str, str, Any, int, str | None]] = [
    ("malformed JSON", CHAT, b'{"model": ', 400, None),
    ("not UTF-8", CHAT, b'{"model": "\xff"}', 400, None),
    ("NaN", CHAT, b'{"model": "demo", "temperature": NaN}', 400, None),
    ("infinity", CHAT, b'{"model": "demo", "temperature": 1e999}', 400, None),
    ("nested too deeply", CHAT, b"[" * 200_000, 400, None),
    *((f"tools of {n} levels", CHAT, deep(n), 400, None) for n in (700, 900)),
    ("not an object", CHAT, b"[1]", 400, None),
    ("empty body", CHAT, b"", 400, None),
    ("no model", CHAT, {"messages": []}, 400, "model"),
    ("unknown model", CHAT, text_body(model="gpt-9"), 404, "model"),
    ("a model that is no string", CHAT, text_body(model=3), 400, "model"),
    ("a lone surrogate", CHAT, b'{"model": "\\ud800"}', 400, "model"),
    ("a lone surrogate as role", CHAT, text_body(messages=[{"role": "\ud800"}]), 400, "messages[0].role"),
    ("a lone surrogate to stop at", CHAT, text_body(stop="\ud800"), 400, "stop"),
    ("a lone surrogate as a name", CHAT, text_body(vllm_xargs={"\ud800": 1}), 400, "vllm_xargs.\\ud800"),
    *(
        (f"{name} of a wrong type", path, body, 400, name)
        for path, body, name in (
            (CHAT, text_body(structured_outputs=[]), "structured_outputs"),
            (CHAT, text_body(structured_outputs="1"), "structured_outputs"),
            (CHAT, text_body(structured_outputs={"choice": "a"}), "structured_outputs.choice"),
            (CHAT, text_body(response_format="json_object"), "response_format"),
            (CHAT, text_body(stream=True, stream_options=True), "stream_options"),
            (CHAT, text_body(tools={"type": "function"}), "tools"),
            (CHAT, text_body(tools=[{"type": "function", "function": {"name": "f"}}, 1]), "tools[1]"),
            (CHAT, text_body(tools=[{"type": "function", "function": "f"}]), "tools[0].function"),
            (CHAT, text_body(messages=[{"role": "assistant", "tool_calls": 0}]), "messages[0].tool_calls"),
            (CHAT, text_body(prompt_logprobs="1"), "prompt_logprobs"),
            (CHAT, text_body(top_logprobs=[1]), "top_logprobs"),
            (COMPLETIONS, completion(prompt="x", structured_outputs=1.5), "structured_outputs"),
            (COMPLETIONS, completion(prompt="x", logprobs={}), "logprobs"),
            (Endpoint.RESPONSES.value, {"model": "demo", "input": "x", "tools": False}, "tools"),
            ("/tokenize", {"messages": [{"role": "user"}], "tools": 1}, "tools"),
        )
    ),
    *(
        ("a grammar and a list of tokens", CHAT, text_body(**grammar, allowed_token_ids=[1]), 400, "allowed_token_ids")
        for grammar in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": None, "choice": ["a"]}},
        )
    ),
    ("no messages", CHAT, {"model": "demo"}, 400, "messages"),
    ("empty messages", CHAT, text_body(messages=[]), 400, "messages"),
    ("a message that is no object", CHAT, text_body(messages=["x"]), 400, "messages[0]"),
    ("content that is an object", CHAT, text_body(messages=[{"content": {}}]), 400, "messages[0].content"),
    ("no prompt", COMPLETIONS, completion(), 400, "prompt"),
    ("empty prompt list", COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    ("prompt_embeds", COMPLETIONS, completion(prompt="x", prompt_embeds="AAAA"), 400, "prompt_embeds"),
    ("negative max_tokens", CHAT, text_body(max_tokens=-1), 400, "max_tokens"),
    ("zero max_tokens", COMPLETIONS, completion(prompt="x", max_tokens=0), 400, "max_tokens"),
    ("max_tokens as text", CHAT, text_body(max_tokens="5"), 400, "max_tokens"),
    ("negative max_completion_tokens", CHAT, text_body(max_completion_tokens=-5), 400, "max_completion_tokens"),
    ("n of zero", CHAT, text_body(n=0), 400, "n"),
    ("n too large", CHAT, text_body(n=100_000), 400, "n"),
    ("n as boolean", CHAT, text_body(n=True), 400, "n"),
    ("more prompts than may be", COMPLETIONS, completion(prompt=["x"] * 257), 400, "prompt"),
    ("more prompts times n than may be", COMPLETIONS, completion(prompt=["x"] * 5, n=64), 400, "prompt"),
    ("more prompts of tokens than may be", COMPLETIONS, completion(prompt=[[1]] * 257), 400, "prompt"),
    ("stream as text", CHAT, text_body(stream="yes"), 400, "stream"),
    ("processor options that are no object", CHAT, text_body(mm_processor_kwargs=[1]), 400, "mm_processor_kwargs"),
    *(
        (f"client-sent {name}", CHAT, text_body(**{name: value}), 400, name)
        for name, value in {
            "kv_transfer_params": {}, "ec_transfer_params": {"x": 1}, "cache_salt": "x", "request_id": "x",
            "uuid": "x", "mm_hashes": [], "image_embeds": "x", "prompt_embeds": "x",
        }.items()
    ),
    (
        "smuggled in vllm_xargs",
        CHAT,
        text_body(vllm_xargs={"kv_transfer_params": "x"}),
        400,
        "vllm_xargs.kv_transfer_params",
    ),
    ("client-sent uuid", CHAT, image(PNG, uuid="key"), 400, "messages[0].content[1].uuid"),
    ("an uuid on text", CHAT, part(type="text", text="x", uuid="key"), 400, "messages[0].content[1].uuid"),
    (
        "image_embeds part",
        CHAT,
        part(type="image_embeds", image_embeds={"image_grid_thw": [1, 1, 1]}),
        400,
        "messages[0].content[1].image_embeds",
    ),
    ("image_embeds part without data", CHAT, part(type="image_embeds"), 400, "messages[0].content[1].type"),
    ("embeds beside an image", CHAT, image(PNG, image_embeds=None), 400, "messages[0].content[1].image_embeds"),
    ("a second URL beside an image", CHAT, image(PNG, video_url="http://10.0.0.1/"), 400, "messages[0].content[1]"),
    ("a URL inside a text part", CHAT, part(type="text", text="x", image_url="http://x/"), 400, None),
    ("a part that is a number", CHAT, text_body(messages=[{"content": [1]}]), 400, "messages[0].content[0]"),
    ("an image without URL", CHAT, part(type="image_url"), 400, "messages[0].content[1]"),
    ("a URL that is no string", CHAT, image(7), 400, ITEM),
    ("an unknown scheme", CHAT, image("ftp://example.com/x.png"), 400, ITEM),
    ("a bare path", CHAT, image("/etc/passwd"), 400, ITEM),
    ("file:// without an allowed root", CHAT, image("file:///etc/passwd"), 400, ITEM),
    ("loopback URL", CHAT, image("http://127.0.0.1:1/x.png"), 400, ITEM),
    ("metadata service", CHAT, image("http://169.254.169.254/latest/"), 400, ITEM),
    ("a URL without host", CHAT, image("http:///x.png"), 400, ITEM),
    ("a URL that does not parse", CHAT, image("http://[::1/x.png"), 400, ITEM),
    ("a port that is none", CHAT, image("http://example.com:99999/x.png"), 400, ITEM),
    ("a port that is no number", CHAT, image("http://example.com:t0ken/x.png"), 400, ITEM),
    ("a lone surrogate in a URL", CHAT, image("http://example.com/\ud800"), 400, f"{ITEM}.url"),
    ("credentials in the URL", CHAT, image("http://a:b@example.com/x.png"), 400, ITEM),
    ("a data URL without base64", CHAT, image("data:image/png,abc"), 400, ITEM),
    ("bad base64", CHAT, image("data:image/png;base64,@@@@"), 400, ITEM),
    ("bad padding", CHAT, image("data:image/png;base64,AAAAA"), 400, ITEM),
    ("empty image", CHAT, image("data:image/png;base64,"), 400, ITEM),
    ("not an image", CHAT, image(data_url(b"hello world")), 400, ITEM),
    ("truncated PNG", CHAT, image(data_url(image_file(64, 64)[:-20])), 400, ITEM),
    ("corrupt PNG", CHAT, image(data_url(image_file(64, 64).replace(b"IDAT", b"IDAU"))), 400, ITEM),
    ("truncated JPEG", CHAT, image(data_url(JPEG[: len(JPEG) // 2])), 400, ITEM),
    ("a format that is not accepted", CHAT, image(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n")), 400, ITEM),
    ("too many items", CHAT, image_body(*[PNG] * 5), 400, "messages"),
    ("an item too large", CHAT, image(data_url(b"x" * 300_000)), 413, ITEM),
    ("bad audio", CHAT, part(type="input_audio", input_audio={"data": "%%", "format": "wav"}), 400, None),
    ("a body too large", CHAT, text_body(user="x" * 2_000_000), 413, None),
]  # fmt: skip


async def test_every_bad_input_is_refused_with_the_field_and_the_server_stays_up() -> None:
    base = settings()
    media = base.media.__class__(max_items=4, max_bytes=200_000)
    strict = settings(media=media, max_body_bytes=1_000_000, trust_request_mm_kwargs=True)
    wrong = []
    async with cluster("E0", "P0", "D0", config=strict) as c:
        for name, path, body, status, param in ROWS:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await c.client.post(path, content=raw, headers={"content-type": "application/json"})
            error = response.json().get("error", {})
            shaped = set(error) == {"message", "type", "param", "code"} and error["message"]
            if response.status_code != status or (param and error["param"] != param) or not shaped:
                wrong.append((name, response.status_code, error))
        assert not wrong
        assert not any(stage.calls for stage in c.stages.values())
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
async def test_a_bomb_is_refused_by_its_header_with_its_size() -> None:
    bomb = image_file(1, 1)
    size = (10_000).to_bytes(4, "big") * 2
    header = b"IHDR" + size + bomb[24:29]
    bomb = bomb[:12] + header + zlib.crc32(header).to_bytes(4, "big") + bomb[33:]
    async with cluster("EPD0") as c:
        response = await c.client.post(CHAT, json=image(data_url(bomb)))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == ITEM and error["code"] == "too_many_pixels"
        assert "10000x10000 = 100,000,000 pixels" in error["message"] and "36,000,000" in error["message"]


async def test_a_modality_that_the_model_does_not_take_is_refused_by_the_part() -> None:
    audio = {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}
    async with cluster("E0", "PD0", config=settings(modalities=frozenset({"image"}))) as c:
        response = await c.client.post(CHAT, json=part(type="input_audio", input_audio=audio))
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "unsupported_modality"
        assert error["param"] == "messages[0].content[1].input_audio" and "it takes image" in error["message"]
        assert not c["E0"].calls
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200


async def test_a_text_only_model_takes_no_image() -> None:
    async with cluster("PD0", config=settings(modalities=frozenset())) as c:
        response = await c.client.post(CHAT, json=image_body())
        assert response.status_code == 400 and "text only" in response.json()["error"]["message"]


async def test_unknown_routes_and_methods_are_openai_shaped() -> None:
    async with cluster("EPD0") as c:
        missing = await c.client.post("/v1/nothing", json={})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "unknown_url"
        method = await c.client.get(CHAT)
        assert method.status_code == 405 and method.json()["error"]["code"] == "method_not_allowed"


async def test_overload_is_429_with_retry_after() -> None:
    async with cluster("EPD0", config=settings(max_in_flight=1)) as c:
        c["EPD0"].script.append(hangs)
        first = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c["EPD0"].until(lambda stage: stage.active == 1)
        second = await c.client.post(CHAT, json=text_body())
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        first.cancel()


async def test_a_body_that_is_still_coming_counts_too() -> None:
    async with cluster("EPD0", config=settings(max_in_flight=1)) as c:
        _, writer = await asyncio.open_connection(c.client.base_url.host, c.client.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 90000000\r\n\r\n".encode())
        await c.until_metric("epd_proxy_in_flight", 1)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 429
        writer.close()
        await c.idle()
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200


async def test_what_is_unusual_but_fine_passes() -> None:
    audio = {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}
    parts: list[Any] = [
        "plain text",
        {"type": "text", "text": "x", "extra": 1},
        {"image_url": PNG},
        {"type": "input_image", "image_url": PNG, "detail": "auto"},
        {"type": "image_url", "image_url": {"url": data_url(JPEG, "image/jpeg"), "detail": "high"}},
        {"type": "input_audio", "input_audio": audio},
    ]
    unusual: dict[str, Any] = {"kv_transfer_params": None, "n": None, "user": "\U0001f600", "prompt": []}
    body = text_body(messages=[{"role": "user", "content": parts}], **unusual)
    async with cluster("EPD0") as c:
        raw = json.dumps(body).encode()
        response = await c.client.post(CHAT, content=raw)
        assert response.status_code == 200, response.text
        sent = c["EPD0"].calls[0].body
        assert sent["user"] == "\U0001f600"
        content = sent["messages"][0]["content"]
    assert content[:2] == ["plain text", {"type": "text", "text": "x"}]
    assert [part["type"] for part in content[2:]] == ["image_url", "image_url", "image_url", "input_audio"]
    assert content[2]["uuid"] == content[3]["uuid"] != content[4]["uuid"]
    assert content[3]["detail"] == "auto" and content[4]["image_url"]["detail"] == "high"
    assert content[5]["input_audio"] == audio and content[5]["uuid"]


async def test_what_vllm_takes_for_another_type_passes() -> None:
    lax = {
        "seed": "1",
        "top_k": 3.0,
        "logprobs": "true",
        "stop": None,
        "tools": None,
        "structured_outputs": {"json": "{}"},
    }
    no_grammar = {"structured_outputs": {"json": None}, "allowed_token_ids": [1]}
    async with cluster("EPD0") as c:
        assert (await c.client.post(CHAT, json=text_body(**lax))).status_code == 200
        assert c["EPD0"].calls[0].body.items() >= lax.items()
        strings = {"prompt": "x", "stop": "a", "logit_bias": {"1": "2"}, "allowed_token_ids": ["1"]}
        assert (await c.client.post(COMPLETIONS, json=completion(**strings))).status_code == 200
        assert (await c.client.post(CHAT, json=text_body(**no_grammar))).status_code == 200


async def test_a_truncation_that_is_null_is_left_out_of_a_response() -> None:
    async with cluster("EPD0") as c:
        await c.client.post(Endpoint.RESPONSES.value, json={"model": "demo", "input": "x", "truncation": None})
        assert "truncation" not in c["EPD0"].calls[0].body


async def test_bodies_of_requests_in_progress_are_bounded_together() -> None:
    large = text_body(user="x" * 5000)
    async with cluster("PD0", config=settings(memory=MemoryLimits(25_000))) as c:
        released = asyncio.Event()
        c["PD0"].script.append(once(released, answer))
        first = asyncio.create_task(c.client.post(CHAT, json=large))
        await c["PD0"].until(lambda stage: stage.active == 1)
        refused = await c.client.post(CHAT, json=large)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "25,000 bytes" in refused.json()["error"]["message"]
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200, "a small one still fits"
        released.set()
        assert (await first).status_code == 200
        assert (await c.client.post(CHAT, json=large)).status_code == 200
        await c.idle()
        assert c.pipeline.memory.held == 0


@pytest.mark.parametrize("prompt", [[], ["a", "b"], {}, [[]]])
async def test_a_prompt_beside_messages_reaches_no_stage(prompt: object) -> None:
    async with cluster("PD0") as c:
        response = await c.client.post(CHAT, json=text_body(prompt=prompt))
        assert response.status_code == 200 and "prompt" not in c["PD0"].calls[0].body
        tokenized = await c.client.post("/tokenize", json={"messages": [{"role": "user"}], "prompt": prompt})
        assert tokenized.status_code == 200


def sequences(endpoint: Endpoint, body: dict[str, Any], most: int) -> int:
    return sequences_of(parse(endpoint, json.dumps(body).encode(), settings()), most)


def test_only_prompts_of_completions_are_counted_as_sequences() -> None:
    assert sequences(Endpoint.CHAT, text_body(prompt=["a"] * 9, n=2), 2) == 2
    assert sequences(Endpoint.COMPLETIONS, completion(prompt=["a", "b"], n=2), 4) == 4
    assert sequences(Endpoint.COMPLETIONS, completion(prompt=[1] * 9), 1) == 1, "one prompt of nine tokens"
    assert sequences(Endpoint.COMPLETIONS, completion(prompt=["a"], n=2), 1) == 2, "that is for max_n to say"


def test_too_many_prompts_are_refused_with_the_limit_and_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"4 answers, at most 3 .* several requests") as refused:
        sequences(Endpoint.COMPLETIONS, completion(prompt=["a", "b"], n=2), 3)
    assert refused.value.status == 400 and refused.value.param == "prompt"
