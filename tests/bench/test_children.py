"""Processes that a measurement directs: they answer, they end with it, and their failures are loud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.clients.process import Child
from epd_serve.errors import StageError


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("tests.bench.echo_child", "hello")
    assert made.hear() == "hello"
    yield made
    made.stop()


def test_a_child_answers_and_ends_when_it_is_stopped(child: Child) -> None:
    assert [child.ask(number) for number in (1, 2)] == [1, 2]
    child.tell(None)

    with pytest.raises(StageError, match="ended"):
        child.hear()


def test_a_child_that_fails_says_where(child: Child) -> None:
    with pytest.raises(StageError, match="ValueError: told to fail"):
        child.ask("fail")


def test_a_child_that_is_gone_is_no_wait(child: Child) -> None:
    with pytest.raises(StageError, match="echo_child"):
        child.ask("exit")


def test_a_silent_child_is_not_waited_for_without_end(child: Child) -> None:
    with pytest.raises(StageError, match="said nothing"):
        child.ask("silent", 0.05)
