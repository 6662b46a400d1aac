"""Stages forked from a template, with small processes in place of vLLM's: lives, deaths, and what takes the blame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.stage_life import Spawn, StageLife
from deploy.agent.template import Template
from deploy.host import children as host_children
from deploy.host import processes
from deploy.host.children import Child
from deploy.host.environment import shm_root
from deploy.host.spawned import NOT_BEGUN
from epd_serve.engine.argv import STAGE_ENV, STAGE_MODULE
from epd_serve.stage_plan import MEMORY_NAMES_ENV
from tests.deploy.rooted_here import ChildrenHere, RootHere, root_here
from tests.waiting import until

FAKE_TEMPLATE = str(Path(__file__).parents[2] / "epd_serve" / "engine" / "template" / "fake_template.py")
EVERYBODY = ("api", "core", "worker")


class Executing(ChildrenHere):
    """Knows whom it has executed."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: set[int] = set()

    async def spawn(self, *args: Any, **options: Any) -> Child:
        child = await super().spawn(*args, **options)
        self.executed.add(child.pid)
        return child


@dataclass
class Launch:
    """A launch that has nothing but a template and stages of it."""

    folder: Path
    template: Template
    root: RootHere
    children: Executing
    lines: list[str]
    lives: list[StageLife] = field(default_factory=list)
    memory_names: str = field(default_factory=lambda: f"epd-test-{os.urandom(4).hex()}-")

    async def stage(self, act: str, *more: str, **env: str) -> StageLife:
        """A life of a stage whose processes do what the flags say."""
        command = (sys.executable, "-m", STAGE_MODULE, act, str(self.folder), *more)
        environment = {**os.environ, STAGE_ENV: "P0", MEMORY_NAMES_ENV: self.memory_names, **env}
        path = self.folder / "P0.log"

        def noted(child: Child) -> None:
            self.lives.append(StageLife(child, path, 0))

        with path.open("ab") as log:
            await self.template.start(Spawn(command, environment), log, noted)
        return self.lives[-1]

    async def serving(self, *more: str, **env: str) -> StageLife:
        life = await self.stage("serve", *more, **env)
        await until(lambda: all((self.folder / name).exists() for name in (*EVERYBODY, "heard")))
        return life

    def was_forked(self, life: StageLife) -> bool:
        return life.pid not in self.children.executed

    def pid(self, name: str) -> int:
        return int(self.read(name).split()[0])

    def parent(self, name: str) -> int:
        return int(self.read(name).split()[1])

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    async def ended(self, life: StageLife) -> int:
        code = await asyncio.wait_for(life.exited(), 20)
        await until(lambda: not [name for name in EVERYBODY if self.runs(name)])
        return code

    def runs(self, name: str) -> bool:
        found = processes.stat(self.pid(name)) if (self.folder / name).exists() else None
        return found is not None and not found.dead

    @property
    def template_pid(self) -> int:
        return self.template.pid

    def another(self) -> Template:
        """Of an agent that goes on after the first one, and knows nothing but what is written down."""
        program, lines = (FAKE_TEMPLATE,), self.lines.append
        state, env = self.root.state(), self.template._env
        return Template(f"{self.folder}/model", env, self.folder, lines, self.children, state, program)


async def _never(*_: object, **__: object) -> Child:
    await asyncio.Event().wait()
    raise AssertionError


def _named(name: str) -> list[int]:
    return [one.pid for one in processes.running() if one.name == name and _parent(one.pid) == os.getpid()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.asynccontextmanager
async def launching(folder: Path, model: str = "") -> AsyncIterator[Launch]:
    lines: list[str] = []
    env = {name: value for name, value in os.environ.items() if name != STAGE_ENV}
    with root_here() as root:
        root.children = children = Executing()
        program = (FAKE_TEMPLATE,)
        template = Template(
            model or f"{folder}/model", env, folder, lines.append, children, root.state(), program=program
        )
        launch = Launch(folder, template, root, children, lines)
        async with template.running():
            try:
                yield launch
            finally:
                for life in launch.lives:
                    await life.stop(0)
                for left in shm_root().glob(f"*{launch.memory_names}*"):  # as a launch does: a killed group cannot
                    left.unlink()


async def test_a_stage_is_a_group_whose_root_forks_every_process(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        assert {launch.parent(name) for name in EVERYBODY} == {life.pid}
        members = {process.pid for process in processes.group_members(life.pid)}
        assert {life.pid, *map(launch.pid, EVERYBODY)} <= members
        assert launch.lines == []


async def test_how_the_api_server_ended_is_how_the_stage_ended(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        for code in (0, 2):
            assert await launch.ended(await launch.stage("exit", str(code))) == code


async def test_a_process_gets_descriptors_a_lock_and_the_environment_of_the_moment(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        await launch.serving("SETTING=later")
        assert launch.read("heard") == "later worker"


async def test_no_process_holds_a_descriptor_of_the_root_or_of_another(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        theirs = {os.readlink(f"/proc/{life.pid}/fd/{one}") for one in os.listdir(f"/proc/{life.pid}/fd")}
        requests = 2  # the pair by which processes ask for others
        for name in EVERYBODY:
            sockets = [one for one in launch.read(f"{name} descriptors").splitlines() if one.startswith("socket:")]
            assert len(set(sockets)) < requests, f"{name} holds what is the root's: {sockets}"
        assert len([one for one in theirs if one.startswith("socket:")]) == requests


@pytest.mark.parametrize("killed", ["api", "core", "worker", "root", "group"])
async def test_a_death_takes_those_along_that_it_concerns(tmp_path: Path, killed: str) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        if killed == "group":
            os.killpg(life.pid, signal.SIGKILL)
        else:
            os.kill(life.pid if killed == "root" else launch.pid(killed), signal.SIGKILL)
        if killed in ("api", "root", "group"):
            assert await launch.ended(life) == -signal.SIGKILL
        elif killed == "core":
            await until(lambda: (tmp_path / "core ended").exists() and not launch.runs("worker"))
            assert launch.read("core ended") == str(-signal.SIGKILL)
            assert life.exit_code is None and launch.runs("api"), "what the API server does about it is its own affair"
        else:
            await until(lambda: not launch.runs("worker"))
            assert life.exit_code is None and launch.runs("core")


async def test_sigterm_to_the_group_is_for_the_processes_and_the_root_tells_of_their_end(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        begun = time.monotonic()
        await life.stop(15.0)
        assert life.exit_code == -signal.SIGTERM
        assert not processes.group_members(life.pid)
        assert time.monotonic() - begun < 10


async def test_a_stages_root_is_the_child_of_the_launchs_root_and_leads_its_group(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        assert launch.was_forked(life) and _parent(life.pid) == launch.children.root
        assert os.getpgid(life.pid) == os.getsid(life.pid) == life.pid


async def test_a_root_does_nothing_before_it_is_noted(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        await until(lambda: launch.template._ready)
        noted: list[int] = []

        def note(child: Child) -> None:
            time.sleep(0.2)
            assert not (tmp_path / "api").exists() and child.poll() is None
            noted.append(child.pid)

        with (tmp_path / "P0.log").open("ab") as log:
            env = {**os.environ, STAGE_ENV: "P0", MEMORY_NAMES_ENV: launch.memory_names}
            spawn = Spawn((sys.executable, "-m", STAGE_MODULE, "exit", str(tmp_path), "0"), env)
            child = await launch.template.start(spawn, log, note)
        assert noted == [child.pid] and await asyncio.wait_for(child.exited(), 20) == 0
        assert (tmp_path / "api").exists()


async def test_a_root_that_is_not_told_to_go_ends_itself_and_has_done_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launching(tmp_path) as launch:
        await until(lambda: launch.template._ready)
        monkeypatch.setattr(host_children, "GO", b"no\n")
        life = await launch.stage("serve")
        assert launch.was_forked(life) and await asyncio.wait_for(life.exited(), 20) == NOT_BEGUN
        assert not (tmp_path / "api").exists()


@pytest.mark.parametrize("at", ["the pid", "the word to go"])
async def test_an_agent_that_goes_between_two_steps_of_a_fork_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whatever it had not come to is not done: its end closes the socket on which the root waits."""
    async with launching(tmp_path) as launch:
        await until(lambda: launch.template._ready)
        if at == "the pid":
            os.kill(launch.template_pid, signal.SIGSTOP)
        else:
            monkeypatch.setattr(launch.children, "begin", _never)
        starting = asyncio.create_task(launch.stage("serve"))
        if at == "the pid":
            await asyncio.sleep(0.05)  # the request is in its socket
        else:
            await until(lambda: _named("stage P0"))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        os.kill(launch.template_pid, signal.SIGCONT)
        await until(lambda: not _named("stage P0"))
        monkeypatch.undo()
        assert await launch.ended(await launch.stage("exit", "0")) == 0
        assert not (tmp_path / "core").exists()


async def test_a_root_that_comes_to_somebody_else_ends_itself(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        await until(lambda: launch.template._ready)
        launch.children.root = 1
        with (tmp_path / "P0.log").open("ab") as log:
            spawn = Spawn((sys.executable, "-m", STAGE_MODULE, "serve", str(tmp_path)), {STAGE_ENV: "P0"})
            with pytest.raises(EOFError):
                await launch.template._fork(spawn, log, lambda child: None)
        assert not (tmp_path / "api").exists()


async def test_another_agent_goes_on_with_the_template_and_its_stages(tmp_path: Path) -> None:
    """The first one is as good as dead: nobody asks it anything."""
    async with launching(tmp_path) as launch:
        life, first = await launch.serving(), launch.template_pid
        other = launch.another()
        async with other.running():
            launch.template = other
            again = await launch.stage("exit", "0")
            assert launch.was_forked(again) and await asyncio.wait_for(again.exited(), 20) == 0
            assert launch.template_pid == first and life.exit_code is None
            assert launch.lines == []


async def test_another_agent_waits_for_the_template_that_the_first_has_begun(tmp_path: Path) -> None:
    slow = tmp_path / "model.slow"
    slow.touch()
    async with launching(tmp_path) as launch:
        first = await until(lambda: launch.template_pid)
        other = launch.another()
        async with other.running():
            launch.template = other
            starting = asyncio.create_task(launch.stage("exit", "0"))
            await asyncio.sleep(0.2)
            assert not starting.done()
            slow.unlink()
            assert launch.was_forked(await starting) and launch.lines == []
            assert launch.template_pid == first


async def test_another_agent_starts_a_template_where_the_one_before_has_ended(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        assert launch.was_forked(await launch.stage("exit", "0"))
        state, first = launch.root.state(), launch.template_pid
    assert processes.stat(first) is None and state.read("template") is not None
    with root_here() as root:
        children, lines = Executing(), list[str]()
        root.children = children
        env = launch.template._env
        other = Template(f"{tmp_path}/model", env, tmp_path, lines.append, children, state, (FAKE_TEMPLATE,))
        async with other.running():
            await until(lambda: other._ready and other.pid not in (0, first))


async def test_a_template_that_dies_costs_no_stage_and_another_is_started(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        life = await launch.serving()
        first = launch.template_pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(launch.lines) == 1)
        assert life.exit_code is None and all(map(launch.runs, EVERYBODY))
        os.killpg(life.pid, signal.SIGKILL)
        assert await launch.ended(life) == -signal.SIGKILL
        again = await launch.stage("exit", "0")
        assert launch.was_forked(again) and launch.template_pid != first


async def test_a_template_that_does_not_answer_costs_one_life_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.agent.template.ANSWER_S", 0.5)
    async with launching(tmp_path) as launch:
        assert await launch.ended(await launch.stage("exit", "0")) == 0
        template = launch.template_pid
        os.kill(template, signal.SIGSTOP)
        life = await launch.stage("exit", "0")
        assert not launch.was_forked(life)
        await until(lambda: len(launch.lines) == 2)
        assert launch.was_forked(await launch.stage("exit", "0"))
        assert launch.template_pid != template


async def test_a_template_that_dies_with_a_request_costs_that_life_the_fork(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        assert await launch.ended(await launch.stage("exit", "0")) == 0
        template = launch.template_pid
        os.kill(template, signal.SIGSTOP)
        starting = asyncio.create_task(launch.stage("exit", "0"))
        await asyncio.sleep(0.05)  # the request is in its socket
        os.kill(template, signal.SIGKILL)
        assert not launch.was_forked(await starting)
        second = await launch.stage("exit", "0")
        assert launch.was_forked(second) and launch.template_pid != template, launch.lines


async def test_a_template_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        for death in range(1, 4):
            assert launch.was_forked(await launch.stage("exit", "0"))
            os.kill(launch.template_pid, signal.SIGKILL)
            await until(lambda death=death: len(launch.lines) >= death)
        assert not launch.was_forked(await launch.stage("exit", "0"))
        assert len(launch.lines) == 3 and "without a template: killed by SIGKILL" in launch.lines[-1]


@pytest.mark.parametrize(("doomed", "forked"), [(1, True), (2, True), (3, False)])
async def test_one_that_is_killed_before_it_is_ready_is_followed_by_another_some_times(
    tmp_path: Path, doomed: int, forked: bool
) -> None:
    (tmp_path / "model.doomed").write_text("killed\n" * doomed)
    async with launching(tmp_path) as launch:
        assert launch.was_forked(await launch.stage("exit", "0")) is forked
        assert len(launch.lines) == doomed
        assert any("without a template" in line for line in launch.lines) is not forked


async def test_a_template_that_cannot_be_says_why_and_stages_are_executed(tmp_path: Path) -> None:
    async with launching(tmp_path, model="broken") as launch:
        life = await launch.stage("exit", "0")
        assert not launch.was_forked(life)
        assert len(launch.lines) == 1 and "ImportError: no such model" in launch.lines[0]


async def test_a_stage_whose_environment_is_another_is_executed(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        launch.template._env = {**launch.template._env, "OMP_WAIT_POLICY": "PASSIVE"}
        life = await launch.stage("exit", "0")
        assert not launch.was_forked(life)
        assert "OMP_WAIT_POLICY" in launch.lines[0]


async def test_a_process_that_needs_other_libraries_is_spawned(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch:
        await launch.serving("KMP_BLOCKTIME=5")
        assert launch.parent("core") == launch.pid("api")
        assert launch.read("heard").endswith("worker")


async def test_what_is_no_stage_of_vllm_is_executed(tmp_path: Path) -> None:
    async with launching(tmp_path) as launch, asyncio.timeout(20):
        with (tmp_path / "E0.log").open("ab") as log:
            spawn = Spawn((sys.executable, "-c", "raise SystemExit(3)"), {})
            process = await launch.template.start(spawn, log, lambda child: None)
        await until(lambda: process.poll() == 3)
