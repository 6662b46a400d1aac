"""Prefill up to the first image that is awaited, by vLLM's own scheduler: the one that is installed, 0.32 or 0.23."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_serve.engine.ec.partial_prefill import SpareBlocks, with_partial_prefill
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

ROOT = Path(__file__).resolve().parents[4]
WHOLE, TO_THE_SECOND, THE_REST = 115, 70, 45  # tokens: 20, an image of 40, 10, an image of 40, 5


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What each scenario of `partial_steps.py` saw. vLLM cannot be imported beside pytest's own environment."""
    site = str(ROOT / "epd_serve/engine/site")
    env = {**os.environ, "PYTHONPATH": site, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "tests.epd_serve.engine.ec.partial_steps"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("how", ["late", "late, whole images", "late, small steps"])
def test_what_comes_before_an_awaited_image_is_computed_meanwhile(seen: dict[str, Any], how: str) -> None:
    late = seen[how]
    before = [step["r"] for step in (*late["first"], *late["between"])]
    assert sum(before) == TO_THE_SECOND
    assert len(before) == (2 if how == "late, small steps" else 1)
    assert late["then"] == [{"r": THE_REST}]
    assert (late["loads"], late["encodes"]) == (["a", "b"], []), "nothing is loaded twice, nothing is encoded"
    assert late["held"] == 5, "blocks, while it waits"
    assert (late["ended"], late["blocks"]) == ({"r": "length"}, 0)


@pytest.mark.parametrize("why", ["seeded", "few blocks"])
def test_a_request_waits_for_all_its_images_where_it_may_not_begin(seen: dict[str, Any], why: str) -> None:
    assert (seen[why]["between"], seen[why]["then"]) == ([], [{"r": WHOLE}])


def test_nobody_waits_behind_a_request_that_waits_for_an_image(seen: dict[str, Any]) -> None:
    """Neither behind one that has begun, nor a second one, which may not, nor one that begins with its image."""
    assert seen["others go on"]["then"][-1] == {"text": 30}
    assert seen["others go on"]["ended"] == {"text": "length"}
    assert seen["others go on"]["blocks"] == 5, "of the first alone"


def test_an_image_that_a_prefix_cache_has_in_part_is_waited_for_and_holds_up_nobody(seen: dict[str, Any]) -> None:
    known = seen["known prefix"]
    assert known["meanwhile"] == [{"text": 30}]
    assert [list(step) for step in known["then"]] == [["r"]]
    assert (known["loads"], known["encodes"]) == (["a", "b", "b"], [])


def test_a_request_that_has_begun_and_must_not_recompute_fails_and_leaves_nothing(seen: dict[str, Any]) -> None:
    failed = seen["fails half-way"]
    if not failed:
        pytest.skip("this vLLM cannot be told to fail a request")
    assert failed["first"] == [{"r": TO_THE_SECOND}]
    assert (failed["ended"], failed["encodes"]) == ({"r": "error"}, [])
    assert (failed["blocks"], failed["left"]) == (0, 0)


def test_a_request_that_has_begun_encodes_what_is_lost_and_nothing_else(seen: dict[str, Any]) -> None:
    recomputed = seen["recomputed half-way"]
    assert (recomputed["first"], recomputed["then"]) == ([{"r": TO_THE_SECOND}], [{"r": THE_REST}])
    assert (recomputed["loads"], recomputed["encodes"]) == (["a"], ["b"])


def test_a_request_that_has_begun_makes_way_for_those_that_can_go_on(seen: dict[str, Any]) -> None:
    preempted = seen["preempted half-way"]
    assert preempted["first"]["r"] == TO_THE_SECOND
    assert preempted["preemptions"] >= 1
    assert preempted["ended"] == {"answer": "length", "other": "length", "r": "length"}
    assert preempted["encodes"] == []


def test_spare_blocks_leave_room_for_the_longest_request() -> None:
    spare = SpareBlocks.beside(100, blocks=10, block_sizes=(32,))
    assert spare.spare == 6
    assert (spare.fit(192), spare.fit(193)) == (True, False)
    assert not SpareBlocks.beside(100, blocks=4, block_sizes=(32,)).fit(1)


def test_spare_blocks_count_each_group_of_layers() -> None:
    spare = SpareBlocks.beside(64, blocks=20, block_sizes=(16, 32))
    assert spare.spare == 20 - 4 - 2
    assert (spare.fit(144), spare.fit(160)) == (True, False)
    assert spare.worth_tokens == 32


def test_a_stage_that_no_features_travel_to_starts_without_a_connector_for_them() -> None:
    class Scheduler:
        ec_connector = None

    made = with_partial_prefill(Scheduler)()
    made.allow_early_begins(StageWiring("P0", Role.P, "1"))
    assert not made.awaits_feature(object())
