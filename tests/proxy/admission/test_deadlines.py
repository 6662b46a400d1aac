"""The client's own deadline, in `x-epd-deadline-ms`."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from proxy.admission.queue import Kind
from proxy.request.parse import Endpoint
from tests.proxy.admission.test_gate import narrow, once_answered, until_waiting
from tests.proxy.fakes import chunk, cluster, hangs, streams, text_body

CHAT = Endpoint.CHAT.value


async def test_a_deadline_that_lapses_cancels_every_stage_and_is_a_504_with_its_own_code() -> None:
    async with cluster("P0", "D0") as c:
        for name in ("P0", "D0"):
            c[name].usual = hangs
        late = await c.client.post(CHAT, json=text_body(), headers={"x-epd-deadline-ms": "300"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        assert "0.3 s" in late.json()["error"]["message"]
        await c.idle()
        assert c.metric("epd_proxy_deadlines_lapsed_total") == 1
        assert c.metric("epd_proxy_requests_total", endpoint=CHAT, status="504") == 1


async def test_a_deadline_that_lapses_mid_stream_ends_it_with_an_error_event() -> None:
    async with cluster("PD0") as c:
        c["PD0"].usual = streams(chunk("a"), then="hang")
        c.client.headers["x-epd-deadline-ms"] = "500"
        received = await c.aborted_stream(text_body(stream=True))
        assert b"deadline_exceeded" in received and b"[DONE]" not in received
        await c.idle()


async def test_who_reads_nothing_is_not_waited_for_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.http.exchange.LAST_WORD_S", 0.05)
    body = json.dumps(text_body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-epd-deadline-ms: 300\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with cluster("PD0") as c:
        c["PD0"].usual = streams(*[chunk("x" * 60_000)] * 200, then="hang")  # more than any buffers take
        with socket.create_connection((c.client.base_url.host, c.client.base_url.port)) as client:
            client.sendall(head + body)
            await c.until_metric("epd_proxy_requests_total", 1, endpoint=CHAT, status="broken")
            await c.idle()


async def test_a_deadline_that_lapses_while_waiting_gives_the_place_up() -> None:
    async with cluster("PD0", config=narrow()) as c:
        released = asyncio.Event()
        first = await once_answered(c, released)
        late = await c.client.post(CHAT, json=text_body(), headers={"x-epd-deadline-ms": "50"})
        assert late.status_code == 504
        await until_waiting(c, Kind.TEXT, 0)
        released.set()
        assert (await first).status_code == 200
        assert len(c["PD0"].calls) == 1


async def test_one_that_cannot_be_kept_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("PD0") as c:
        monkeypatch.setattr(c.pipeline.gate.queue, "predicted_wait_s", lambda *_, **__: 3.0)
        refused = await c.client.post(CHAT, json=text_body(), headers={"x-epd-deadline-ms": "2000"})
        assert refused.status_code == 504 and refused.json()["error"]["code"] == "deadline_unreachable"
        assert (await c.client.post(CHAT, json=text_body(), headers={"x-epd-deadline-ms": "9000"})).status_code == 200
        assert len(c["PD0"].calls) == 1
        assert c.metric("epd_proxy_refused_total", reason="deadline") == 1


async def test_a_wait_that_is_longer_than_anybody_may_wait_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("PD0", config=narrow(max_wait_s=10.0)) as c:
        monkeypatch.setattr(c.pipeline.gate.queue, "predicted_wait_s", lambda *_, **__: 20.0)
        refused = await c.client.post(CHAT, json=text_body())
        assert refused.status_code == 429 and 20 <= int(refused.headers["retry-after"]) <= 25
        assert not c["PD0"].calls


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e3", "soon", "99999999999", "²"])
async def test_one_that_is_no_number_of_milliseconds_is_named(text: str) -> None:
    async with cluster("PD0") as c:
        refused = await c.client.post(CHAT, json=text_body(), headers={b"x-epd-deadline-ms": text.encode("latin-1")})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-epd-deadline-ms"
