"""Ending work early: who is cut, why, and that nothing else is swallowed."""

from __future__ import annotations

import asyncio

import pytest

from proxy.request import cancel_scope as cut_module
from proxy.request.cancel_scope import Cut
from tests.waiting import PATIENCE_S


async def test_work_that_ends_by_itself_has_no_reason() -> None:
    cut: Cut[str] = Cut()
    with cut:
        await asyncio.sleep(0)
    assert cut.reason is None
    cut.now("too late")
    await asyncio.sleep(0)
    assert cut.reason is None


async def test_it_is_cut_from_a_callback_and_the_task_goes_on() -> None:
    cut: Cut[str] = Cut()
    with cut:
        asyncio.get_running_loop().call_soon(cut.now, "left")
        await asyncio.sleep(PATIENCE_S)
    assert cut.reason == "left"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(0)  # no cancellation is left over


async def test_it_is_cut_at_a_time_and_the_first_reason_counts() -> None:
    cut: Cut[str] = Cut()
    with cut:
        cut.at(asyncio.get_running_loop().time(), "late")
        await asyncio.sleep(PATIENCE_S)
    assert cut.reason == "late"


async def test_an_error_of_the_work_passes_whether_or_not_it_was_cut() -> None:
    async def fails() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            raise ValueError("its own")

    cut: Cut[str] = Cut()
    asyncio.get_running_loop().call_soon(cut.now, "left")
    with pytest.raises(ValueError, match="its own"), cut:
        await fails()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_cancellation_by_somebody_else_passes() -> None:
    async def work() -> None:
        cut: Cut[str] = Cut()
        with cut:
            entered.set_result(cut)
            await asyncio.sleep(PATIENCE_S)

    entered: asyncio.Future[Cut[str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(work())
    cut = await entered
    cut.now("left")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_the_work_loses_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_module, "RECANCEL_S", 0.01)
    cut: Cut[str] = Cut()
    lost = 0
    with cut:
        asyncio.get_running_loop().call_soon(cut.now, "left")
        while lost < 2:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                lost += 1
        await asyncio.sleep(PATIENCE_S)
    assert (cut.reason, lost) == ("left", 2)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_one_cut_within_another_ends_only_its_own_work() -> None:
    outer: Cut[str] = Cut()
    inner: Cut[str] = Cut()
    with outer:
        with inner:
            asyncio.get_running_loop().call_soon(inner.now, "silent")
            await asyncio.sleep(PATIENCE_S)
        assert inner.reason == "silent"
        asyncio.get_running_loop().call_soon(outer.now, "left")
        await asyncio.sleep(PATIENCE_S)
    assert outer.reason == "left"
