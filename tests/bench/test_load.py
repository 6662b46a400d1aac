"""The load generator tells good answers from bad ones, and keeps to its schedule."""

from __future__ import annotations

import asyncio

import pytest

from bench.client.connection import Answer, post
from bench.load import Sample, closed_loop, open_loop
from bench.load_process import Generator, Load
from bench.workloads.arrivals import Poisson, arrivals_within
from epd_serve.errors import StageError
from epd_serve.roles import Role
from proxy import strict_json
from tests.proxy.fakes import DONE, FakeStage, breaks, chunk, refuses, served, streams, text_body

CHAT = "/v1/chat/completions"


def request(url: str, *, stream: bool) -> bytes:
    return post(url, CHAT, strict_json.encode(text_body(stream=stream)))


async def good_answers(url: str, made: bytes, *, stream: bool) -> Sample:
    """A closed loop with good answers in its window, which on a busy machine has to be longer."""
    for seconds in (0.1, 1.0, 10.0):
        sample = await closed_loop(url, lambda _: made, at_once=3, seconds=seconds, stream=stream)
        if sample.good:
            return sample
    raise AssertionError(f"no good answer within {seconds:g} s: {sample.errors}")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_loop_counts_good_answers_and_their_events(stream: bool) -> None:
    fake = FakeStage("PD0", Role.PD)
    async with served(fake) as url:
        made = request(url, stream=stream)
        sample = await good_answers(url, made, stream=stream)
        assert not sample.errors
        assert sample.events == (3 * sample.good if stream else 0)
        assert all(0 < first <= whole for first, whole in zip(sample.first_s, sample.whole_s, strict=True))
        assert {"rps", "first_p99_ms", "generator_us_per_request"} <= set(sample.summary())


async def test_bad_answers_are_errors_by_kind() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.script.extend([refuses(400, "no"), breaks, streams(chunk("a"), then="break"), streams(chunk("a"), DONE)])
    async with served(fake) as url:
        made = request(url, stream=True)
        sample = await open_loop(url, lambda _: made, per_second=40, seconds=0.5, stream=True)
        assert sample.errors == {"status 400": 1, "broken": 2}
        assert sample.good == len(arrivals_within(Poisson(40), 0.5, 0)) - 3


async def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(BaseExceptionGroup) as failed:
        await closed_loop("http://127.0.0.1:1", lambda _: b"", at_once=2, seconds=0.1, stream=False)
    assert failed.group_contains(StageError)


def test_an_open_loops_times_count_from_when_a_request_was_due() -> None:
    sample = Sample(begun_s=0.0, ended_s=1.0)
    sample.note(Answer(200, sent=5.0, first=6.0, ended=7.0, tail=b"}"), 4.0, stream=False)
    sample.note(None, 4.0, stream=False)
    assert (sample.first_s, sample.whole_s, sample.errors) == ([2.0], [3.0], {"timeout": 1})


async def test_a_generator_of_its_own_process_says_what_it_saw_or_why_not() -> None:
    async with served(FakeStage("PD0", Role.PD)) as url:
        with Generator() as generator:
            load = Load([text_body(stream=True)], 0.5, per_second=20.0)
            found = await asyncio.to_thread(generator.run, url, load)
            assert found["requests"] == len(arrivals_within(Poisson(20), 0.5, 0))
            assert not found["kinds"]
            load = Load([text_body(stream=True)], 0.1, at_once=2, warm_up_s=0.0)
            with pytest.raises(StageError, match="cannot be reached"):
                await asyncio.to_thread(generator.run, "http://127.0.0.1:1", load)
