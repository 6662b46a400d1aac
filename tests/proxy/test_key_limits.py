"""What one key may do at once and per minute; others are not concerned."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epd_serve.errors import ConfigError
from proxy.admission.gate import priority_of
from proxy.config.keys import ApiKeys
from proxy.config.limits import KeyLimits
from proxy.request.parse import Endpoint, parse
from proxy.tenants import KeyGate, KeyLimitError
from tests.proxy.fakes import api_keys, cluster, hangs, settings, text_body

CHAT = "/v1/chat/completions"
ANNE, BERT = {"authorization": "Bearer anne-key"}, {"authorization": "Bearer bert-key"}
KEYS = ("anne-key", "bert-key")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(gate: KeyGate, account: str, **limits: int) -> bool:
    try:
        with gate.admitted(account, KeyLimits(**limits)):
            return True
    except KeyLimitError:
        return False


def test_a_minute_s_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    gate = KeyGate(clock=clock)
    assert [ask(gate, "a", requests_per_minute=6) for _ in range(8)] == [True] * 6 + [False] * 2
    clock.now += 10.0
    assert [ask(gate, "a", requests_per_minute=6) for _ in range(2)] == [True, False]


def test_the_time_to_wait_is_the_time_after_which_it_works() -> None:
    clock, limits = Clock(), KeyLimits(requests_per_minute=2)
    gate = KeyGate(clock=clock)
    assert ask(gate, "a", requests_per_minute=2) and ask(gate, "a", requests_per_minute=2)
    clock.now += 7.0
    with pytest.raises(KeyLimitError) as refused, gate.admitted("a", limits):
        pass
    assert refused.value.retry_after_s == pytest.approx(23.0)
    clock.now += refused.value.retry_after_s
    assert ask(gate, "a", requests_per_minute=2)


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    gate = KeyGate(clock=clock)
    assert ask(gate, "a", requests_per_minute=1)
    assert not any(ask(gate, "a", requests_per_minute=1) for _ in range(100))
    clock.now += 60.0
    assert ask(gate, "a", requests_per_minute=1)


def test_requests_in_flight_are_counted_per_account_and_given_back() -> None:
    gate, one = KeyGate(), KeyLimits(requests_in_flight=1)
    with gate.admitted("a", one):
        assert not ask(gate, "a", requests_in_flight=1) and ask(gate, "b", requests_in_flight=1)
        assert ask(gate, "a", requests_in_flight=2), "its limit has been raised meanwhile"
    assert ask(gate, "a", requests_in_flight=1)
    with pytest.raises(RuntimeError), gate.admitted("a", one):
        raise RuntimeError
    assert ask(gate, "a", requests_in_flight=1)


def take(gate: KeyGate, account: str, tokens: float, per_minute: int = 6000) -> float:
    """How long it is to wait; 0 where it may go."""
    try:
        gate.take_tokens(account, KeyLimits(tokens_per_minute=per_minute), tokens)
    except KeyLimitError as error:
        return error.retry_after_s or math.nan
    return 0.0


def test_a_minute_s_tokens_may_come_at_once_and_then_as_they_are_refilled() -> None:
    clock = Clock()
    gate = KeyGate(clock=clock)
    assert [take(gate, "a", tokens) for tokens in (1000.0, 4500.0, 500.0)] == [0.0] * 3
    assert take(gate, "a", 100.0) == pytest.approx(1.0) and take(gate, "a", 3000.0) == pytest.approx(30.0)
    assert take(gate, "b", 6000.0) == 0.0, "others are not concerned"
    clock.now += 30.0
    assert take(gate, "a", 3001.0) > 0 and take(gate, "a", 3000.0) == 0.0
    assert take(gate, "a", 1.0, per_minute=0) == 0.0, "no limit any more"


def test_one_that_is_larger_than_a_minute_s_tokens_passes_when_nothing_was_taken_lately() -> None:
    clock = Clock()
    gate = KeyGate(clock=clock)
    assert take(gate, "a", 60_000.0) == 0.0
    clock.now += 60.0
    assert take(gate, "a", 1.0) == pytest.approx(8 * 60.0, abs=0.1), "and is paid for"
    clock.now += 481.0
    assert take(gate, "a", 10.0) == 0.0
    assert take(gate, "a", 60_000.0) > 0


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(1.0, 6000.0)), max_size=40))
def test_on_average_no_more_tokens_begin_than_a_key_may(asked: list[tuple[float, float]]) -> None:
    """In any span of time: a minute's at once, and what is refilled meanwhile. Requests are counted apart."""
    clock, begun = Clock(), []
    gate = KeyGate(clock=clock)
    for pause_s, tokens in asked:
        clock.now += pause_s
        wait_s = take(gate, "a", tokens)
        if wait_s:
            clock.now += wait_s + 1e-5
            assert take(gate, "a", tokens) == 0.0, "the time to wait is the time after which it works"
        begun.append((clock.now, tokens))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            span_s = begun[last][0] - begun[first][0]
            assert sum(tokens for _, tokens in begun[first : last + 1]) <= 6000.0 + 100.0 * span_s + 1.0
    assert ask(gate, "a", requests_per_minute=1)


def test_accounts_that_matter_no_more_are_forgotten() -> None:
    clock = Clock()
    gate = KeyGate(clock=clock)
    for index in range(1000):
        clock.now += 1.0
        assert ask(gate, f"tenant {index}", requests_in_flight=1, requests_per_minute=1)
    assert len(gate._full_at) <= 121 and not gate._in_flight, "those of the last minutes"


@pytest.mark.parametrize("name", ["requests_in_flight", "requests_per_minute", "tokens_per_minute", "slo_ttft_ms"])
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        KeyLimits(**{name: -1})


def test_a_priority_counts_up_to_the_best_that_a_key_may_have() -> None:
    def counts(limits: KeyLimits, **body: int) -> int:
        return priority_of(parse(Endpoint.CHAT, json.dumps(text_body(**body)).encode(), settings()), limits)

    yields_only = KeyLimits(best_priority=0)
    assert [counts(yields_only, priority=priority) for priority in (-9, 0, 9)] == [0, 0, 9]
    assert counts(KeyLimits(best_priority=-2), priority=-9) == -2
    assert counts(KeyLimits(best_priority=3)) == 3, "who asks for nothing asks for 0"
    assert counts(KeyLimits(), priority=-9) == -9


async def test_who_may_not_push_ahead_does_not() -> None:
    config = settings(stage_priorities=True, key_limits=KeyLimits(best_priority=0))
    async with cluster("PD0", config=config) as c:
        for priority in (0, -9):
            assert (await c.client.post(CHAT, json=text_body(priority=priority))).status_code == 200
        first, second = (call.body["priority"] for call in c["PD0"].calls)
        assert second >= first, "due by arrival"


async def test_a_key_over_its_limit_gets_429_and_another_key_is_served() -> None:
    config = settings(api_keys=api_keys(*KEYS), key_limits=KeyLimits(requests_in_flight=1))
    async with cluster("PD0", config=config) as c:
        c["PD0"].script.append(hangs)
        first = asyncio.create_task(c.client.post(CHAT, json=text_body(), headers=ANNE))
        await c["PD0"].until(lambda stage: stage.active == 1)
        second = await c.client.post(CHAT, json=text_body(), headers=ANNE)
        assert second.status_code == 429 and int(second.headers["retry-after"]) >= 1
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await c.client.post(CHAT, json=text_body(), headers=BERT)).status_code == 200
        first.cancel()
        await c.idle()
        assert (await c.client.post(CHAT, json=text_body(), headers=ANNE)).status_code == 200


async def test_a_key_that_has_used_up_its_tokens_is_told_when_to_come_back_and_takes_no_place() -> None:
    config = settings(api_keys=api_keys(*KEYS), key_limits=KeyLimits(tokens_per_minute=1000))
    async with cluster("PD0", config=config) as c:

        async def asks(who: dict[str, str], words: int) -> httpx.Response:
            body = text_body(messages=[{"role": "user", "content": "word " * words}])
            return await c.client.post(CHAT, json=body, headers=who)

        assert (await asks(ANNE, 600)).status_code == 200
        refused = await asks(ANNE, 600)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await asks(BERT, 600)).status_code == 200
        assert (await asks(ANNE, 1)).status_code == 200, "what is left"
        await c.idle()
        assert len(c["PD0"].calls) == 3


async def test_a_key_of_its_own_limit_goes_by_it() -> None:
    anne, bert = api_keys(*KEYS).keys
    keys = ApiKeys(api_keys().salt, (structs.replace(anne, limits={"requests_per_minute": 2}), bert))
    async with cluster("PD0", config=settings(api_keys=keys, key_limits=KeyLimits(requests_per_minute=1))) as c:
        codes = [
            (await c.client.post(CHAT, json=text_body(), headers=who)).status_code for who in [*[ANNE] * 3, BERT, BERT]
        ]
    assert codes == [200, 200, 429, 200, 429]


async def test_tenants_named_under_one_key_count_against_that_key() -> None:
    config = settings(api_keys=api_keys(*KEYS), tenant_header="x-tenant", key_limits=KeyLimits(requests_per_minute=2))
    async with cluster("PD0", config=config) as c:
        codes = [
            (await c.client.post(CHAT, json=text_body(), headers={**ANNE, "x-tenant": name})).status_code
            for name in "abc"
        ]
    assert codes == [200, 200, 429]


async def test_without_keys_every_tenant_has_the_limit_to_itself() -> None:
    config = settings(tenant_header="x-tenant", key_limits=KeyLimits(requests_per_minute=1))
    async with cluster("PD0", config=config) as c:
        codes = [
            (await c.client.post(CHAT, json=text_body(), headers={"x-tenant": name})).status_code for name in "aba"
        ]
    assert codes == [200, 200, 429]
