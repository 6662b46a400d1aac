"""KV from P to D when something goes wrong, with real stages: kills and stops at exact moments, control messages that
get lost, late or doubled, clients that leave under load. Whatever happens, every request is answered or gets one clear
error, the other stage's engine stays up, later answers are right, and no block stays behind."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from epd_serve.kv.faults import POINTS, here_of
from tests.e2e.bodies import Body, about, chat, conversation, tokens
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY
from tests.e2e.serving import Serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
LONG = {"max_tokens": 6000, "ignore_eos": True}
ANSWER_S = 180.0  # a restart, an attempt after it, and a machine with other things to do
STOPPED_S = 10.0
HOLDS = {point: Path(f"/tmp/epd-kv-faults-{os.getpid()}-{point}") for point in POINTS}
PAUSES = ";".join(f"pause={point}:{path}" for point, path in HOLDS.items())
LOST = ";".join(f"drop={kind}:0.3" for kind in ("Ready", "Cancel", "CancelAck", "Refused", "Alive", "Queued"))
LATE = ";".join(f"delay={kind}:0.3s" for kind in ("Ready", "Cancel", "CancelAck", "Alive"))
DOUBLED = ";".join(f"double={kind}:1" for kind in ("Ready", "Cancel", "CancelAck", "Alive", "Packet", "Done"))

# A packet for each layer: there is something between packets.
pausing = pytest.mark.parametrize(
    "launch", [("P-D", "--kv-grouping", "layerwise", "--kv-faults", PAUSES)], indirect=True, ids=["P-D"]
)
PROMPTS = [chat(text) for text, _ in TEXT_ONLY]
PROMPTS += [about(PAIRWISE_DIFFERENT[index]) for index in (0, 1, 2, 4, 9)] + [conversation(turns) for turns in (6, 20)]


class Hold:
    """Stops whoever reaches a point of `epd_serve.kv.faults` for the `number`th time, until `release`."""

    def __init__(self, point: str, number: int = 1) -> None:
        self._armed = HOLDS[point]
        written = self._armed.with_name(self._armed.name + ".new")
        written.write_text(str(number))
        written.rename(self._armed)

    def wait(self) -> None:
        wait_for(here_of(self._armed).exists, f"{self._armed.name} to be reached", 60)

    def release(self) -> None:
        self._armed.unlink(missing_ok=True)
        here_of(self._armed).unlink(missing_ok=True)


@pytest.fixture
def hold() -> Iterator[Callable[..., Hold]]:
    held: list[Hold] = []

    def make(point: str, number: int = 1) -> Hold:
        held.append(Hold(point, number))
        return held[-1]

    yield make
    for one in held:
        one.release()


def send(launch: Serving, body: Body) -> httpx.Response:
    return launch.post("/v1/chat/completions", body, timeout=ANSWER_S)


def assert_right_or_one_clear_error(response: httpx.Response, right: list[list[int]]) -> None:
    if response.status_code == 200:
        assert tokens(response) == right
    else:
        assert response.status_code >= 500, response.text[:500]
        assert response.json()["error"]["message"]


def lives(launch: Serving) -> dict[str, str]:
    return {name: entry["incarnation"] for name, entry in launch.instances().items()}


def wait_idle(launch: Serving) -> None:
    """Nothing remains of any request."""
    for name in ("P0", "D0"):
        wait_for(lambda n=name: launch.requests_inside(n) == 0, f"{name} to have no request", 30)
        wait_for(lambda n=name: launch.kv_blocks_in_use(n) == 0, f"{name} to have all its blocks back", 30)


def kill(launch: Serving, solo_answer: Solo, holding: Hold, killed: str) -> None:
    """Kill a stage at a moment of a request's transfer; what has to be true then."""
    body, right = PROMPTS[0], solo_answer(PROMPTS[0])
    before = lives(launch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, launch, body)
        holding.wait()
        launch.signal_stage(killed, signal.SIGKILL)
        holding.release()
        assert_right_or_one_clear_error(answer.result(ANSWER_S), right)
    wait_for(lambda: lives(launch)[killed] != before[killed] and launch.healthy(), f"{killed} to be back", 240)
    assert tokens(send(launch, body)) == right
    wait_idle(launch)
    (other,) = set(before) - {killed}
    assert lives(launch)[other] == before[other]


@pausing
@pytest.mark.parametrize(
    ("killed", "point", "number"),
    [
        pytest.param("P0", "ready", 1, marks=pytest.mark.slow, id="P before READY"),
        pytest.param("P0", "packet", 2, marks=pytest.mark.promise("kv-whole"), id="P between packets"),
        pytest.param("P0", "done", 1, marks=pytest.mark.slow, id="P before DONE"),
        pytest.param("D0", "ready", 1, marks=pytest.mark.slow, id="D before READY"),
        pytest.param(
            "D0", "packet", 2, marks=[pytest.mark.promise("kv-whole"), pytest.mark.slow], id="D between packets"
        ),
        pytest.param("D0", "done", 1, marks=pytest.mark.slow, id="D before DONE"),
        pytest.param("D0", "received", 1, marks=pytest.mark.slow, id="D before it reports DONE"),
    ],
)
def test_a_stage_killed_in_the_middle_of_a_transfer(
    launch: Serving, solo_answer: Solo, hold: Callable[..., Hold], killed: str, point: str, number: int
) -> None:
    kill(launch, solo_answer, hold(point, number), killed)


@pytest.mark.slow
@pytest.mark.mooncake
@pytest.mark.parametrize(
    "launch",
    [("P-D", "--kv-grouping", "layerwise", "--kv-transport", "mooncake", "--kv-faults", PAUSES)],
    indirect=True,
    ids=["mooncake"],
)
@pytest.mark.parametrize("killed", ["P0", "D0"])
def test_a_stage_killed_between_packets_that_are_written_one_sidedly(
    launch: Serving, solo_answer: Solo, hold: Callable[..., Hold], killed: str
) -> None:
    kill(launch, solo_answer, hold("packet", 2), killed)


@pausing
@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["P0", "D0"])
def test_a_stage_stopped_for_ten_seconds_in_the_middle_of_a_transfer(
    launch: Serving, solo_answer: Solo, hold: Callable[..., Hold], stopped: str
) -> None:
    before = lives(launch)
    holding = hold("packet", 2)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(send, launch, body) for body in PROMPTS]
        holding.wait()
        launch.signal_stage(stopped, signal.SIGSTOP)
        try:
            holding.release()
            threading.Event().wait(STOPPED_S)  # the fault itself
        finally:
            launch.signal_stage(stopped, signal.SIGCONT)
        for body, answer in zip(PROMPTS, answers, strict=True):
            assert_right_or_one_clear_error(answer.result(ANSWER_S), solo_answer(body))
    wait_for(launch.healthy, "both stages to be well", 30)
    for body in PROMPTS:
        assert tokens(send(launch, body)) == solo_answer(body)
    wait_idle(launch)
    assert lives(launch) == before


def under_load(launch: Serving, solo_answer: Solo, count: int, *, seed: int) -> None:
    """`count` requests, 16 at a time; of ten clients three want a long answer and leave at a random moment. Those who
    stay get the monolith's tokens, and nothing remains."""
    right = [solo_answer(body) for body in PROMPTS]
    before = lives(launch)
    chance = random.Random(seed)
    leaving = {number: chance.uniform(0.01, 2.0) for number in chance.sample(range(count), count * 3 // 10)}

    def one(number: int) -> None:
        which = number % len(PROMPTS)
        if number in leaving:
            with pytest.raises(httpx.TimeoutException):
                launch.post("/v1/chat/completions", {**PROMPTS[which], **LONG}, timeout=leaving[number])
        else:
            assert tokens(send(launch, PROMPTS[which])) == right[which]

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(one, number) for number in range(count)]
    for future in asked:
        future.result()
    wait_idle(launch)
    assert lives(launch) == before


@pausing
def test_clients_that_leave_under_load_leave_no_block_behind(launch: Serving, solo_answer: Solo) -> None:
    under_load(launch, solo_answer, 40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True, ids=["(E-P)-D"])
def test_two_hundred_requests_of_which_sixty_leave(launch: Serving, solo_answer: Solo) -> None:
    under_load(launch, solo_answer, 200, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [("P-D", "--kv-faults", LOST), ("P-D", "--kv-faults", f"{LATE};{DOUBLED}")],
    indirect=True,
    ids=["lost", "late and doubled"],
)
def test_control_messages_go_astray(launch: Serving, solo_answer: Solo) -> None:
    under_load(launch, solo_answer, 60, seed=3)
    assert "trying again" not in launch.log.read_text()  # whatever was lost was said again before anybody gave up
