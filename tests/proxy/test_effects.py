"""Each promise of routing has a metric that says whether it took effect, from what stages say afterwards: it shows that
the promise is kept, and that it has silently stopped, which is brought about here for each of them."""

from __future__ import annotations

import itertools
import secrets
from contextlib import suppress

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Send

from epd_serve.cache_ledger import packed
from epd_serve.wire import CacheReport, FeatureMissing, FeatureReady, PromptBlocks, StageReport
from proxy import metrics
from proxy.generate import attempt
from proxy.media import loader
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.prefix_index import Known, PrefixIndex
from proxy.routing import plan
from proxy.routing.policy import POLICIES
from proxy.stages.prompt import prompt_nodes
from tests.proxy.fakes import (
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    cluster,
    data_url,
    encodes,
    image_body,
    image_file,
    parts,
    replies,
    settings,
    text_body,
)
from tests.proxy.generate.test_first_token_attempts import BODY as STREAM
from tests.proxy.generate.test_first_token_attempts import alike, goes_on, once_shown

CHAT = "/v1/chat/completions"


# --- encoded once ---------------------------------------------------------------------------------------------------


def announces(c: Cluster) -> Behaviour:
    """An encoder that says of each item that it has stored it."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        for part in parts(call):
            c.pipeline.dispatcher.dispatch(FeatureReady(part["uuid"], 100, f"{stage.id}-life1", pooled=True))
        await encodes()(stage, call, receive, send)

    return behave


async def announced(c: Cluster, *urls: str) -> tuple[float, float]:
    """Features that encoders have announced after these were asked for one by one: new ones, and again."""
    c["E0"].usual = c["E1"].usual = announces(c)
    for url in urls:
        assert (await c.client.post(CHAT, json=image_body(url))).status_code == 200
    name = "epd_proxy_features_announced_total"
    return c.metric(name, of="new") or 0.0, c.metric(name, of="again") or 0.0


RED, BLUE = (data_url(image_file(color=color)) for color in ("red", "blue"))


async def test_what_is_encoded_once_is_announced_once() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        assert await announced(c, RED, BLUE, RED, RED) == (2, 0)


async def test_encoding_what_is_known_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeatureDirectory, "knows", lambda *_: False)
    async with cluster("E0", "E1", "PD0") as c:
        assert await announced(c, RED, BLUE, RED, RED) == (2, 2)


async def test_names_that_do_not_come_from_the_content_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "feature_key", lambda *_, **__: secrets.token_hex(32))
    async with cluster("E0", "E1", "PD0") as c:
        assert await announced(c, RED, BLUE, RED, RED) == (2, 2)


async def test_what_was_lost_is_not_encoded_again_without_need() -> None:
    async with cluster("E0", "E1", "PD0") as c:
        assert await announced(c, RED) == (1, 0)
        (key,) = c["E0"].keys[0] if c["E0"].keys else c["E1"].keys[0]
        c.pipeline.dispatcher.dispatch(FeatureMissing("elsewhere", [key], "evicted"))
        assert await announced(c, RED) == (2, 0)


# --- the prefix is cached where it was said to be -------------------------------------------------------------------

HEAD = [{"role": "user", "content": "talk"}]
TURN = [*HEAD, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]


def finds(tokens: int) -> Behaviour:
    """A stage that says how much of a prompt of 2,000 tokens it has found in its prefix cache."""
    usage = {"prompt_tokens": 2000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": tokens}}
    return replies(200, {"choices": [{"message": {}, "finish_reason": "stop"}], "usage": usage})


async def prefix(c: Cluster, found: int) -> tuple[float, float, float]:
    """(predicted, cached, all) tokens after a turn of a talk of which an instance says that it has 1,600 tokens."""
    nodes = prompt_nodes({**text_body(), "messages": HEAD}, {}).nodes
    blocks = PromptBlocks(packed(nodes), packed(range(100)))
    life = c.instances["PD1"].incarnation
    c.table.report(CacheReport("PD1", life, 1, 16, stored=packed(range(100)), prompts=[blocks]))
    c["PD1"].usual, c["PD0"].usual = finds(found), finds(0)
    assert (await c.client.post(CHAT, json=text_body(messages=TURN))).status_code == 200
    await c.idle()
    name = "epd_proxy_prefix_effect_tokens_total"
    predicted, cached, prompt = (c.metric(name, which=which) for which in ("predicted", "cached", "prompt"))
    return predicted, cached, prompt


async def test_a_prefix_that_is_where_it_was_said_to_be_shows() -> None:
    async with cluster("PD0", "PD1") as c:
        assert await prefix(c, 1600) == (1600, 1600, 2000)


async def test_a_prefix_that_the_stage_does_not_find_shows() -> None:
    async with cluster("PD0", "PD1") as c:
        assert await prefix(c, 0) == (1600, 0, 2000)


async def test_routing_that_no_longer_looks_for_prefixes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "known", lambda *_: Known())
    async with cluster("PD0", "PD1") as c:
        predicted, _, prompt = await prefix(c, 1600)
        assert (predicted, prompt) == (0, 2000)


# --- least loaded ---------------------------------------------------------------------------------------------------


async def spread(c: Cluster, requests: int) -> float:
    """Of the decoders, after each request has stayed where it was sent, and each stage has said so."""
    held = dict.fromkeys(("D0", "D1"), 0)
    numbers = itertools.count(1)
    for _ in range(requests):
        before = {name: len(c[name].calls) for name in held}
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        await c.idle()
        for name in held:
            held[name] += len(c[name].calls) - before[name]
            report = StageReport(name, f"{name}-life1", next(numbers), running=held[name])
            c.pipeline.dispatcher.dispatch(report)
    assert sum(held.values()) == requests
    return c.metric("epd_stage_spread", role="D")


async def test_requests_that_go_to_the_least_loaded_are_spread() -> None:
    async with cluster("P0", "D0", "D1") as c:
        assert await spread(c, 6) <= 1


async def test_a_policy_that_looks_at_no_load_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "POLICIES", dict.fromkeys(POLICIES, lambda candidates, *_: candidates[0]))
    async with cluster("P0", "D0", "D1") as c:
        assert await spread(c, 6) == 6


# --- the first token is prefill's -----------------------------------------------------------------------------------


async def first_tokens(c: Cluster, decode: Behaviour) -> dict[str, float]:
    """Streams by what the decoder said of the first token, which has gone to the client already."""
    c["D0"].usual = decode
    for _ in range(2):
        async with c.client.stream("POST", CHAT, json=STREAM) as answer:
            assert answer.status_code == 200
            with suppress(httpx.RemoteProtocolError):  # cut off: what one of the tests is about
                await answer.aread()
    await c.idle()
    name = "epd_proxy_first_token_streams_total"
    return {outcome: c.metric(name, outcome=outcome) or 0.0 for outcome in ("kept", "other", "decode")}


async def test_a_stream_that_goes_on_after_prefill_s_token_shows() -> None:
    async with alike("P0", "D0") as c:
        assert await first_tokens(c, once_shown(c, goes_on("a", "b"))) == {"kept": 2, "other": 0, "decode": 0}


async def test_a_decoder_that_says_another_token_shows() -> None:
    async with alike("P0", "D0", config=settings(go_on="never", retries=0)) as c:
        told = await first_tokens(c, once_shown(c, goes_on("x", "b")))
        assert told["other"] == 2 and told["kept"] == 0


async def test_streams_that_no_longer_begin_with_prefill_s_token_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "may_be_shown", lambda *_: False)
    async with alike("P0", "D0") as c:
        c["P0"].usual = replies(200, {"choices": [], "kv_transfer_params": {"ok": True}})
        assert await first_tokens(c, goes_on("a", "b")) == {"kept": 0, "other": 0, "decode": 2}


def test_no_more_features_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_FEATURES", 4)
    registry = CollectorRegistry()
    once = metrics.EncodedOnce(registry)
    for now, key in enumerate(("a", "b", "c", "d", "a", "e", "f", "b")):
        once.ordered(key, hash(key))
        once.announced(key, float(now))
    told = {of: registry.get_sample_value("epd_proxy_features_announced_total", {"of": of}) for of in ("new", "again")}
    assert told == {"new": 7, "again": 1}, "b is the oldest when there is no room for f"
