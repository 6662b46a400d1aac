"""OpenTelemetry: one trace through proxy and stages, as a collector gets it."""

from __future__ import annotations

import pytest

from epd_serve.errors import ConfigError
from proxy.records.record import Record, TraceContext
from proxy.records.records import Question
from proxy.traces import AT_ONCE, HELD, SpanExport
from tests.otlp import Collector, Spanned, collector
from tests.proxy.fakes import Call, cluster, encodes, image_body, replies, settings, text_body
from tests.waiting import until, wait_for

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3
USAGE = {"prompt_tokens": 40, "completion_tokens": 7, "total_tokens": 47}


async def root(got: Collector, count: int = 1) -> Spanned:
    await until(lambda: len(got.named(f"POST {CHAT}")) >= count)
    return got.named(f"POST {CHAT}")[-1]


def sent(call: Call) -> tuple[str, str, str]:
    """The trace, the caller's span and the flags that a stage was told."""
    _, trace_id, span_id, flags = call.headers["traceparent"].split("-")
    return trace_id, span_id, flags


async def test_one_trace_from_the_client_to_each_stage() -> None:
    with collector() as got:
        async with cluster("E0", "P0", "D0", config=settings(otlp_traces_endpoint=got.url)) as c:
            c["E0"].usual = encodes()
            c["D0"].script.append(replies(200, {"choices": [{"message": {}, "finish_reason": "stop"}], "usage": USAGE}))
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=a", "x-request-id": "mine"}
            answer = await c.client.post(CHAT, json=image_body(), headers=headers)
            whole = await root(got)
            (told,) = c.pipeline.records.look(Question(id="mine")).requests
    assert answer.status_code == 200 and {span.trace_id for span in got.spans} == {TRACE}
    assert (whole.parent_id, whole.kind, whole.service, whole.failed) == (PARENT, SERVER, "epd-serve", False)
    known = {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 7,
        "epd.path": "E-P-D",
        "epd.items.image": 1,
        "epd.request.client_id": "mine",
    }
    assert {name: whole.attributes.get(name) for name in known} == known
    calls = {"E0": "encode call E0", "P0": "prefill call P0", "D0": "answer call D0"}
    for stage, name in calls.items():
        (call,), (span,) = c[stage].calls, got.named(name)
        assert sent(call) == (TRACE, span.span_id, "01") and call.headers["tracestate"] == "vendor=a"
        assert (span.parent_id, span.kind) == (whole.span_id, CLIENT)
    phases = {span.name for span in got.spans if span.kind == 1}
    assert {"body", "media", "encode"} <= phases and {"admitted", "choice"} <= set(whole.events)
    assert all(whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns for span in got.spans)
    assert told["trace_id"] == TRACE


async def test_a_trace_that_nobody_wants_is_passed_on_and_not_sent() -> None:
    with collector() as got:
        async with cluster("PD0", config=settings(otlp_traces_endpoint=got.url)) as c:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            await c.client.post(CHAT, json=text_body(), headers=headers)
            await c.client.post(CHAT, json=text_body())
            await root(got)
            unwanted, begun_here = c["PD0"].calls
    assert sent(unwanted)[::2] == (TRACE, "00") and sent(begun_here)[2] == "01"
    assert {span.trace_id for span in got.spans} == {sent(begun_here)[0]} and sent(begun_here)[0] != TRACE
    assert got.named(f"POST {CHAT}")[0].parent_id == ""


async def test_a_call_that_failed_is_a_span_of_its_own_and_the_request_none_that_failed() -> None:
    with collector() as got:
        async with cluster("PD0", "PD1", config=settings(otlp_traces_endpoint=got.url)) as c:
            c["PD0"].script.append(replies(500, {}))
            c["PD1"].script.append(replies(502, {}))
            answer = await c.client.post(CHAT, json=text_body())
            whole = await root(got)
            asked = {stage: [sent(call)[1] for call in c[stage].calls] for stage in ("PD0", "PD1")}
    assert answer.status_code == 200 and not whole.failed and whole.attributes["epd.attempts"] == 3
    calls = [span for span in got.spans if span.kind == CLIENT]
    assert sorted(span.failed for span in calls) == [False, True, True]
    assert {span.span_id for span in calls} == {one for ids in asked.values() for one in ids}
    assert len(got.named("failed attempt")) == 2 and whole.events.count("retry") == 2


async def test_a_server_s_failure_is_an_error_and_a_client_s_mistake_is_none() -> None:
    with collector() as got:
        async with cluster("PD0", config=settings(otlp_traces_endpoint=got.url, retries=0)) as c:
            c["PD0"].script.append(replies(500, {}))
            await c.client.post(CHAT, json=text_body())
            failed = await root(got)
            await c.client.post(CHAT, content=b"{")
            refused = await root(got, 2)
    assert failed.failed and failed.attributes["http.response.status_code"] == 502
    assert failed.attributes["error.type"] == "stage_failed"
    assert not refused.failed and refused.attributes["error.type"] == "invalid_json"


async def test_nothing_is_sent_to_stages_where_no_traces_are_made() -> None:
    async with cluster("PD0") as c:
        await c.client.post(CHAT, json=text_body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        (call,) = c["PD0"].calls
    assert "traceparent" not in call.headers


async def test_a_collector_that_refuses_costs_no_answer_and_is_counted() -> None:
    with collector(refuses=True) as got:
        async with cluster("PD0", config=settings(otlp_traces_endpoint=got.url)) as c:
            assert (await c.client.post(CHAT, json=text_body())).status_code == 200
            await c.until_metric("epd_proxy_traces_dropped_total", 1)


def test_a_queue_that_is_full_drops_and_counts() -> None:
    lost: list[int] = []
    with collector() as got:
        got.answers.clear()
        export = SpanExport(got.url, lost.append)
        for _ in range(2 * HELD):
            export.ended(Record("r", CHAT, trace=TraceContext.of("")))
        assert HELD - AT_ONCE <= sum(lost) <= HELD  # a message may be on its way
        got.answers.set()
        wait_for(lambda: sum(lost) + len(got.spans) == 2 * HELD, "the others to be sent")
        export.close()


def test_what_has_ended_is_sent_before_the_end() -> None:
    lost: list[int] = []
    with collector() as got:
        export = SpanExport(got.url, lost.append)
        export.ended(Record("r", CHAT, trace=TraceContext.of("")))
        export.close()
        assert len(got.spans) == 1 and not sum(lost)


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector/", "http://collector", "http:///v1/traces"])
def test_what_is_no_url_of_a_collector_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(otlp_traces_endpoint=endpoint)
    assert refused.value.param == "otlp_traces_endpoint"
