"""The document at /openapi.json is valid, complete, and names what this server has."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    api_keys,
    cluster,
    data_url,
    document,
    encodes,
    image_body,
    image_file,
    settings,
    text_body,
)

SECURED = settings(api_keys=api_keys("k"), served_models=("demo", "org/other"))


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


def schema_of(doc: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema that stands alone."""
    return {"$ref": f"#/components/schemas/{name}", "components": doc["components"]}


async def test_every_route_of_the_app_is_in_the_document_and_no_other() -> None:
    async with cluster("PD0") as c:
        doc = (await c.client.get("/openapi.json")).json()
        routes = {
            (re.sub(r"\{.*\}", "{}", route.path), method.lower())
            for route in c.app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD" and route.path != "/openapi.json"
        }
    documented = {(re.sub(r"\{.*\}", "{}", path), method) for path, item in doc["paths"].items() for method in item}
    assert documented == routes


def test_the_document_is_whole() -> None:
    doc = document(SECURED)
    for name, schema in doc["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert references(schema) <= {f"#/components/schemas/{known}" for known in doc["components"]["schemas"]}, name
    assert references(doc["paths"]) <= {f"#/components/schemas/{known}" for known in doc["components"]["schemas"]}
    names = [one["operationId"] for path in doc["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


def test_models_and_keys_are_this_server_s() -> None:
    doc = document(SECURED)
    assert doc["components"]["schemas"]["Model"]["enum"] == ["demo", "org/other"]
    assert doc["paths"][Endpoint.CHAT.value]["post"]["security"] == [{"key": []}]
    assert "security" not in document(settings())["paths"][Endpoint.CHAT.value]["post"]


@pytest.mark.parametrize("body", [text_body(n=2, stream=True), image_body(data_url(image_file()))])
def test_what_the_proxy_takes_the_document_allows(body: dict[str, Any]) -> None:
    jsonschema.validate(body, schema_of(document(settings()), "ChatRequest"))


@pytest.mark.parametrize("body", [text_body(n=0), text_body(model="other"), text_body(messages=[]), {"model": "demo"}])
def test_what_the_proxy_refuses_the_document_forbids(body: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schema_of(document(settings()), "ChatRequest"))


def test_limits_are_those_of_the_settings() -> None:
    doc = document(settings(max_n=3, max_sequences=5))
    for name, body in (("ChatRequest", text_body()), ("CompletionRequest", {"model": "demo", "prompt": "x"})):
        jsonschema.validate({**body, "n": 3}, schema_of(doc, name))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**body, "n": 4}, schema_of(doc, name))
    for prompt in ("x", [[1, 2]]):
        several = {"model": "demo", "prompt": [prompt] * 5 if isinstance(prompt, str) else prompt * 5}
        jsonschema.validate(several, schema_of(doc, "CompletionRequest"))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**several, "prompt": several["prompt"] * 2}, schema_of(doc, "CompletionRequest"))
    jsonschema.validate({"model": "demo", "prompt": list(range(50))}, schema_of(doc, "CompletionRequest"))


async def test_health_is_as_the_document_says_to_the_end() -> None:
    async with cluster("PD0") as c:
        doc = (await c.client.get("/openapi.json")).json()
        for begin in (lambda: None, c.pipeline.drain.begin):
            begin()
            jsonschema.validate((await c.client.get("/health")).json(), schema_of(doc, "Health"))


async def test_one_model_is_found_by_its_name_with_slashes_too() -> None:
    async with cluster("PD0", config=settings(served_models=("demo", "org/other"))) as c:
        c["PD0"].usual = encodes()
        response = await c.client.get("/v1/models/org/other")
        assert response.json()["id"] == "org/other"
        missing = await c.client.get("/v1/models/nothing")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


async def test_each_endpoint_is_documented_with_the_form_of_its_errors_and_says_when_it_wants_a_key() -> None:
    doc = document(SECURED)
    for endpoint in Endpoint:
        responses = doc["paths"][endpoint.value]["post"]["responses"]
        name = "AnthropicError" if endpoint.is_anthropic else "Error"
        for code in ("400", "401", "404", "408", "413", "422", "429", "502", "503", "504"):
            schema = responses[code]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{name}"}, (endpoint, code)
        assert ("text/event-stream" in responses["200"]["content"]) is endpoint.generates
    assert not [path for path, item in doc["paths"].items() if "422" in item.get("get", {}).get("responses", {})]


MESSAGE: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "more", [{}, {"system": [{"type": "text", "text": "x"}]}, {"thinking": {"type": "adaptive"}, "top_k": 1}]
)
def test_messages_are_allowed_as_they_are_judged(more: dict[str, Any]) -> None:
    jsonschema.validate({**MESSAGE, **more}, schema_of(document(settings()), "MessagesRequest"))


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 0},
        {"model": "other"},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        {"thinking": {"type": "enabled", "budget_tokens": 10}},
    ],
)
def test_messages_that_are_refused_are_forbidden(more: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**MESSAGE, **more}, schema_of(document(settings()), "MessagesRequest"))
