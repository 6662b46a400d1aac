"""Whatever a client sends, made from our own OpenAPI document or by damaging good bodies: no 5xx, no hang, and answers
as the document says. The stages behind the proxy take everything, so every failure would be the proxy's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from proxy.openapi import document
from proxy.request import Endpoint
from proxy.settings import MediaLimits
from tests.proxy.fakes import cluster, data_url, encodes, picture, picture_body, text_body
from tests.proxy.fakes import settings as proxy_settings

TIMEOUT_S = 30.0
"""A request that takes this long hangs."""
KEY = {"authorization": "Bearer fuzz-key"}
CONFIG = proxy_settings(
    api_keys=("fuzz-key",), media=MediaLimits(max_items=4, schemes=("data", "file")), max_body_bytes=1_000_000
)
GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: picture_body(data_url(picture()), stream=True, n=2, tools=[], vllm_xargs={"a": 1}),
    Endpoint.COMPLETIONS: {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    Endpoint.RESPONSES: {
        "model": "demo",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(picture())}]}],
        "truncation": "disabled",
    },
    Endpoint.TOKENIZE: {"messages": text_body()["messages"], "add_generation_prompt": True},
    Endpoint.DETOKENIZE: {"tokens": [1, 2, 3]},
}


@contextlib.contextmanager
def served_proxy() -> Iterator[str]:
    """The URL of a proxy in front of fake stages, in an event loop of its own."""
    ready, address = threading.Event(), []
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with cluster("E0", "P0", "D0", "PD0", config=CONFIG) as c:
            c["E0"].usual = encodes()
            address.append(str(c.client.base_url))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S), "the proxy did not start"
        yield address[0].rstrip("/")
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(TIMEOUT_S)
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_proxy() as found:
        yield found


def examples_of(examples: int) -> settings:
    return settings(
        max_examples=examples, database=None, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None
    )


def fuzz_by_document(url: str, examples: int) -> None:
    """Bodies, headers and paths as the document allows them, and as it does not."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(document(CONFIG, "0"))
    asked = 0
    for found in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:
            asked += bool(fuzz_operation(found.ok(), mode, url, examples))
    assert asked >= 2 * len(Endpoint)


def fuzz_operation(operation: Any, mode: Any, url: str, examples: int) -> int:
    """How many requests were made."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    judged = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    asked = 0

    @examples_of(examples)
    @given(operation.as_strategy(generation_mode=mode))
    def probe(case: Any) -> None:
        nonlocal asked
        response = case.call(base_url=url, headers=KEY, timeout=TIMEOUT_S)
        asked += 1
        case.validate_response(response, checks=judged)

    with contextlib.suppress(Unsatisfiable):  # a request without parameters cannot be wrong
        probe()
    return asked


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A good body with values replaced, or its bytes cut and overwritten."""
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )
    body = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(0, 3))):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = holder[key]
            if isinstance(inner, dict | list) and draw(st.booleans()):
                holder = inner
                continue
            holder[key] = draw(junk)
            break
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.integers(0, 2))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


def fuzz_by_damage(url: str, examples: int) -> None:
    with httpx.Client(base_url=url, headers=KEY, timeout=TIMEOUT_S, trust_env=False) as client:
        for endpoint, good in GOOD.items():
            assert client.post(endpoint.value, json=good).status_code == 200, endpoint
            fuzz_endpoint(client, endpoint, good, examples)


def fuzz_endpoint(client: httpx.Client, endpoint: Endpoint, good: dict[str, Any], examples: int) -> None:
    @examples_of(examples)
    @given(damaged(good))
    def probe(raw: bytes) -> None:
        response = client.post(endpoint.value, content=raw)
        assert response.status_code < 500, response.text
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    probe()


def test_requests_made_from_the_document_get_the_answers_it_promises(url: str) -> None:
    fuzz_by_document(url, examples=4)


def test_damaged_bodies_are_refused_in_openai_s_shape(url: str) -> None:
    fuzz_by_damage(url, examples=20)


@pytest.mark.slow
def test_many_requests_made_from_the_document(url: str) -> None:
    fuzz_by_document(url, examples=300)


@pytest.mark.slow
def test_many_damaged_bodies(url: str) -> None:
    fuzz_by_damage(url, examples=1000)
