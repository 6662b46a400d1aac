"""W3C Trace Context: what is taken from a client, and what its calls carry."""

from __future__ import annotations

import pytest

from proxy.records.record import TraceContext

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_a_client_s_trace_goes_on_with_its_wish(flags: str, sampled: bool) -> None:
    context = TraceContext.of(f"00-{TRACE}-{PARENT}-{flags}", "vendor=a,other=b")
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, PARENT, sampled)
    assert len(context.span_id) == 16 and context.span_id != PARENT
    assert context.headers("a" * 16) == {
        "traceparent": f"00-{TRACE}-{'a' * 16}-0{int(sampled)}",
        "tracestate": "vendor=a,other=b",
    }
    assert f"-{context.span_id}-" in context.headers("")["traceparent"]


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.of(f"01-{TRACE}-{PARENT}-01-what-ever").trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01\r\nx: y",
    ],
)
def test_what_is_malformed_begins_a_trace_of_its_own(header: str) -> None:
    context = TraceContext.of(header, "vendor=a")
    assert context.trace_id != TRACE and len(context.trace_id) == 32
    assert (context.parent_id, context.sampled, context.state) == ("", True, "")


@pytest.mark.parametrize("state", ["a=\x07", "a=é", "a" * 513])
def test_a_state_that_no_header_may_have_is_left_out(state: str) -> None:
    assert "tracestate" not in TraceContext.of(f"00-{TRACE}-{PARENT}-01", state).headers("")
