"""Flows: every request is kept with its times, its verdict, and what was said where it failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.client.connection import Answer
from bench.flow_process import FlowGenerator
from bench.flows import BROKEN, CUT, GOOD, LEFT, TIMEOUT, UNREACHABLE, Flow, Outcome, run_flows, verdict
from bench.load import LIMIT_S
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, hangs, refuses, served, streams, text_body

ERROR = b'data: {"error": {"message": "D0 died"}}\n\n'


def flow(count: int, *, stream: bool = True, at_once: int = 1, **more: Any) -> Flow:
    return Flow("text", [text_body(stream=stream)], at_once=at_once, count=count, **more)


async def test_requests_in_turn_are_as_many_as_asked_for_and_good() -> None:
    fake = FakeStage("PD0", Role.PD)
    async with served(fake) as url:
        run = await run_flows(url, [flow(7, at_once=3)])
    assert [one.verdict for one in run.outcomes] == [GOOD] * 7 and len(fake.calls) == 7
    assert all(one.begun and one.due < one.first <= one.ended and one.said == "" for one in run.outcomes)


async def test_kinds_are_sent_together_each_at_its_moments() -> None:
    fake = FakeStage("PD0", Role.PD)
    flows = [Flow(kind, [text_body(stream=False)], dues) for kind, dues in (("a", [0.0, 0.02]), ("b", [0.01]))]
    async with served(fake) as url:
        run = await run_flows(url, flows)
    assert sorted((one.due, one.kind) for one in run.outcomes) == [(0.0, "a"), (0.01, "b"), (0.02, "a")]
    assert all(one.first >= one.due for one in run.outcomes)


async def test_failures_are_told_apart_and_say_why() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.script.extend([refuses(429, "too many"), streams(chunk("a"), ERROR), streams(chunk("a"), then="break")])
    async with served(fake) as url:
        run = await run_flows(url, [flow(4)])
    assert [one.verdict for one in run.outcomes] == ["status 429", CUT, BROKEN, GOOD]
    assert "too many" in run.outcomes[0].said and "D0 died" in run.outcomes[1].said
    assert run.outcomes[1].first_s == LIMIT_S, "a failure does not count as quick"


async def test_a_client_that_leaves_is_no_failure_and_one_that_waits_in_vain_is() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.usual = hangs
    async with served(fake) as url:
        left = await run_flows(url, [flow(2, leave_share=1.0, leave_within_s=0.05)])
        waited = await run_flows(url, [flow(1)], limit_s=0.1)
    assert [one.verdict for one in left.outcomes] == [LEFT, LEFT]
    assert [one.verdict for one in waited.outcomes] == [TIMEOUT]


async def test_nobody_there_is_a_verdict_too() -> None:
    run = await run_flows("http://127.0.0.1:1", [flow(1)])
    assert [one.verdict for one in run.outcomes] == [UNREACHABLE] and "cannot be reached" in run.outcomes[0].said


@pytest.mark.parametrize(
    ("answer", "stream", "expected"),
    [
        (Answer(200, 1.0, 2.0, 3.0, tail=b"data: [DONE]\n\n"), True, GOOD),
        (Answer(200, 1.0, 2.0, 3.0, tail=ERROR + b"data: [DONE]\n\n"), True, GOOD),
        (Answer(200, 1.0, 2.0, 0.0, tail=ERROR), True, CUT),
        (Answer(200, 1.0, 2.0, 0.0, tail=b"data: {}\n\n"), True, BROKEN),
        (Answer(200, 1.0, 2.0, 0.0, tail=b'{"error"'), False, BROKEN),
        (Answer(503, 1.0, 2.0, 3.0, tail=b"{}"), True, "status 503"),
        (Answer(), True, BROKEN),
    ],
)
def test_a_verdict_is_one_word(answer: Answer, stream: bool, expected: str) -> None:
    assert verdict(answer, stream=stream) == expected


async def test_a_generator_of_its_own_process_keeps_every_request() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.script.append(refuses(500, "no"))
    fake.usual = streams(chunk("a"), DONE)
    async with served(fake) as url:
        with FlowGenerator() as generator:
            run = await asyncio.to_thread(generator.run, url, [flow(3)])
            assert [one.verdict for one in run.outcomes] == ["status 500", GOOD, GOOD]
            assert all(isinstance(one, Outcome) for one in run.outcomes) and run.begun_s > 0
            broken = Flow("text", [], dues=[0.0])
            with pytest.raises(StageError, match="ZeroDivisionError"):
                await asyncio.to_thread(generator.run, url, [broken])
