"""What a client is told of its request's way, and only when it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.records.record import MAX_EVENTS, MAX_MOMENTS, Record
from proxy.registry.instance_state import Work
from proxy.routing.policy import UNMEASURED_RATE
from tests.proxy.fakes import cluster, encodes, image_body, replies, settings, text_body

CHAT = "/v1/chat/completions"
ASK = {"x-epd-explain": "1"}


def told(headers: object) -> set[str]:
    return {name for name in dict(headers) if name.startswith("x-epd-")}  # type: ignore[call-overload]


async def test_nothing_is_told_unasked() -> None:
    async with cluster("PD0") as c:
        for headers in ({}, {"x-epd-explain": "0"}):
            assert not told((await c.client.post(CHAT, json=text_body(), headers=headers)).headers)


async def test_an_image_s_way_through_three_stages_is_told() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        response = await c.client.post(CHAT, json=image_body(), headers=ASK)
    assert response.headers["x-epd-path"] == "E-P-D" and response.headers["x-epd-attempts"] == "1"
    assert response.headers["x-epd-instances"] == "encode=E0, prefill=P0, decode=D0"
    assert response.headers["x-epd-request-id"] == c["E0"].calls[0].headers["x-request-id"]
    stamps = [stamp.partition("=") for stamp in response.headers["x-epd-timing-ms"].split(", ")]
    names = [name for name, _, _ in stamps]
    assert names[:5] == ["received", "media", "encoded", "admitted", "dispatched"] and "answered" in names
    times = [float(value) for _, _, value in stamps]
    assert times == sorted(times)


async def test_what_each_choice_went_by_is_told() -> None:
    async with cluster("E0", "E1", "PD0", "PD1") as c:
        c["E0"].usual = c["E1"].usual = encodes()
        with c.table.acquire("PD0", Work.DECODE, 5 * UNMEASURED_RATE):
            response = await c.client.post(CHAT, json=image_body(), headers=ASK)
    told_ms = dict(part.split("=") for part in response.headers["x-epd-predicted-ms"].split(", "))
    assert set(told_ms) == {"encode@E0", "encode@E1", "prompt@PD0", "prompt@PD1"}
    assert float(told_ms["prompt@PD0"]) == pytest.approx(5000 + float(told_ms["prompt@PD1"]), abs=0.2)


async def test_a_stream_is_told_what_led_to_its_first_byte() -> None:
    async with cluster("P0", "D0") as c:
        response = await c.client.post(CHAT, json=text_body(stream=True), headers=ASK)
    assert response.headers["x-epd-path"] == "P-D" and "first_byte=" in response.headers["x-epd-timing-ms"]


async def test_a_retry_shows() -> None:
    async with cluster("PD0", "PD1") as c:
        c["PD0"].script.append(replies(500, {}))
        c["PD1"].script.append(replies(502, {}))
        response = await c.client.post(CHAT, json=text_body(), headers=ASK)
    assert response.status_code == 200 and response.headers["x-epd-attempts"] == "3"


async def test_a_refusal_is_explained_as_far_as_it_came() -> None:
    async with cluster("PD0") as c:
        response = await c.client.post(CHAT, content=b"{", headers=ASK)
    assert response.status_code == 400 and response.headers["x-epd-timing-ms"].startswith("received=")
    assert "x-epd-path" not in response.headers


async def test_nobody_is_told_unless_the_operator_says_so() -> None:
    unsaid = ProxySettings(served_models=("m",), identity=ModelIdentity("m")).explain
    async with cluster("PD0", config=settings(explain=unsaid)) as c:
        assert not told((await c.client.post(CHAT, json=text_body(), headers=ASK)).headers)


@pytest.mark.parametrize("name", ["evil\r\nset-cookie: a=b", "ünï"])
def test_names_from_elsewhere_cannot_break_the_headers(name: str) -> None:
    record = Record("id")
    record.attempted("PD", None, name)
    value = record.headers()["x-epd-instances"]
    assert value.isascii() and value.isprintable()


def test_events_are_bounded_and_those_left_out_are_counted() -> None:
    record = Record("id")
    for _ in range(MAX_EVENTS + 7):
        record.note("admitted")
    assert len(record.events) == MAX_EVENTS and record.lost == 7
    assert record.headers()["x-epd-timing-ms"].count("admitted") == MAX_MOMENTS


async def test_a_client_s_name_for_its_request_comes_back_and_stages_get_ours(tmp_path: Path) -> None:
    trace = tmp_path / "proxy.jsonl"
    async with cluster("PD0", config=settings(trace_path=str(trace))) as c:
        mine = {"x-request-id": "order-17/a", **ASK}
        first = await c.client.post(CHAT, json=text_body(), headers=mine)
        second = await c.client.post(CHAT, json=text_body(), headers=mine)
        sent = [call.headers["x-request-id"] for call in c["PD0"].calls]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "order-17/a"
    assert sent == [first.headers["x-epd-request-id"], second.headers["x-epd-request-id"]] and sent[0] != sent[1]
    assert trace.read_text().count('"client_id": "order-17/a"') == 2


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "caf\xe9", "https://a/?token=b"])
async def test_what_is_no_name_for_a_request_is_not_repeated(name: str) -> None:
    async with cluster("PD0") as c:
        response = await c.client.post(CHAT, json=text_body(), headers={"x-request-id": name.encode("latin-1")})
    assert response.status_code == 200 and len(response.headers["x-request-id"]) == 32
