"""Ending work early: who is cancelled, why, and that nothing else is swallowed."""

from __future__ import annotations

import asyncio

import pytest

from proxy.request import deadline
from proxy.request.deadline import CancelScope
from tests.waiting import PATIENCE_S


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
    monkeypatch.setattr(deadline, "RECANCEL_S", 0.01)
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
