"""What a client's side counts while a stream is written: the gaps between its tokens."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from proxy.request.client_sink import CHOICE, DELTA, ClientSink
from tests.proxy.fakes import DONE
from tests.proxy.generate.streams import Form

Write = tuple[float, bytes]


class Clock:
    """In place of the module `time`."""

    at_s = 0.0

    def monotonic(self) -> float:
        return self.at_s


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(gaps, those within 50 ms) of these writes, each at a time; the last of them ends the answer."""

    async def counted(*writes: Write, content: bytes = CHOICE) -> tuple[int, int]:
        async def send(message: MutableMapping[str, Any]) -> None: ...

        clock = Clock()
        monkeypatch.setattr("proxy.request.client_sink.time", clock)
        sink = ClientSink(send, {}, gap_limit_s=0.05, content=content)
        await sink.start_stream()
        for at_s, data in writes:
            clock.at_s = at_s
            await (sink.finish(data) if (at_s, data) == writes[-1] else sink.write(data))
        return sink.gaps.count, sink.gaps.within

    return counted


@pytest.mark.parametrize("chat", [True, False])
async def test_each_wait_for_tokens_is_a_gap_and_nothing_else_is(written: Any, chat: bool) -> None:
    form = Form(chat=chat, usage=True)
    one, two = form.event([(1, "a")]), form.event([(2, "b"), (3, "c")])
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    first = form.written(choices=[role]) + one if chat else one
    usage = form.written(choices=[], usage={"completion_tokens": 8})
    assert await written((1.0, first), (1.04, one), (1.1, one), (1.15, two), (1.2, usage), (1.3, DONE)) == (3, 2)


async def test_events_that_came_at_once_share_the_wait_before_them(written: Any) -> None:
    event = Form(chat=True).event([(1, "a")])
    assert await written((1.0, event), (1.16, 4 * event), (1.17, event + DONE)) == (5, 5)
    assert await written((1.0, event), (1.16, 3 * event), (1.17, event + DONE)) == (4, 1)


async def test_a_response_s_tokens_are_its_deltas(written: Any) -> None:
    delta = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
    begins = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    ends = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    assert await written((0.5, begins), (1.0, delta), (1.04, delta), (1.1, delta), (1.1, ends), content=DELTA) == (2, 1)


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_item_that_a_response_begins_is_no_token(written: Any, at_once: bool) -> None:
    begins = (
        b'event: response.created\ndata: {"type":"response.created"}\n\n'
        b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
        b'event: response.output_item.added\ndata: {"item":{"type":"message","role":"assistant","content":[]}}\n\n'
    )
    delta = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
    first = [(1.0, begins + delta)] if at_once else [(0.5, begins), (1.0, delta)]
    assert await written(*first, (1.04, delta), (1.14, delta), content=DELTA) == (2, 1)
