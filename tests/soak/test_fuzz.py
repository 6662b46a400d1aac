"""The fuzz's own arithmetic: the same seed sends the same bodies, and what fails is told by as little as fails."""

from __future__ import annotations

import json

import httpx

from proxy.request.parse import Endpoint
from tests.proxy.fuzzing import Damage
from tests.soak.fuzz import _Fuzz, _kind

CHAT = Endpoint.CHAT.value


def test_the_same_seed_damages_the_same_bodies_and_another_one_others() -> None:
    def bodies(seed: int) -> list[tuple[Endpoint, bytes]]:
        damage = Damage("demo", seed)
        return [damage.next() for _ in range(50)]

    assert bodies(1) == bodies(1) != bodies(2)


def test_what_fails_is_left_with_what_it_fails_for() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        fails = json.loads(request.content).get("a", {}).get("b") == [1]
        return httpx.Response(500 if fails else 200, json={"said": "D7 is ill"})

    with _Fuzz("http://stages", "demo", "none") as fuzz:
        fuzz._client = httpx.Client(base_url="http://stages", transport=httpx.MockTransport(answer))
        raw = json.dumps({"x": 1, "a": {"b": [1], "c": {"d": 2}}, "y": [{}]}).encode()
        fault = fuzz._sent((CHAT, raw)).fault
        assert fault.startswith("500") and _kind(fault) == _kind(fault.replace("D7", "D8"))
        assert json.loads(fuzz._smaller(CHAT, raw, _kind(fault))) == {"a": {"b": [1]}}
        assert fuzz._sent((CHAT, b"{}")).fault == ""
