"""API keys, the stages' key, images and signed URLs stay out of logs, errors, traces, metrics and explanations."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from proxy.records.records import Question
from proxy.redact import RedactingFilter, redact_logs, redacted
from tests.otlp import Collector, collector
from tests.proxy.fakes import (
    api_keys,
    cluster,
    data_url,
    encodes,
    image_body,
    image_file,
    refuses,
    replies,
    settings,
    streams,
)

CHAT = "/v1/chat/completions"
KEY, STAGE_KEY = "sk-client-5ecret", "stage-5ecret"
SIGNED = "https://pics.example.com/cat.png?X-Amz-Signature=s1gnature&token=t0ken#frag5ecret"
SECRETS = (KEY, STAGE_KEY, "s1gnature", "t0ken", "frag5ecret")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """All that is logged, from DEBUG on, as one file would have it."""
    file = io.StringIO()
    handler = logging.StreamHandler(file)
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")  # which may not propagate
    level = root.level
    root.addHandler(handler)
    uvicorn.addHandler(handler)
    root.setLevel(logging.DEBUG)
    redact_logs()
    yield file
    root.removeHandler(handler)
    uvicorn.removeHandler(handler)
    root.setLevel(level)


async def resolver(host: str, port: int) -> Sequence[str]:
    return ["93.184.216.34"]


def found_in(text: str, *more: str) -> list[str]:
    return [secret for secret in (*SECRETS, *more) if secret in text]


@pytest.fixture
def got() -> Iterator[Collector]:
    """What a collector of OpenTelemetry traces is sent."""
    with collector() as one:
        yield one


async def test_no_secret_leaves_by_any_way(logged: io.StringIO, got: Collector, tmp_path: Path) -> None:
    png = image_file(16, 16)
    pixels = base64.b64encode(png).decode()[60:]

    def media(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/gone.png":
            return httpx.Response(404)
        if request.url.path == "/refused.png":
            raise httpx.ConnectError(f"no way to {request.url}")
        return httpx.Response(200, stream=httpx.ByteStream(png))

    trace, log = tmp_path / "proxy.jsonl", tmp_path / "access.jsonl"
    config = settings(
        api_keys=api_keys(KEY), stage_key=STAGE_KEY, trace_path=str(trace), access_log=str(log), retries=0
    )
    config = replace(config, send_pixels="always", otlp_traces_endpoint=got.url)
    assert not found_in(repr(config))
    transport = httpx.MockTransport(media)
    records = []
    async with cluster("E0", "PD0", config=config, media_transport=transport, resolver=resolver) as c:
        c["E0"].usual = encodes()
        key = {"authorization": f"Bearer {KEY}", "x-epd-explain": "1"}

        async def ask(url: str, **more: str) -> None:
            response = await c.client.post(CHAT, json=image_body(url), headers={**key, **more})
            records.append(f"{response.status_code} {response.headers} {response.text}")

        await ask(SIGNED)
        for name in ("gone", "refused"):
            await ask(SIGNED.replace("cat", name))
        await ask(SIGNED.replace("https://", "https://user:pa55word@"))
        await ask(SIGNED.replace("pics.example.com", "pics.example.com:99999"))
        await ask(data_url(png), authorization="Bearer sk-wrong-5ecret")
        c["PD0"].script.append(refuses(400, f"1 validation error: input_value='{data_url(png)}', see {SIGNED}"))
        await ask(data_url(png))
        c["PD0"].script.append(replies(500, {"error": {"message": f"cannot open {SIGNED} for {data_url(png)}"}}))
        await ask(data_url(png))
        c["PD0"].script.append(streams(then="break"))
        await ask(data_url(png))
        metrics = (await c.client.get("/metrics")).text
        instances = (await c.client.get("/instances")).text
        look = c.pipeline.records.look
        told = str([look(Question(id=one["id"])) for one in look(Question(limit=99)).requests])
    seen = [logged.getvalue(), trace.read_text(), log.read_text(), told, metrics, instances, str(got.spans), *records]
    everything = "\n".join(seen)
    assert len({span.trace_id for span in got.spans}) == len(records)
    assert not found_in(everything, pixels, "pa55word", "sk-wrong-5ecret")
    assert [one[:3] for one in records] == ["200", "400", "400", "400", "400", "401", "400", "502", "502"]
    assert "validation error" in records[6]
    assert "cannot open https://pics.example.com/cat.png" in logged.getvalue()


def test_a_traceback_is_logged_without_what_its_exception_quotes(logged: io.StringIO) -> None:
    try:
        raise ValueError(f"bad image {data_url(image_file())} from {SIGNED}")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application for %s", f"Bearer {KEY}")
    text = logged.getvalue()
    assert "Traceback" in text and "ValueError: bad image data:image/png,... from https://pics" in text
    assert not found_in(text, base64.b64encode(image_file()).decode()[:40])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see http://a.b/c?d=e.", "see http://a.b/c"),
        ("at 'https://u:p@a.b/c#d'!", "at 'https://a.b/c'!"),
        ("stage P0 failed with 500: nothing", "stage P0 failed with 500: nothing"),
        ("request 0f3a9c1d2b4e5f60718293a4b5c6d7e8: P0 died", "request 0f3a9c1d2b4e5f60718293a4b5c6d7e8: P0 died"),
        ("tcp://10.0.0.1:5555 is up", "tcp://10.0.0.1:5555 is up"),
        ("ipc:///run/epd/P0.kv", "ipc:///run/epd/P0.kv"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ..."),
        ("{'x': 'Basic dTpw'}", "{'x': 'Basic ...'}"),
        ("DATA:image/png;base64,AAAA==", "data:image/png,..."),
        ("data: not a URL", "data: not a URL"),
        ("A" * 130, "..."),
    ],
)
def test_what_is_cut_and_what_stays(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_a_record_whose_words_and_values_do_not_fit_harms_nobody(logged: io.StringIO) -> None:
    logging.getLogger("other").warning("took %d s", f"Bearer {KEY}")
    assert "took" in logged.getvalue() and KEY not in logged.getvalue()


def test_the_filter_is_put_in_place_once() -> None:
    redact_logs()
    redact_logs()
    filters = logging.getLogger("uvicorn.error").filters
    assert sum(isinstance(one, RedactingFilter) for one in filters) == 1
