"""How `epd-bench transfer pd` asks a launch, which is played here by an HTTP transport that stamps as stages do."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import Counter

import httpx
import pytest

from bench.micro.measurement import LEAST_ROUNDS
from bench.micro.pd import stages
from bench.micro.pd.stages import Turns, check_mode, take_turns
from bench.served import Served
from epd_serve.errors import StageError
from epd_serve.kv.grouping import LinkCost, Step, parse_grouping
from epd_serve.phases.stamps import read_stamps
from tests.bench.micro.pd.transfers_made import LAYERS, stamps, transfer

MODES = ("bulk", "fixed:2")


class Launch:
    """Answers completions, and stamps a transfer packed as the mode's file says."""

    def __init__(self, folder):
        self.mode = folder / "mode"
        self.traces = folder / "traces"
        self.traces.mkdir()
        self.served = Served("P-D", "http://proxy", "bench", {}, 1.0, (), self.traces)
        self.prompts, self.bodies, self.modes = [], [], []
        self.counted = 0  # tokens too many
        self.follows = True
        self._lock = threading.Lock()

    def __call__(self, request):
        body = json.loads(request.content)
        mode = parse_grouping(self.mode.read_text() if self.follows else "layerwise", 0)
        cuts = (0, *mode.cuts(Step(LAYERS, 1, 1.0), LinkCost(1.0, 1.0)))
        with self._lock:
            self.bodies.append(body)
            self.modes.append(self.mode.read_text())
            self.prompts.append(body["prompt"])
            name = f"t{len(self.prompts)}"
            groups = [last - first for first, last in itertools.pairwise(cuts)]
            for stamp in stamps(dataclasses.replace(transfer(groups), id=name)):
                line = {"t": stamp.t, "instance": stamp.instance, "subject": stamp.subject, "event": stamp.event}
                with (self.traces / f"{stamp.instance}.jsonl").open("a") as file:
                    file.write(json.dumps(line | dict(stamp.more)) + "\n")
        usage = {"prompt_tokens": len(body["prompt"]) + self.counted}
        return httpx.Response(200, json={"usage": usage}, headers={"x-request-id": f"request-{name}"})

    def ask(self, turns):
        with httpx.Client(transport=httpx.MockTransport(self)) as client:
            return list(take_turns(self.served, client, self.mode, "shm", turns))


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "PAUSE_S", 0.0)
    monkeypatch.setattr(stages, "STAMPS_S", 0.0)
    return Launch(tmp_path)


def test_each_mode_is_asked_once_per_case_and_round(launch):
    rows = launch.ask(Turns((8, 32), MODES, {1: 2, 3: 1}))

    asked = Counter((row["tokens"], row["concurrency"], row["mode"], row["round"]) for row in rows)
    alone = {(tokens, 1, mode, turn): 1 for tokens in (8, 32) for mode in MODES for turn in (0, 1)}
    assert asked == alone | {(tokens, 3, mode, 0): 1 for tokens in (8, 32) for mode in MODES}
    warm_up, of_a_round = 2 * len(MODES), 2 * len(MODES)
    assert len(launch.prompts) == warm_up + 2 * of_a_round + 3 * of_a_round


def test_modes_take_turns_in_an_order_drawn_anew(launch):
    launch.ask(Turns((8,), MODES, {1: 12}))

    measured = launch.modes[len(MODES) :]
    assert set(measured[:: len(MODES)]) == set(MODES)


def test_p_has_the_mode_before_it_is_asked(launch):
    rows = launch.ask(Turns((8,), MODES, {1: 3}))

    assert {(row["mode"], *row["groups"]) for row in rows} == {("bulk", 8), ("fixed:2", 2, 2, 2, 2)}


def test_rounds_that_are_over_are_kept_when_a_later_one_fails(launch):
    with httpx.Client(transport=httpx.MockTransport(launch)) as client:
        rows = take_turns(launch.served, client, launch.mode, "shm", Turns((8,), MODES, {1: 3}))
        assert [next(rows)["round"] for _ in MODES] == [0, 0]
        launch.follows = False
        with pytest.raises(StageError, match="in mode"):
            next(rows)


def test_prompts_have_the_exact_length_ordinary_tokens_and_are_never_alike(launch):
    launch.ask(Turns((8, 32), MODES, {1: 2}))

    assert {len(prompt) for prompt in launch.prompts} == {8, 32}
    assert all(word in stages.TOKENS for prompt in launch.prompts for word in prompt)
    assert len({tuple(prompt) for prompt in launch.prompts}) == len(launch.prompts)
    assert all(body["max_tokens"] == 1 and body["ignore_eos"] for body in launch.bodies)


def test_a_p_that_does_not_follow_ends_the_measurement(launch):
    launch.follows = False

    with pytest.raises(StageError, match="in mode"):
        launch.ask(Turns((8,), MODES, {1: 1}))


def test_prompts_of_another_length_than_asked_are_no_measurement(launch):
    launch.counted = 1

    with pytest.raises(StageError, match="8 tokens sent, 9 counted"):
        launch.ask(Turns((8,), MODES, {1: 1}))


def test_transfers_without_stamps_are_said_to_lack_them(launch, monkeypatch):
    read = read_stamps
    monkeypatch.setattr(stages, "read_stamps", lambda folder: [one for one in read(folder) if one.event != "kv_done"])

    with pytest.raises(StageError, match="2 of 2 transfers lack stamps"):
        launch.ask(Turns((8,), MODES, {1: 1}))


def test_out_of_time_a_case_has_its_least_rounds_all_the_same(launch, capsys):
    rows = launch.ask(Turns((8,), MODES, {1: 5}, budget_s=0.0))

    assert len(rows) == LEAST_ROUNDS * len(MODES)
    assert "2 rounds instead of 5" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "groups"), [("bulk", (4, 4)), ("fixed:4", (3, 5)), ("layerwise", (1, 1, 6))])
def test_a_p_that_packs_otherwise_than_the_mode_says_is_no_measurement(mode, groups):
    with pytest.raises(StageError, match=f"layers in mode {mode}"):
        check_mode(mode, transfer(groups))


def test_a_prompt_in_two_steps_has_the_groups_of_the_mode_twice():
    once = transfer((4, 4))
    twice = dataclasses.replace(once, packets=once.packets * 2)

    check_mode("fixed:4", twice)
    with pytest.raises(StageError):
        check_mode("bulk", twice)
