"""What vLLM answers and we do not is refused by name, and nothing of vLLM is forgotten."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from proxy.http.openapi import UNSERVED, unserved
from proxy.request.parse import Endpoint
from tests.proxy.fakes import cluster, settings

OURS = {"/health", "/version", "/metrics", "/v1/models", "/openapi.json"} | {endpoint.value for endpoint in Endpoint}
LISTED = [path for group in UNSERVED for path in group.paths]
ROUTE = re.compile(r"@router\.(?:get|post)\(\s*\"(/[^\"]*)\"")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_it_is_refused_by_name_with_what_would_serve_it(method: str) -> None:
    async with cluster("P0", "D0", config=settings()) as c:
        for path in ("/v1/embeddings", "/v1/messages/render", "/sleep", "/v1/responses/resp_1/cancel"):
            error = (answer := await c.client.request(method, path)).json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_served"), path
            assert path in error["message"] and "Use " in error["message"]
        unknown = await c.client.request(method, "/v1/nothing")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")


def test_nothing_of_ours_is_among_it() -> None:
    assert len(set(LISTED)) == len(LISTED)
    assert not [path for path in OURS if unserved(path) is not None]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_path_of_the_installed_vllm_is_ours_or_named() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))) / "entrypoints"
    found = {path for file in folder.rglob("*.py") for path in ROUTE.findall(file.read_text())}
    assert len(found) > 20
    assert found - OURS - set(LISTED) == set()
