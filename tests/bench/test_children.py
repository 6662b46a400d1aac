"""Processes that a measurement directs: they answer, they end with it, and their failures are loud."""

from __future__ import annotations

import pytest

from bench.children import Child
from epd_serve.errors import StageError


def test_a_child_answers_and_ends_with_its_input():
    child = Child("tests.bench.echo_child", {"greeting": "hello"})

    assert child.hear() == {"configured": {"greeting": "hello"}}
    assert child.ask(number=1) == {"echo": {"number": 1}}
    assert child.ask(number=2) == {"echo": {"number": 2}}
    child.stop()


def test_a_child_that_ends_leaves_its_last_words():
    child = Child("tests.bench.echo_child", {})
    child.hear()

    with pytest.raises(StageError, match="told to fail"):
        child.ask(fail="told to fail")

    child.stop()


def test_a_silent_child_is_not_waited_for_without_end():
    child = Child("tests.bench.echo_child", {})
    child.hear()

    with pytest.raises(StageError, match="said nothing"):
        child.ask(0.05, silent=True)

    child.stop()


def test_a_long_answer_comes_whole_whatever_interrupts_its_writing():
    child = Child("tests.bench.echo_child", {})
    child.hear()

    assert len(child.ask(20.0, interrupted_bytes=4_000_000)["text"]) == 4_000_000

    child.stop()
