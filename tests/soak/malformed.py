"""Requests as schemathesis makes them from a server's own OpenAPI document: such as it allows, and others."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import requests
from hypothesis import given
from hypothesis.errors import Unsatisfiable

from tests.proxy.fuzzing import examples_of


def malformed_requests(url: str, count: int) -> list[bytes]:
    """About `count` requests to the operations of the server at `url`, as bytes for a connection of their own each."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", trust_env=False).raise_for_status().json())
    operations = [one.ok() for one in schema.get_all_operations()]
    requests_bytes: list[bytes] = []
    for mode in schemathesis.GenerationMode:
        for operation in operations:
            _make(operation, mode, url, -(-count // (2 * len(operations))), requests_bytes)
    return (requests_bytes * (count // max(1, len(requests_bytes)) + 1))[:count]


def _make(operation: Any, mode: Any, url: str, examples: int, requests_bytes: list[bytes]) -> None:
    @examples_of(examples)
    @given(operation.as_strategy(generation_mode=mode))
    def make(case: Any) -> None:
        with contextlib.suppress(requests.RequestException, ValueError, UnicodeError):  # what no client could send
            requests_bytes.append(_raw(requests.Request(**case.as_transport_kwargs(base_url=url)).prepare()))

    with contextlib.suppress(Unsatisfiable):  # a request without parameters cannot be wrong
        make()


def _raw(prepared: requests.PreparedRequest) -> bytes:
    assert prepared.url is not None
    url = urlsplit(prepared.url)
    body = prepared.body or b""
    body = body.encode() if isinstance(body, str) else body
    if not isinstance(body, bytes):
        raise ValueError("a body that is a stream")
    headers = {name.lower(): value for name, value in prepared.headers.items()}
    headers |= {"host": url.netloc, "connection": "close", "x-tenant": "malformed"}
    if body:
        headers["content-length"] = str(len(body))
    head = f"{prepared.method} {url.path or '/'}{'?' + url.query if url.query else ''} HTTP/1.1\r\n"
    for name, value in headers.items():
        head += f"{name}: {value if isinstance(value, str) else value.decode('latin-1')}\r\n"
    return head.encode("latin-1") + b"\r\n" + body
