"""Real stages that are forked: what they are, what they still import, and every process of theirs killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.host import processes
from tests.e2e.bodies import Body, ask, fresh
from tests.e2e.serving import Serving, serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
BACK_S = 120.0
_IMPORT = re.compile(r"^import time: +\d+ \| +\d+ \|\s+([\w.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def forked() -> Iterator[Serving]:
    """A monolith in whose log Python writes what is imported after the fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with serving("TP1") as launch:
            yield launch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Serving]:
    """A monolith of two ranks, each in a process of its own."""
    with serving("TP2") as launch:
        yield launch


def assert_forked(launch: Serving, names: set[str]) -> None:
    root = launch.stage_pid("EPD0")
    parents = {one.name: psutil.Process(one.pid).ppid() for one in processes.group_members(root)}
    assert {parents[name] for name in names} == {root}
    assert len(os.listdir(f"/proc/{launch.template_pid}/task")) == 1


def assert_back_after_kill(launch: Serving, killed: str) -> None:
    root, incarnation = launch.stage_pid("EPD0"), launch.instances()["EPD0"]["incarnation"]
    before = set(launch.shared_memory())
    members = {one.name: one.pid for one in processes.group_members(root)} | {"root": root}
    os.kill(members[killed], signal.SIGKILL)
    wait_for(lambda: launch.instances()["EPD0"]["incarnation"] != incarnation, "another life", 30)
    assert not processes.group_members(root)
    wait_for(launch.healthy, "the stage to be back", BACK_S)
    assert launch.answers(fresh(421))
    after = set(launch.shared_memory())
    assert not {path for path in before & after if "-stage-" in path.name}
    assert len(after) == len(before)


def test_a_stage_is_forks_of_one_root_that_answer_like_plain_vllm(forked: Serving, solo_answer: Solo) -> None:
    assert_forked(forked, {"API server", "EngineCore"})
    body = fresh(420)
    assert ask(forked, body) == solo_answer(body)


def test_a_stage_imports_next_to_nothing_after_the_fork(forked: Serving) -> None:
    """Each of its two processes would import some six thousand modules."""
    after = _IMPORT.findall(forked.stage_log("EPD0"))
    before = _IMPORT.findall((forked.run / "template.log").read_text())
    assert len(before) > 3000
    assert len(after) < 300, after


@pytest.mark.parametrize("killed", ["API server", "EngineCore", "root"])
def test_a_stage_of_which_any_process_is_killed_is_back_and_has_left_nothing(forked: Serving, killed: str) -> None:
    assert_back_after_kill(forked, killed)


def test_a_killed_template_costs_nobody_a_request_and_the_next_life_is_forked_again(forked: Serving) -> None:
    root, template = forked.stage_pid("EPD0"), forked.template_pid
    os.kill(template, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{template}").exists(), "the template to go", 10)
    assert forked.answers(fresh(422))
    os.kill(root, signal.SIGKILL)
    wait_for(lambda: forked.stage_pid("EPD0") != root, "another life", 60)
    wait_for(forked.healthy, "the stage to be back", BACK_S)
    assert forked.template_pid != template
    assert psutil.Process(forked.stage_pid("EPD0")).cmdline() == psutil.Process(forked.template_pid).cmdline()


def test_ranks_are_forks_too_that_wait_on_bells_and_answer_and_come_back_alike(
    ranks: Serving, solo_answer: Solo
) -> None:
    assert_forked(ranks, {"API server", "EngineCore", "VllmWorker-0", "VllmWorker-1"})
    assert any(path.is_file() and path.stat().st_size == 4 for path in ranks.run.iterdir()), "removed with the launch"
    body = fresh(420)
    assert ask(ranks, body) == solo_answer(body)
    assert_back_after_kill(ranks, "VllmWorker-0")
