"""Features from device to device, on CPU: device memory is host memory, Mooncake carries them over TCP.

The stages share a host, so the arena would be there, too: the counters tell that it was not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import SOLO, Body, about, ask, stream
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, DemoPrompt
from tests.e2e.serving import Serving, serving, wait_until

Solo = Callable[[Body], list[list[int]]]
pytestmark = [pytest.mark.slow, pytest.mark.mooncake]
ASKED = ("text", "one picture", "another question", "three pictures of different sizes", "the same picture twice")


@pytest.fixture(scope="module")
def launch() -> Iterator[Serving]:
    """Ready, and every consumer has reached the encoder by the device path."""
    with serving("(E-P)-D", "--mm-store", "mooncake", "--feature-path", "device") as ready:
        for consumer in ("P0", "D0"):
            wait_until(lambda name=consumer: count(ready, name, "path.device") == 1, 30, f"{consumer} to reach E0")
        yield ready


def count(launch: Serving, instance: str, counter: str) -> int:
    """A counter of an instance's store report."""
    return int((launch.instances()[instance]["store"] or {}).get("counters", {}).get(counter, 0))


def recomputed(launch: Serving, instance: str) -> int:
    counters = launch.instances()[instance]["store"]["counters"]
    return sum(value for name, value in counters.items() if name.startswith("recomputed"))


def fresh(index: int) -> Body:
    """A picture that no other test here has shown: its feature cannot be anywhere yet."""
    base = PAIRWISE_DIFFERENT[index]
    return about(DemoPrompt(base.shapes, 229 + 9 * index, base.answer, background=base.background))


@pytest.mark.parametrize("name", ASKED)
def test_greedy_tokens_equal_the_monoliths(launch: Serving, solo_answer: Solo, name: str) -> None:
    assert ask(launch, SOLO[name]) == solo_answer(SOLO[name])


def test_a_stream_carries_the_same_tokens(launch: Serving, solo_answer: Solo) -> None:
    body = about(PAIRWISE_DIFFERENT[5])
    ids, _ = stream(launch, body)
    assert [ids] == solo_answer(body)


def test_eight_at_a_time_each_get_the_answer_to_their_own_picture(launch: Serving, solo_answer: Solo) -> None:
    bodies = [about(prompt) for prompt in PAIRWISE_DIFFERENT]
    alone = [solo_answer(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone


def test_a_new_picture_goes_from_device_to_device_and_past_the_arena(launch: Serving, solo_answer: Solo) -> None:
    put, fetched, again = (
        count(launch, "E0", "device.put"),
        count(launch, "P0", "device.fetched"),
        recomputed(launch, "P0"),
    )
    arena = launch.instances()["E0"]["store"]["used_bytes"]
    assert ask(launch, fresh(0)) == solo_answer(fresh(0))
    wait_until(lambda: count(launch, "P0", "device.fetched") == fetched + 1, 5, "P to count its fetch")
    assert count(launch, "E0", "device.put") == put + 1
    assert recomputed(launch, "P0") == again
    assert launch.instances()["E0"]["store"]["used_bytes"] == arena


def test_a_picture_seen_before_is_neither_encoded_nor_sent_again(launch: Serving, solo_answer: Solo) -> None:
    assert ask(launch, fresh(1)) == solo_answer(fresh(1))
    wait_until(lambda: count(launch, "E0", "encoding") == 0, 5, "E0 to have it behind it")
    before = [count(launch, "E0", "encoded"), count(launch, "P0", "device.fetched"), recomputed(launch, "P0")]
    assert ask(launch, fresh(1)) == solo_answer(fresh(1))
    assert ask(launch, fresh(2)) == solo_answer(fresh(2))  # its counts come after those of the picture seen before
    wait_until(lambda: count(launch, "P0", "device.fetched") > before[1], 5, "P to count its fetch")
    after = [count(launch, "E0", "encoded"), count(launch, "P0", "device.fetched"), recomputed(launch, "P0")]
    assert after == [before[0] + 1, before[1] + 1, before[2]]
