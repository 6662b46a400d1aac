"""The OpenAPI 3.1 document of the front door, at `/openapi.json`: routes, answers, security. Pure.

What a body may hold is `proxy/http/openapi_schemas.py`'s.
"""

from __future__ import annotations

from typing import Any

from proxy.config.settings import ProxySettings
from proxy.http.openapi_schemas import ANTHROPIC_ERROR, ERROR, SCHEMAS, limited, reference
from proxy.request.deadline import HEADER
from proxy.request.parse import Endpoint

Json = dict[str, Any]

CLIENT_ERRORS = {
    400: "A field is wrong; `param` names it. Or two instances failed alike on this body (`same_fault`).",
    404: "No such model.",
    408: "The body came too slowly (`body_too_slow`).",
    413: "The body, a media item or what the request takes of the server's memory is too large.",
    422: "Instances died under this very body (`poisonous_request`); do not repeat it.",
}
BUSY = {
    429: "Too many requests wait (`overloaded`), or this key or tenant has its share (`rate_limit_exceeded`); try "
    "again after `Retry-After` seconds."
}
SERVER_ERRORS = {
    502: "A stage failed, and so did the retries.",
    503: "No live instance of a role (`no_instance`), no room for what the request needs next (`memory_full`, "
    "`bodies_full`, `fetches_full`), or the server is coming to an end (`draining`); try again after `Retry-After` "
    "seconds.",
    504: f"A deadline ran out: one of the server's, or the client's own, which is in the header `{HEADER}`.",
}
EXCHANGES = {  # operation and body
    Endpoint.CHAT: ("createChatCompletion", "ChatRequest"),
    Endpoint.COMPLETIONS: ("createCompletion", "CompletionRequest"),
    Endpoint.RESPONSES: ("createResponse", "ResponseRequest"),
    Endpoint.TOKENIZE: ("tokenize", "TokenizeRequest"),
    Endpoint.DETOKENIZE: ("detokenize", "DetokenizeRequest"),
    Endpoint.MESSAGES: ("createMessage", "MessagesRequest"),
    Endpoint.COUNT_TOKENS: ("countMessageTokens", "CountTokensRequest"),
}
ANSWERS = {
    Endpoint.TOKENIZE: "The tokens, and how many.",
    Endpoint.DETOKENIZE: "The text.",
    Endpoint.COUNT_TOKENS: "How many tokens the prompt has.",
}
REQUEST_ID: Json = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The client's name for the request, which the answer carries in the same header: up to 128 letters, "
    "digits and `._:/+=-`. Without one, or with another kind, the answer carries a name of the server's.",
}
EXPLAIN: Json = {
    "name": "x-epd-explain",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "enum": ["0", "1"]},
    "description": "`1`: tell path, instances and moments of the request in `x-epd-*` headers of the answer, where the "
    "server is to (`--proxy explain=true`).",
}


def document(settings: ProxySettings, version: str) -> Json:
    """The document for a proxy with these settings."""
    secured = settings.api_keys is not None
    paths: Json = {endpoint.value: {"post": _exchange(endpoint, secured)} for endpoint in Endpoint}
    paths["/v1/models"] = {"get": _get("listModels", "Models of this server.", "Models", secured=secured)}
    paths["/v1/models/{model}"] = {"get": _model(secured)}
    paths["/live"] = {"get": _get("getLive", "Answers while the process does.", "Live")}
    paths["/health"] = {"get": _health(secured)}
    paths["/ready"] = {"get": _ready()}
    paths["/version"] = {"get": _get("getVersion", "Version of the proxy.", "Version", secured=secured)}
    if settings.observed:
        paths["/instances"] = {"get": _get("listInstances", "The status table.", "Instances", secured=secured)}
        paths["/metrics"] = {"get": _metrics(secured)}
    limits = limited(settings.served_models, max_n=settings.max_n, max_sequences=settings.max_sequences)
    components: Json = {"schemas": {**SCHEMAS, **limits}}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "EPD-Serve", "version": version},
        "paths": paths,
        "components": components,
    }


def _exchange(endpoint: Endpoint, secured: bool) -> Json:
    operation, body = EXCHANGES[endpoint]
    error = ANTHROPIC_ERROR if endpoint.is_anthropic else ERROR
    answer: Json = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.generates:
        answer["text/event-stream"] = {"schema": reference("StreamEvent")}
    return {
        "operationId": operation,
        "parameters": [REQUEST_ID, EXPLAIN],
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference(body)}}},
        "responses": {
            "200": {"description": ANSWERS.get(endpoint, "The model's answer."), "content": answer},
            **_errors({**CLIENT_ERRORS, **BUSY, **SERVER_ERRORS}, secured=secured, schema=error),
        },
        **_security(secured),
    }


def _get(operation: str, summary: str, schema: str, *, secured: bool = False) -> Json:
    return {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": _json("OK", reference(schema)), **_errors({}, secured=secured)},
        **_security(secured),
    }


def _metrics(secured: bool) -> Json:
    text = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {
        "operationId": "getMetrics",
        "summary": "Metrics in Prometheus' text format.",
        "responses": {"200": text, **_errors({}, secured=secured)},
        **_security(secured),
    }


def _model(secured: bool) -> Json:
    operation = _get("retrieveModel", "One model.", "ModelCard", secured=secured)
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    responses = {**operation["responses"], **_errors({404: "No such model."}, secured=False)}
    return {**operation, "parameters": [name], "responses": responses}


def _probe(operation: str, summary: str, schema: str) -> Json:
    probe = _get(operation, summary, schema)
    no = _json("It is not, or the server is coming to an end.", reference(schema))
    return {**probe, "responses": {**probe["responses"], "503": no}}


def _health(secured: bool) -> Json:
    operation = _probe("getHealth", "Whether any request is served, or an instance of a role is live.", "Health")
    role = {
        "name": "role",
        "in": "query",
        "required": False,
        "schema": {"type": "string"},
        "description": "Ask for a role, by llm-d's word for it: `encode`, `prefill`, `decode`, `prefill-decode`, "
        "`encode-prefill`, `encode-prefill-decode`. Wants an API key, if there are keys; where there is an admin "
        "listener, that one answers it.",
    }
    errors = _errors({404: "No such role here."}, secured=secured)
    return {**operation, "parameters": [role], "responses": {**operation["responses"], **errors}}


def _ready() -> Json:
    operation = _probe(
        "getReady", "Which kinds of requests are served; 200 while any is, or all that was asked for.", "Ready"
    )
    kind = {
        "name": "kind",
        "in": "query",
        "required": False,
        "schema": {"type": "string"},
        "description": "Ask for one kind: `text`, or a modality of the model (`image`, `audio`, `video`).",
    }
    everything = {
        "name": "all",
        "in": "query",
        "required": False,
        "schema": {"type": "string"},
        "description": "Ask for everything: all kinds, roles and instances, and all that feeds the status table.",
    }
    responses = {**operation["responses"], **_errors({404: "No such kind here."}, secured=False)}
    return {**operation, "parameters": [kind, everything], "responses": responses}


def _errors(statuses: dict[int, str], *, secured: bool, schema: str = ERROR) -> Json:
    if secured:
        statuses = {401: "No API key, or not one of ours.", **statuses}
    return {str(status): _json(what, reference(schema)) for status, what in statuses.items()}


def _json(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _security(secured: bool) -> Json:
    return {"security": [{"key": []}]} if secured else {}
