"""Requests that fuzz a proxy: made from its own OpenAPI document, or by damaging good bodies. What they hold it to: no
5xx, no hang, answers as the document says, errors in OpenAI's shape."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from proxy.http.openapi import document
from proxy.request.parse import Endpoint
from tests.proxy.fakes import data_url, image_body, image_file, text_body
from tests.proxy.fakes import settings as proxy_settings

TIMEOUT_S = 30.0
"""A request that takes this long hangs."""
KEY = {"authorization": "Bearer fuzz-key"}
GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: image_body(data_url(image_file()), stream=True, n=2, tools=[], vllm_xargs={"a": 1}, unheard_of=1),
    Endpoint.COMPLETIONS: {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    Endpoint.RESPONSES: {
        "model": "demo",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(image_file())}]}],
        "truncation": "disabled",
    },
    Endpoint.TOKENIZE: {"messages": text_body()["messages"], "add_generation_prompt": True},
    Endpoint.DETOKENIZE: {"tokens": [1, 2, 3]},
}
OPERATIONS = sorted(
    one["operationId"] for path in document(proxy_settings(), "0")["paths"].values() for one in path.values()
)


def examples_of(examples: int) -> settings:
    return settings(
        max_examples=examples, database=None, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None
    )


def fuzz_by_document(url: str, name: str, examples: int) -> None:
    """Requests of one operation of the server's own document, as it allows them, and as it does not."""
    import schemathesis

    document = httpx.get(f"{url}/openapi.json", headers=KEY, timeout=TIMEOUT_S, trust_env=False)
    schema = schemathesis.openapi.from_dict(document.json())
    (operation,) = (one.ok() for one in schema.get_all_operations() if one.ok().definition.raw["operationId"] == name)
    for mode in schemathesis.GenerationMode:
        _fuzz_operation(operation, mode, url, examples)


def _fuzz_operation(operation: Any, mode: Any, url: str, examples: int) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    judged = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @examples_of(examples)
    @given(operation.as_strategy(generation_mode=mode))
    def probe(case: Any) -> None:
        response = case.call(base_url=url, headers=KEY, timeout=TIMEOUT_S)
        case.validate_response(response, checks=judged)

    with contextlib.suppress(Unsatisfiable):  # a request without parameters cannot be wrong
        probe()


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


def fuzz_by_damage(url: str, endpoint: Endpoint, examples: int) -> None:
    """Bodies that were good once."""
    with httpx.Client(base_url=url, headers=KEY, timeout=TIMEOUT_S, trust_env=False) as client:
        assert client.post(endpoint.value, json=GOOD[endpoint]).status_code == 200, endpoint

        @examples_of(examples)
        @given(damaged(GOOD[endpoint]))
        def probe(raw: bytes) -> None:
            response = client.post(endpoint.value, content=raw)
            assert response.status_code < 500, response.text
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        probe()
