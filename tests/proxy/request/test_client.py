"""The client's side: the gaps between its tokens, and work that ends early: who is cancelled, why, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from proxy.request import client
from proxy.request.client import CHOICE, DELTA, CancelScope, ClientSink
from tests.proxy.fakes import DONE
from tests.proxy.generate.streams import Form
from tests.waiting import PATIENCE_S

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
        monkeypatch.setattr("proxy.request.client.time", clock)
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


async def test_work_that_ends_by_itself_has_no_reason() -> None:
    scope: CancelScope[str] = CancelScope()
    with scope:
        await asyncio.sleep(0)
    assert scope.reason is None
    scope.cancel("too late")
    await asyncio.sleep(0)
    assert scope.reason is None


async def test_it_is_cancelled_from_a_callback_and_the_task_goes_on() -> None:
    scope: CancelScope[str] = CancelScope()
    with scope:
        asyncio.get_running_loop().call_soon(scope.cancel, "left")
        await asyncio.sleep(PATIENCE_S)
    assert scope.reason == "left"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(0)  # no cancellation is left over


async def test_it_is_cancelled_at_a_time_and_the_first_reason_counts() -> None:
    scope: CancelScope[str] = CancelScope()
    with scope:
        scope.cancel_at(asyncio.get_running_loop().time(), "late")
        await asyncio.sleep(PATIENCE_S)
    assert scope.reason == "late"


async def test_of_several_times_the_last_one_counts() -> None:
    scope: CancelScope[str] = CancelScope()
    now = asyncio.get_running_loop().time()
    with scope:
        scope.cancel_at(now, "soon")
        scope.cancel_at(now + PATIENCE_S, "late")
        scope.cancel_at(now, "now")
        await asyncio.sleep(PATIENCE_S)
    assert scope.reason == "now"
    with CancelScope[str]() as put_off:
        put_off.cancel_at(now, "soon")
        put_off.cancel_at(now + PATIENCE_S, "late")
        for _ in range(3):  # rounds of the event loop, which would call what is due
            await asyncio.sleep(0)
    assert put_off.reason is None


async def test_an_error_of_the_work_passes_whether_or_not_it_was_cancelled() -> None:
    async def fails() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            raise ValueError("its own")

    scope: CancelScope[str] = CancelScope()
    asyncio.get_running_loop().call_soon(scope.cancel, "left")
    with pytest.raises(ValueError, match="its own"), scope:
        await fails()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_cancellation_by_somebody_else_passes() -> None:
    async def work() -> None:
        scope: CancelScope[str] = CancelScope()
        with scope:
            entered.set_result(scope)
            await asyncio.sleep(PATIENCE_S)

    entered: asyncio.Future[CancelScope[str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(work())
    scope = await entered
    scope.cancel("left")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_the_work_loses_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RECANCEL_S", 0.01)
    scope: CancelScope[str] = CancelScope()
    lost = 0
    with scope:
        asyncio.get_running_loop().call_soon(scope.cancel, "left")
        while lost < 2:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                lost += 1
        await asyncio.sleep(PATIENCE_S)
    assert (scope.reason, lost) == ("left", 2)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_one_scope_within_another_ends_only_its_own_work() -> None:
    outer: CancelScope[str] = CancelScope()
    inner: CancelScope[str] = CancelScope()
    with outer:
        with inner:
            asyncio.get_running_loop().call_soon(inner.cancel, "silent")
            await asyncio.sleep(PATIENCE_S)
        assert inner.reason == "silent"
        asyncio.get_running_loop().call_soon(outer.cancel, "left")
        await asyncio.sleep(PATIENCE_S)
    assert outer.reason == "left"
