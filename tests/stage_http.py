"""A client of one stage's own server, past the proxy."""

from __future__ import annotations

import httpx

from epd_serve.endpoint import for_http, socket_path
from tests.waiting import PATIENCE_S


def stage_client(url: str, timeout_s: float = PATIENCE_S) -> httpx.Client:
    """`url`: as of `epd_serve.endpoint`."""
    transport = httpx.HTTPTransport(uds=socket_path(url) or None)
    return httpx.Client(base_url=for_http(url).geturl(), transport=transport, timeout=timeout_s)


def make_faulty(url: str, **faults: object) -> None:
    """Of a simulated stage."""
    with stage_client(url) as client:
        client.post("/sim/faults", json=faults).raise_for_status()
