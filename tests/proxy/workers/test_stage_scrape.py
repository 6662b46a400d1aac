"""The stages' own metrics beside ours: whose they are, and that a stage that does not answer costs its own only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.registry.table import InstanceTable
from proxy.workers import stage_scrape
from proxy.workers.stage_scrape import StageScrape, merged
from tests.proxy.fakes import live, served

TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b}, c=\\"d\\""} 3.0
# HELP vllm:ttft_seconds Histogram of time to first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1"} 2.0
vllm:ttft_seconds_bucket{le="+Inf"} 4.0
vllm:ttft_seconds_count 4.0
vllm:ttft_seconds_sum 1.5e-05
# HELP process_resident_memory_bytes Resident memory size in bytes.
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1.2e+09
"""


def families(text: bytes) -> dict[str, Metric]:
    every = list(text_string_to_metric_families(text.decode()))
    assert len(every) == len({one.name for one in every}), "each family once"
    return {one.name: one for one in every}


def test_each_series_keeps_its_labels_and_has_its_instance() -> None:
    text, malformed = merged({"P0": TEXT, "D0": TEXT})
    told = families(text)
    assert not malformed
    running = {sample.labels["instance"]: sample for sample in told["vllm:num_requests_running"].samples}
    assert running.keys() == {"P0", "D0"}
    assert running["D0"].value == 3 and running["D0"].labels["model_name"] == 'a {b}, c="d"'
    assert told["vllm:ttft_seconds"].type == "histogram" and len(told["vllm:ttft_seconds"].samples) == 8
    assert told["vllm:num_requests_running"].documentation.startswith("Number of requests")
    assert told["process_resident_memory_bytes"].samples[0].value == 1.2e9


def test_a_label_of_that_name_is_kept_under_another() -> None:
    text, _ = merged({"P0": b'# TYPE odd gauge\nodd{instance="x",peer_instance="y"} 1\nodd{a="b",instance="z"} NaN\n'})
    first, second = families(text)["odd"].samples
    assert first.labels == {"instance": "P0", "exported_instance": "x", "peer_instance": "y"}
    assert second.labels == {"instance": "P0", "exported_instance": "z", "a": "b"}


@pytest.mark.parametrize("line", [b"<html>", b"name {} x", b"1name 2", b'name{a="b" 3', b"name 3 4 5", b"name"])
def test_what_is_no_sample_is_left_out(line: bytes) -> None:
    text, malformed = merged({"P0": b"# TYPE good gauge\ngood 1\n" + line + b"\n", "D0": b"good 2\n"})
    assert malformed == {"P0"}
    assert [sample.value for sample in families(text)["good"].samples] == [1, 2]


class Stage:
    """Answers `/metrics` with this."""

    def __init__(self, status: int = 200, body: bytes = TEXT, released: asyncio.Event | None = None) -> None:
        self.status, self.body, self.released = status, body, released
        self.asked: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        assert (scope["method"], scope["path"]) == ("GET", "/metrics")
        self.asked.append(dict(scope["headers"]))
        if self.released is not None:
            await self.released.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


class Scraped:
    def __init__(self, key: str = "") -> None:
        self.table, self.registry = InstanceTable(), CollectorRegistry()
        self.scrape = StageScrape(self.table, self.registry, key)

    def missed(self, instance: str, cause: str) -> float:
        labels = {"instance": instance, "cause": cause}
        return self.registry.get_sample_value("epd_stage_scrapes_missed_total", labels) or 0.0

    async def running(self) -> set[str]:
        """Instances whose metrics came."""
        told = families(await self.scrape.text())
        return {one.labels["instance"] for one in told["vllm:num_requests_running"].samples}


@asynccontextmanager
async def scraped(key: str = "", **stages: Stage) -> AsyncIterator[Scraped]:
    async with AsyncExitStack() as stack:
        under_test = Scraped(key)
        for name, stage in stages.items():
            url = await stack.enter_async_context(served(stage))
            under_test.table.apply(Instance(name, Role(name.rstrip("0123456789")), url, "life 1"))
        yield under_test


async def test_a_stage_that_does_not_answer_costs_its_own_series_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_scrape, "ASK_S", 0.5)
    released = asyncio.Event()
    stages = {
        "E0": Stage(),
        "P0": Stage(released=released),
        "P1": Stage(status=500, body=b"no"),
        "P2": Stage(body=b"<html>\n"),
        "D0": Stage(body=TEXT + b"x" * stage_scrape.MAX_BYTES),
    }
    async with scraped(**stages) as s:
        s.table.apply(Instance("D1", Role.D, "http://127.0.0.1:1", "life 1"))
        assert await s.running() == {"E0"}
        causes = {"P0": "late", "P1": "error", "P2": "malformed", "D0": "too_large", "D1": "unreachable"}
        assert [s.missed(name, cause) for name, cause in causes.items()] == [1] * 5
        told = families(await s.scrape.text())["epd_stage_scrapes_missed"]
        assert len(told.samples) >= 5, "the count is in the scrape that lacks them"
        released.set()


async def test_all_of_them_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_scrape, "MAX_TOTAL_BYTES", 2 * len(TEXT))
    async with scraped(P0=Stage(), P1=Stage(), P2=Stage()) as s:
        assert len(await s.running()) == 2
        assert sum(s.missed(name, "too_large") for name in ("P0", "P1", "P2")) == 1


async def test_who_asks_again_at_once_costs_the_stages_nothing() -> None:
    stage = Stage()
    async with scraped(PD0=stage) as s:
        assert await asyncio.gather(*(s.running() for _ in range(5))) == [{"PD0"}] * 5
        assert len(stage.asked) == 1


async def test_stages_that_want_a_key_get_it() -> None:
    stage = Stage()
    async with scraped("secret", PD0=stage) as s:
        await s.running()
    assert stage.asked[0][b"authorization"] == b"Bearer secret"
