"""What a stage gets of a client's fields: what its vLLM knows and nothing else; the rest is counted, or refused."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerBase

from epd_serve.errors import ConfigError, RequestError
from proxy.fields.rules import (
    IGNORED,
    MEDIA_OPTIONS,
    OTHER,
    PASSED,
    REFUSED,
    TEMPLATE_KWARGS_REFUSED,
    known_release,
    names_of,
    rules_of,
)
from proxy.fields.vllm_fields import FIELDS, RELEASES
from proxy.request.parse import Endpoint, parse
from proxy.stages.bodies import NOT_FOR_PREFILL
from tests.proxy.fakes import cluster, settings, text_body

CHAT = Endpoint.CHAT
BODIES: dict[Endpoint, dict[str, Any]] = {
    CHAT: text_body(),
    Endpoint.COMPLETIONS: {"model": "demo", "prompt": "x"},
    Endpoint.RESPONSES: {"model": "demo", "input": "x"},
    Endpoint.TOKENIZE: {"prompt": "x"},
    Endpoint.DETOKENIZE: {"tokens": [1]},
    Endpoint.MESSAGES: {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    Endpoint.COUNT_TOKENS: {"messages": [{"role": "user", "content": "x"}]},
}
STRICT = settings(strict_fields=True)


def parsed(endpoint: Endpoint, more: dict[str, Any], **changes: Any) -> Any:
    return parse(endpoint, json.dumps({**BODIES[endpoint], **more}).encode(), settings(**changes))


def refusal(endpoint: Endpoint, more: dict[str, Any], **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(endpoint, more, **changes)
    assert caught.value.status == 400
    return caught.value


async def test_a_field_that_vllm_may_invent_reaches_no_stage_and_is_counted() -> None:
    async with cluster("P0", "D0") as c:
        more = {"kv_steering_params": {"peer": "x"}, "tempratur": 1, "min_p": 0.1, "session_id": "s"}
        response = await c.client.post(CHAT.value, json=text_body(**more))
        assert response.status_code == 200
        await c.idle()
        for name in ("P0", "D0"):
            sent = c[name].calls[0].body
            assert "kv_steering_params" not in sent and "tempratur" not in sent and "session_id" not in sent
            assert sent["min_p"] == 0.1
        assert c.metric("epd_proxy_fields_dropped_total", endpoint=CHAT.value, field=OTHER) == 2


async def test_names_that_clients_make_up_are_one_label() -> None:
    async with cluster("PD0") as c:
        for number in range(20):
            body = text_body(**{f"made_up_{number}": 1}, vllm_xargs={f"x{number}": 1})
            body["messages"][0][f"own_{number}"] = 1
            assert (await c.client.post(CHAT.value, json=body)).status_code == 200
        text = (await c.client.get("/metrics")).text
    (family,) = (one for one in text_string_to_metric_families(text) if one.name == "epd_proxy_fields_dropped")
    values = {one.labels["field"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert values == {OTHER: 20, "messages": 20, "vllm_xargs": 20}


@pytest.mark.parametrize(
    ("more", "param", "meant"),
    [
        ({"tempratur": 1}, "tempratur", "temperature"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae", "name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}]},
            "messages[0].content[0].txt",
            "text",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strct": 1}}]}, "tools[0].function.strct", "strict"),
        ({"vllm_xargs": {"mine": 1}}, "vllm_xargs.mine", ""),
        ({"Temperature": 1}, "Temperature", "temperature"),
    ],
)
def test_strict_mode_names_the_field_and_the_nearest_one(more: dict[str, Any], param: str, meant: str) -> None:
    error = refusal(CHAT, more, strict_fields=True)
    assert error.param == param and error.code == "unknown_field"
    assert f"did you mean {meant}" in error.message if meant else "did you mean" not in error.message


def test_strict_mode_takes_what_clients_of_openai_send() -> None:
    fields = ("metadata", "service_tier", "safety_identifier", "prompt_cache_key", "user", "prediction")
    for endpoint in (CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES):
        request = parsed(endpoint, {**dict.fromkeys(fields, "x"), "store": False, "unknown": None}, strict_fields=True)
        assert not request.dropped and "safety_identifier" not in request.body and "store" not in request.body


@pytest.mark.parametrize(
    ("endpoint", "name"), list(itertools.product(BODIES, (one for one in REFUSED if "." not in one)))
)
def test_what_is_dangerous_is_refused_by_name_on_every_endpoint(endpoint: Endpoint, name: str) -> None:
    error = refusal(endpoint, {name: "x"})
    assert error.param == name and error.message.startswith(name)
    assert name not in parsed(endpoint, {name: None}).body


@pytest.mark.parametrize(
    ("name", "nothing"),
    [("mm_processor_kwargs", {}), ("media_io_kwargs", {}), ("functions", []), ("logits_processors", [])],
)
def test_a_refused_field_that_asks_for_nothing_is_left_out(name: str, nothing: object) -> None:
    request = parsed(CHAT, {name: nothing}, strict_fields=True)
    assert name not in request.body and not request.dropped
    assert refusal(CHAT, {name: {"x": 1} if nothing == {} else ["x"]}).param == name


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        (CHAT, "x_embeds"),
        (CHAT, "messages[0].prompt_embeds"),
        (CHAT, "messages[0].content[0].x_embeds"),
        (CHAT, "messages[0].content[0].image_url.image_embeds"),
        (CHAT, "tools[0].x_embeds"),
        (CHAT, "tools[0].function.x_embeds"),
        (CHAT, "response_format.x_embeds"),
        (Endpoint.COMPLETIONS, "stream_options.x_embeds"),
        (Endpoint.RESPONSES, "input[0].prompt_embeds"),
        (Endpoint.RESPONSES, "input[0].content[0].x_embeds"),
        (Endpoint.RESPONSES, "tools[0].x_embeds"),
        (Endpoint.MESSAGES, "image_embeds"),
        (Endpoint.MESSAGES, "messages[0].image_embeds"),
        (Endpoint.MESSAGES, "messages[0].content[0].image_embeds"),
        (Endpoint.MESSAGES, "messages[0].content[0].source.image_embeds"),
        (Endpoint.MESSAGES, "messages[0].content[0].content[0].source.image_embeds"),
    ],
)
def test_embeddings_are_refused_wherever_they_stand(endpoint: Endpoint, place: str) -> None:
    *outer, name = place.split(".")
    value: Any = {name: "x"}
    for word in reversed(outer):
        key, one_of_several, _ = word.partition("[")
        value = {key: [value] if one_of_several else value}
    error = refusal(endpoint, value)
    assert error.param == place and "not accepted from clients" in error.message


def test_names_in_other_letters_are_other_names_and_of_two_equal_ones_the_last_counts() -> None:
    request = parsed(CHAT, {"KV_Transfer_Params": {}, "Cache_Salt": "x"})
    assert request.body.keys() == BODIES[CHAT].keys()
    raw = b'{"model": "demo", "prompt": "x", "cache_salt": "a", "cache_salt": null, "n": 9000, "n": 1}'
    assert parse(Endpoint.COMPLETIONS, raw, settings()).body == {"model": "demo", "prompt": "x", "n": 1}
    with pytest.raises(RequestError, match="cache_salt"):
        parse(Endpoint.COMPLETIONS, raw.replace(b"null", b'"b"'), settings())


@pytest.mark.parametrize("endpoint", [CHAT, Endpoint.RESPONSES, Endpoint.TOKENIZE, Endpoint.MESSAGES])
def test_parameters_of_the_tokenizer_hidden_in_template_variables_are_refused(endpoint: Endpoint) -> None:
    body: dict[str, Any] = {"messages": text_body()["messages"]} if endpoint is Endpoint.TOKENIZE else {}
    padded = {"tokenize": True, "padding": "max_length", "max_length": 1_000_000_000}
    assert "chat_template_kwargs.max_length" in refusal(endpoint, {**body, "chat_template_kwargs": padded}).message
    for name in TEMPLATE_KWARGS_REFUSED:
        error = refusal(endpoint, {**body, "chat_template_kwargs": {"enable_thinking": False, name: "x"}})
        assert error.param == f"chat_template_kwargs.{name}" and "tokenizer" in error.message
    taken = parsed(endpoint, {**body, "chat_template_kwargs": {"enable_thinking": False, "padding": None}})
    assert taken.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_every_parameter_of_the_installed_tokenizers_is_refused_or_a_variable_of_the_template() -> None:
    """vLLM 0.32 passes on whatever has the name of one (`renderers/hf.py`, `resolve_chat_template_kwargs`)."""
    source = importlib.util.find_spec("vllm")
    assert source is not None and source.submodule_search_locations
    tree = ast.parse((Path(source.submodule_search_locations[0]) / "renderers/hf.py").read_text(encoding="utf-8"))
    names = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for one in ast.walk(tree):
        if isinstance(one, ast.FunctionDef) and one.name == "safe_apply_chat_template":
            names |= {arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)}
    variables = {"documents", "add_generation_prompt", "continue_final_message"}
    assert names - {"self", "kwargs"} - variables <= TEMPLATE_KWARGS_REFUSED
    assert "model_config" in names and variables <= names and not variables & TEMPLATE_KWARGS_REFUSED


@pytest.mark.parametrize("endpoint", [CHAT, Endpoint.COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_pattern_size", 65),
        ("max_pattern_size", "1000000000"),
        ("max_pattern_size", -1),
        ("min_pattern_size", 65),
        ("min_count", 17),
        ("min_count", True),
    ],
)
def test_repetitions_that_cost_the_scheduler_its_time_are_refused(endpoint: Endpoint, name: str, value: object) -> None:
    usual = {"max_pattern_size": 64, "min_count": 16}
    assert parsed(endpoint, {"repetition_detection": usual}).body["repetition_detection"] == usual
    error = refusal(endpoint, {"repetition_detection": {**usual, name: value}})
    assert error.param == f"repetition_detection.{name}" and "must be" in error.message
    assert refusal(endpoint, {"repetition_detection": [usual]}).param == "repetition_detection"


def test_tools_that_name_a_connection_lose_it() -> None:
    tool = {"type": "mcp", "server_label": "a", "server_url": "http://10.0.0.1/", "headers": {"x": "y"}}
    assert parsed(Endpoint.RESPONSES, {"tools": [tool]}).body["tools"] == [{"type": "mcp", "server_label": "a"}]


def test_options_of_media_pass_for_clients_that_are_trusted() -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 100}, "media_io_kwargs": {"image": {}}}
    request = parsed(CHAT, options, trust_request_mm_kwargs=True)
    assert request.processor_options == options
    for name in MEDIA_OPTIONS:
        assert "trust_request_mm_kwargs" in refusal(CHAT, {name: options[name]}).message


def test_xargs_pass_by_name_and_never_the_engine_s_own() -> None:
    request = parsed(CHAT, {"vllm_xargs": {"mine": 1, "other": 2}}, xargs=("mine",))
    assert request.body["vllm_xargs"] == {"mine": 1} and request.dropped == ("vllm_xargs",)
    assert refusal(CHAT, {"vllm_xargs": {"kv_cache_report_mode": "full"}}).param == "vllm_xargs.kv_cache_report_mode"
    with pytest.raises(ConfigError, match="kv_transfer_params"):
        settings(xargs=("kv_transfer_params",))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", FIELDS)
def test_every_field_of_a_release_is_passed_refused_or_left_out(release: str, model: str) -> None:
    rules = rules_of(model, release)
    for name in FIELDS[model][release]:
        verdicts = [name in rules.top.allowed, name in rules.refused, name in names_of(IGNORED) - rules.top.allowed]
        assert verdicts.count(True) == 1, name


def test_what_prefill_does_without_is_what_a_client_can_send() -> None:
    assert names_of(PASSED) >= NOT_FOR_PREFILL


def test_a_field_of_a_newer_release_does_not_reach_an_older_one() -> None:
    more = {"watermarking": False, "logprob_token_ids": [1], "logprobs": True}
    assert parsed(CHAT, more, vllm_version="0.32.1+cpu").body["watermarking"] is False
    old = parsed(CHAT, more, vllm_version="0.23.0")
    assert "watermarking" not in old.body and set(old.dropped) == {"watermarking", "logprob_token_ids"}
    assert parsed(CHAT, more).body["watermarking"] is False, "stages of unknown versions: what any of them knows"


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.1.dev7+g1", ""), ("", ""), ("0.23.0", "0.23.0"), ("0.27.3", "0.26.0"), ("0.40.0rc1", "0.32.0")],
)
def test_a_version_counts_as_the_release_before_it(version: str, release: str) -> None:
    assert known_release(version) == release
