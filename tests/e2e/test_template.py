"""Real stages that are forked: what they are, what they still import, and every process of theirs killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy import processes
from tests.e2e.bodies import Body, ask, fresh
from tests.e2e.serving import Serving, serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
BACK_S = 120.0
WORKERS = ("VllmWorker-0", "VllmWorker-1")
_IMPORT = re.compile(r"^import time: +\d+ \| +\d+ \|\s+([\w.]+)$", re.MULTILINE)


@pytest.fixture(scope="module", params=["TP1", "TP2"])
def forked(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A monolith in whose log Python writes what is imported after the fork; its ranks are processes if it has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with serving(request.param) as launch:
            yield launch


def members(launch: Serving) -> dict[str, int]:
    """vLLM's processes of the stage by name: two, and with two ranks four."""
    named = {one.name: one.pid for one in processes.group_members(launch.stage_pid("EPD0"))}
    found = {name: named[name] for name in ("API server", "EngineCore", *WORKERS) if name in named}
    assert len(found) == {"TP1": 2, "TP2": 4}[launch.layout]
    return found


def test_a_stage_is_forks_of_one_root_that_answer_like_plain_vllm(forked: Serving, solo_answer: Solo) -> None:
    root = forked.stage_pid("EPD0")
    assert {psutil.Process(pid).ppid() for pid in members(forked).values()} == {root}
    assert len(os.listdir(f"/proc/{forked.template_pid}/task")) == 1
    body = fresh(420)
    assert ask(forked, body) == solo_answer(body)


def test_a_stage_imports_next_to_nothing_after_the_fork(forked: Serving) -> None:
    """Each of its processes would import some six thousand modules."""
    after = _IMPORT.findall(forked.stage_log("EPD0"))
    before = _IMPORT.findall((forked.run / "template.log").read_text())
    assert len(before) > 3000
    assert len(after) < 150 * len(members(forked)), after


@pytest.mark.parametrize("killed", ["API server", "EngineCore", WORKERS[0], "root"])
def test_a_stage_of_which_any_process_is_killed_is_back_and_has_left_nothing(forked: Serving, killed: str) -> None:
    root, incarnation = forked.stage_pid("EPD0"), forked.instances()["EPD0"]["incarnation"]
    before = set(forked.shared_memory())
    if forked.layout == "TP1" and killed in WORKERS:
        pytest.skip("the single rank is a part of EngineCore")
    os.kill((members(forked) | {"root": root})[killed], signal.SIGKILL)
    wait_for(lambda: forked.instances()["EPD0"]["incarnation"] != incarnation, "another life", 30)
    assert not processes.group_members(root)
    wait_for(forked.healthy, "the stage to be back", BACK_S)
    assert forked.answers(fresh(421))
    after = set(forked.shared_memory())
    assert not {path for path in before & after if "-stage-" in path.name}
    assert len(after) == len(before)


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
