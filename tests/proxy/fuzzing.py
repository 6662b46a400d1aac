"""Requests that fuzz a proxy: made from its own OpenAPI document, or by damaging good bodies. What they hold it to: no
5xx, no hang, answers as the document says, errors in OpenAI's shape."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import zlib
from random import Random
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from proxy.fields.rules import ANTHROPIC, NESTED, NESTED_ANTHROPIC
from proxy.fields.vllm_fields import FIELDS
from proxy.request.parse import Endpoint
from tests.proxy.fakes import data_url, document, image_body, image_file, text_body
from tests.proxy.fakes import settings as proxy_settings

TIMEOUT_S = 30.0
"""A request that takes this long hangs."""
KEY = {"authorization": "Bearer fuzz-key"}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": data_url(image_file()).partition(",")[2]}
_MESSAGES = [
    {"role": "user", "content": [{"type": "image", "source": _SOURCE}, {"type": "text", "text": "what?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}],
    },
]
GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: image_body(data_url(image_file()), stream=True, n=2, vllm_xargs={"a": 1}, unheard_of=1),
    Endpoint.COMPLETIONS: {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    Endpoint.RESPONSES: {
        "model": "demo",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(image_file())}]}],
        "truncation": "disabled",
    },
    Endpoint.TOKENIZE: {"messages": text_body()["messages"], "add_generation_prompt": True},
    Endpoint.DETOKENIZE: {"tokens": [1, 2, 3]},
    Endpoint.MESSAGES: {"model": "demo", "max_tokens": 3, "messages": _MESSAGES, "system": "be brief", "stream": True},
    Endpoint.COUNT_TOKENS: {"messages": _MESSAGES},
}
OPERATIONS = sorted(
    one["operationId"] for path in document(proxy_settings())["paths"].values() for one in path.values()
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


def good_bodies(model: str) -> list[tuple[Endpoint, dict[str, Any]]]:
    """Bodies that a server of `model` answers with 200: those of `GOOD`, and such with objects to damage."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    sampling = {"temperature": 0.5, "stop": ["x"], "stop_token_ids": [1], "logit_bias": {"1": 1.0}, "seed": 1}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    more = [
        (Endpoint.CHAT, {"messages": turns, "tools": [tool], "tool_choice": "none", **sampling}),
        (Endpoint.CHAT, text_body(response_format=schema, chat_template_kwargs={"a": 1}, **usage)),
        (Endpoint.CHAT, text_body(structured_outputs={"choice": ["a", "b"]}, logprobs=True, top_logprobs=1)),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2], [3]], **sampling, **usage}),
        (
            Endpoint.COMPLETIONS,
            {"prompt": "a", "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
        ),
        (
            Endpoint.RESPONSES,
            {
                "input": [
                    {"role": "user", "content": "hello"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "1"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                "text": {"format": {"type": "text"}},
                "reasoning": {"effort": "low"},
            },
        ),
        (
            Endpoint.MESSAGES,
            {
                "messages": [{"role": "user", "content": "hello"}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "none"},
                "stop_sequences": ["x"],
                "thinking": {"type": "adaptive"},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
        ),
        (Endpoint.TOKENIZE, {"messages": turns, "tools": [tool]}),
        (Endpoint.TOKENIZE, {"prompt": "a"}),
    ]
    length = dict.fromkeys((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES), "max_tokens")
    length[Endpoint.RESPONSES] = "max_output_tokens"
    return [
        (endpoint, {**({length[endpoint]: 3} if endpoint in length else {}), **body, "model": model})
        for endpoint, body in [*GOOD.items(), *more]
    ]


DEEP = "\0deep"
"""Stands for lists in lists, which `json` cannot write."""
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 2**200, -(2**200), 1e308, float("nan"), float("-inf"), DEEP),
    *("", "x", "1", "auto", "json_schema", "\ud800", "x\udfff", "\0", "\U0001f600", "x" * 5000, "a\u0300" * 50),
    *([], {}, [[]], [{}], [None], ["x"], [1], [1.5], [2**200], ["\ud800"], [["x"]], [[[1]]]),
    *({"a": 1}, {"\ud800": 1}, {"type": "x"}, {"type": 1}, {"type": None}, {"role": "user"}, {"content": 1}),
    *({"type": "json_object"}, {"type": "function"}, {"name": []}, {"json": 1}, {"1": "x"}, {"url": 1}),
)  # fmt: skip


@functools.cache
def odd_pictures() -> tuple[str, ...]:
    """Data URLs: 20,000 pixels a side, or only said to be so, cut, empty."""
    small = image_file()
    huge = (20_000).to_bytes(4, "big") * 2
    head = b"IHDR" + huge + small[24:29]
    bomb = small[:12] + head + zlib.crc32(head).to_bytes(4, "big") + small[33:]
    files = (bomb, image_file(20_000, 1), image_file(1, 20_000), image_file(20_000, 8), image_file(1, 1), small[:40])
    return (*map(data_url, (*files, small[:-20], b"", b"GIF89a")), "data:,", "data:image/png;base64,@", "file:///x")


class Damage:
    """Makes bodies of good ones: values replaced, added under any name that vLLM knows, or taken away; their bytes cut
    and overwritten. The same ones from the same seed."""

    def __init__(self, model: str, seed: int, only: Endpoint | None = None) -> None:
        self._good = [one for one in good_bodies(model) if only in (None, one[0])]
        self._random = Random(seed)

    def next(self) -> tuple[Endpoint, bytes]:
        choose, (endpoint, good) = self._random, self._random.choice(self._good)
        body = copy.deepcopy(good)
        for _ in range(choose.choice((0, 1, 1, 1, 1, 2, 2, 3))):
            self._change(body, endpoint)
        raw = written(body)
        if choose.random() < 0.05:
            raw = raw[: choose.randrange(len(raw))]
        if choose.random() < 0.05:
            at = choose.randrange(len(raw) or 1)
            raw = raw[:at] + bytes([choose.randrange(256)]) + raw[at + 1 :]
        return endpoint, raw

    def _change(self, body: dict[str, Any], endpoint: Endpoint) -> None:
        choose, holder, path = self._random, body, ""
        while inner := [(key, one) for key, one in items_of(holder) if isinstance(one, dict | list) and one]:
            if choose.random() < (0.25 if path else 0.5):
                break
            key, holder = choose.choice(inner)
            if isinstance(key, str):
                path = f"{path}.{key}" if path else key
        if isinstance(holder, list):
            at = choose.randrange(len(holder))
            match choose.randrange(4):
                case 0:
                    holder.insert(at, self._junk(path))
                case 1:
                    holder.insert(at, copy.deepcopy(holder[at]))
                case _:
                    holder[at] = self._junk(path)
            return
        name = choose.choice([*_names_at(path, endpoint, body), *holder, *holder])
        if name in holder and choose.random() < 0.15:
            del holder[name]
        else:
            holder[name] = self._junk(name)

    def _junk(self, name: str) -> Any:
        if name.rpartition(".")[2] in ("url", "image_url", "data", "content") and self._random.random() < 0.5:
            url = self._random.choice(odd_pictures())
            return [{"type": "image_url", "image_url": {"url": url}}] if name == "content" else url
        return copy.deepcopy(self._random.choice(JUNK))


def _names_at(path: str, endpoint: Endpoint, body: dict[str, Any]) -> list[str]:
    """Names that an object there may have."""
    if endpoint.is_anthropic:
        return (NESTED_ANTHROPIC.get(path, "") if path else ANTHROPIC).split()
    model = model_of(endpoint, body)
    return NESTED[model].get(path, "").split() if path else sorted(frozenset().union(*FIELDS[model].values()))


def model_of(endpoint: Endpoint, body: dict[str, Any]) -> str:
    if endpoint is Endpoint.TOKENIZE:
        return "tokenize_chat" if "messages" in body else "tokenize_text"
    return {Endpoint.CHAT: "chat", Endpoint.COMPLETIONS: "completion", Endpoint.RESPONSES: "response"}.get(
        endpoint, "detokenize"
    )


def items_of(holder: Any) -> list[tuple[Any, Any]]:
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def written(body: Any) -> bytes:
    """As JSON, NaN and nesting without reason included."""
    return json.dumps(body).replace(json.dumps(DEEP), "[" * 2000 + "]" * 2000).encode()


def fault_of(response: httpx.Response) -> str:
    """What a server must not answer a body with: a status from 500, or a stream that ends with an error of its own;
    "" where it did not."""
    if response.status_code >= 500:
        return f"{response.status_code} {response.text[:500]}"
    if response.headers["content-type"].startswith("text/event-stream"):
        errors = [line for line in response.text.splitlines() if line.startswith(('data: {"error"', "event: error"))]
        return f"a stream that ends with {errors[0][:500]}" if errors else ""
    return ""


def fuzz_by_damage(url: str, endpoint: Endpoint, examples: int) -> None:
    """Bodies that were good once."""
    damage = Damage("demo", 1, endpoint)
    with httpx.Client(base_url=url, headers=KEY, timeout=TIMEOUT_S, trust_env=False) as client:
        assert client.post(endpoint.value, json=GOOD[endpoint]).status_code == 200, endpoint
        for _ in range(examples):
            _, raw = damage.next()
            response = client.post(endpoint.value, content=raw)
            assert not fault_of(response), (fault_of(response), raw)
            if response.status_code != 200:
                error = {"message", "type"} if endpoint.is_anthropic else {"message", "type", "param", "code"}
                assert set(response.json()["error"]) == error
