"""Counting what an engine has still to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.status.pending import Pending, StepWork, pending, step_work
from tests.epd_serve.engine.status.fakes import FakeRequest, FakeStep, item


def nothing(key: str) -> bool:
    return False


def test_requests_count_by_state_and_finished_ones_not_at_all() -> None:
    requests = [
        FakeRequest(100),
        FakeRequest(50, 20, "WAITING_FOR_REMOTE_KVS"),
        FakeRequest(80, 30, "RUNNING"),
        FakeRequest(80, 95, "RUNNING"),
        FakeRequest(70, 0, "PREEMPTED"),
        FakeRequest(999, 0, "FINISHED_STOPPED"),
    ]
    assert pending(requests, encoded=None) == Pending(waiting=3, running=2, prompt_tokens=100 + 30 + 50 + 70)


def test_items_count_until_they_are_computed_or_in_the_encoder_cache() -> None:
    items = [item("past", 0, 10), item("cached", 10, 10), item("half", 25, 10), item("ahead", 50, 16)]
    requests = [FakeRequest(100, 30, "RUNNING", items)]
    assert pending(requests, encoded={"cached"}.__contains__).item_tokens == 10 + 16
    assert pending(requests, encoded=nothing).item_tokens == 10 + 16
    requests[0].num_computed_tokens = 0
    assert pending(requests, encoded={"cached"}.__contains__).item_tokens == 10 + 10 + 16


def test_who_takes_features_has_no_items_to_encode() -> None:
    assert pending([FakeRequest(100, 0, "WAITING", [item("a", 0, 64)])], encoded=None).item_tokens == 0


def test_a_step_is_split_into_prompt_items_and_decodes() -> None:
    requests = {
        "first": FakeRequest(100, 64, "RUNNING", [item("a", 0, 20), item("b", 30, 40)]),  # 64 of 100 in this step
        "last": FakeRequest(100, 100, "RUNNING"),  # the last 36
        "decodes": FakeRequest(10, 14, "RUNNING"),
        "speculates": FakeRequest(10, 24, "RUNNING"),
    }
    step = FakeStep({"first": 64, "last": 36, "decodes": 1, "speculates": 4}, {"first": [0, 1]})
    before = sum(range(64)) + sum(range(64, 100))
    assert step_work(step, requests) == StepWork(100, 60, 2, 20**2 + 40**2, context_tokens=before, kv_tokens=13 + 20)


def test_a_step_that_schedules_nothing_does_nothing() -> None:
    assert not step_work(FakeStep(), {})


@given(st.lists(st.tuples(st.integers(1, 500), st.lists(st.integers(1, 200), max_size=5)), min_size=1, max_size=6))
def test_what_was_pending_is_scheduled_or_pending_still(prompts: list[tuple[int, list[int]]]) -> None:
    """Chunk by chunk no prompt token is lost or counted twice."""
    requests = {str(index): FakeRequest(tokens) for index, (tokens, _) in enumerate(prompts)}
    for index, (_, chunks) in enumerate(prompts):
        for chunk in chunks:
            before = pending(requests.values(), encoded=None).prompt_tokens
            requests[str(index)].num_computed_tokens += chunk
            work = step_work(FakeStep({str(index): chunk}), requests)
            assert pending(requests.values(), encoded=None).prompt_tokens + work.prompt_tokens == before
