"""Supervision with real processes: start, restart with back-off, turns, sickness, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from deploy.agent.stage_life import Noted, Record, Spawn, Start, executed
from deploy.agent.supervisor import StageEvents, StageSpec, Supervisor
from deploy.agent.waits import Patience
from deploy.host import processes
from deploy.host.children import Child, Children
from deploy.host.ports import free_ports
from deploy.host.spawned import NOT_BEGUN
from epd_serve.errors import ConfigError, StageError
from tests.deploy.rooted_here import RootHere, root_here
from tests.waiting import PATIENCE_S, until

FAKE_STAGE = str(Path(__file__).parents[1] / "fake_stage.py")
QUICK = Patience(poll_s=0.03, backoff_s=0.1, health_every_s=0.05, stop_grace_s=1.0, health_timeout_s=PATIENCE_S)


@pytest.fixture(autouse=True)
def root() -> Iterator[RootHere]:
    with root_here() as root:
        yield root


def started() -> Start:
    """Each supervisor has children of its own."""
    return executed(Children())


@dataclass
class Recorder(StageEvents):
    """Takes the events down."""

    lines: list[tuple[str, ...]] = field(default_factory=list)
    pids: dict[str, list[int]] = field(default_factory=dict)
    spawned_at: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Nobody goes on with these."""

    def before_spawn(self, stage: str) -> None:
        self.lines.append(("before", stage))

    def spawned(self, stage: str, pid: int) -> None:
        self.pids.setdefault(stage, []).append(pid)
        self.spawned_at.append(time.monotonic())

    def phase(self, stage: str, phase: str) -> None:
        self.lines.append(("phase", stage, phase))

    def up(self, stage: str) -> None:
        self.lines.append(("up", stage))

    def down(self, stage: str, reason: str, retry_in_s: float | None) -> None:
        self.lines.append(("down", stage, reason, "" if retry_in_s is None else f"{retry_in_s:g}"))

    def over(self, stage: str, reason: str) -> None:
        self.lines.append(("over", stage, reason))

    def of(self, kind: str) -> list[tuple[str, ...]]:
        return [line for line in self.lines if line[0] == kind]


def spec(folder: Path, name: str = "E0", *flags: str, turns: Sequence[str] = ()) -> StageSpec:
    port = free_ports(1)[0]
    argv = (sys.executable, FAKE_STAGE, str(port), *flags)
    url = f"http://127.0.0.1:{port}"
    return StageSpec(name, url, folder / f"{name}.log", lambda: Spawn(argv, os.environ), turns=turns)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor, *stages: StageSpec) -> AsyncIterator[None]:
    for stage in stages:
        supervisor.add(stage)
    try:
        yield
    finally:
        await supervisor.close()


async def all_answered(supervisor: Supervisor, *stages: StageSpec) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for stage in stages:
            await supervisor.answered(stage.id)


async def test_a_stage_is_up_when_it_answers_and_its_phases_are_told(tmp_path: Path) -> None:
    events = Recorder()
    async with running(Supervisor(events, QUICK, start=started()), spec(tmp_path)):
        await until(lambda: events.of("up"))
    assert [line[2] for line in events.of("phase")] == ["importing", "starting engine"]
    assert not processes.group_members(events.pids["E0"][0])


async def test_a_process_is_written_down_before_it_goes_on(tmp_path: Path) -> None:
    record, written, first_noted = Record(), list[int](), list[bool]()
    really_start = started()

    class Noting(Recorder):
        def note(self) -> None:
            written.append(record.pid)

    async def start(command: Spawn, log: BinaryIO, noted: Noted) -> Child:
        def told(child: Child) -> None:
            noted(child)
            first_noted.append(written[-1:] == [child.pid])

        return await really_start(command, log, told)

    events = Noting()
    supervisor = Supervisor(events, QUICK, start=start)
    async with running(supervisor):
        supervisor.add(spec(tmp_path), record)
        await until(lambda: events.of("up"))
    assert first_noted == [True]


async def test_a_killed_stage_is_reported_and_restarted_with_a_new_incarnation(tmp_path: Path) -> None:
    events, record = Recorder(), Record()
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor):
        supervisor.add(spec(tmp_path, "E0", "--child"), record)
        await until(lambda: events.of("up"))
        first, incarnation = events.pids["E0"][0], record.incarnation
        os.kill(first, signal.SIGKILL)
        await until(lambda: events.of("down"))
        await until(lambda: len(events.of("up")) == 2)
        assert not processes.group_members(first), "what the dead leader left is killed before the restart"
        assert record.incarnation != incarnation
    assert events.of("down")[0][2].startswith("killed by SIGKILL")


async def test_restarts_back_off_and_go_on(tmp_path: Path) -> None:
    events = Recorder()
    async with running(Supervisor(events, replace(QUICK, settled_s=3600.0), start=started()), spec(tmp_path)):
        for life in range(3):
            await until(lambda life=life: len(events.of("up")) > life)
            os.kill(events.pids["E0"][-1], signal.SIGKILL)
        await until(lambda: len(events.of("up")) == 4)
    assert [line[3] for line in events.of("down") if line[3]] == ["0.1", "0.2", "0.4"]


async def test_a_stage_that_was_healthy_for_long_is_restarted_at_once(tmp_path: Path) -> None:
    events = Recorder()
    async with running(Supervisor(events, replace(QUICK, settled_s=0.0), start=started()), spec(tmp_path)):
        for life in range(2):
            await until(lambda life=life: len(events.of("up")) > life)
            os.kill(events.pids["E0"][-1], signal.SIGKILL)
        await until(lambda: len(events.of("up")) == 3)
    assert [line[3] for line in events.of("down") if line[3]] == ["0", "0"]


async def test_a_first_start_that_fails_is_over_with_the_reason_and_concerns_no_other(tmp_path: Path) -> None:
    events = Recorder()
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, spec(tmp_path, "E0"), spec(tmp_path, "P0", "--fail", "bad dtype")):
        with pytest.raises(StageError, match="stage P0 did not start: ValueError: bad dtype") as failed:
            await asyncio.wait_for(supervisor.answered("P0"), PATIENCE_S)
        assert failed.value.stage == "P0"
        await asyncio.wait_for(supervisor.answered("E0"), PATIENCE_S)
        assert set(supervisor.groups()) == {"E0"}
    assert [line[1] for line in events.of("over")] == ["P0"] and not events.of("down")
    assert not processes.group_members(events.pids["E0"][0])


async def test_a_start_beyond_its_deadline_is_a_failure(tmp_path: Path) -> None:
    supervisor = Supervisor(Recorder(), replace(QUICK, start_s=0.5), start=started())
    async with running(supervisor, spec(tmp_path, "E0", "--delay", "60")):
        with pytest.raises(StageError, match="not ready within"):
            await asyncio.wait_for(supervisor.answered("E0"), PATIENCE_S)


async def test_an_executable_that_is_missing_is_a_failure_with_its_name(tmp_path: Path) -> None:
    missing = replace(spec(tmp_path), command=lambda: Spawn(("/no/such/python",), {}))
    supervisor = Supervisor(Recorder(), QUICK, start=started())
    async with running(supervisor, missing):
        with pytest.raises(StageError, match="/no/such/python"):
            await asyncio.wait_for(supervisor.answered("E0"), PATIENCE_S)


async def test_what_cannot_be_prepared_is_not_started(tmp_path: Path) -> None:
    async def no_room() -> None:
        raise ConfigError("arena: no room")

    events, stage = Recorder(), replace(spec(tmp_path), prepare=no_room)
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, stage):
        with pytest.raises(StageError, match="cannot be started: arena: no room"):
            await asyncio.wait_for(supervisor.answered("E0"), PATIENCE_S)
    assert not events.pids


async def test_a_stage_is_added_and_removed_beside_others(tmp_path: Path) -> None:
    events = Recorder()
    supervisor, one, other = (
        Supervisor(events, QUICK, start=started()),
        spec(tmp_path, "E0"),
        spec(tmp_path, "E1", "--child"),
    )
    async with running(supervisor, one):
        await all_answered(supervisor, one)
        supervisor.add(other)
        await all_answered(supervisor, other)
        await asyncio.gather(supervisor.remove("E1", 1.0), supervisor.remove("E1", 1.0))
        assert not processes.group_members(events.pids["E1"][0])
        assert set(supervisor.groups()) == {"E0"}
        await supervisor.remove("E1", 1.0)
        supervisor.add(other)
        await all_answered(supervisor, other)
    assert len(events.pids["E0"]) == 1 and len(events.pids["E1"]) == 2 and not events.of("down")


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    supervisor, stage = (
        Supervisor(Recorder(), QUICK, start=started()),
        spec(tmp_path, "E0", "--ignore-term"),
    )
    async with running(supervisor, stage):
        await all_answered(supervisor, stage)
        pid = supervisor.groups()["E0"]
        await asyncio.wait_for(supervisor.remove("E0", 0.2), PATIENCE_S)
        assert not processes.group_members(pid)


async def test_a_start_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    events, stage = Recorder(), spec(tmp_path, "E0", "--delay", "600", "--child")
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, stage):
        await until(lambda: events.of("phase"))
        waiting = asyncio.create_task(supervisor.answered("E0"))
        await asyncio.sleep(0)
        await supervisor.remove("E0", 1.0)
        with pytest.raises(StageError, match="was ended"):
            await waiting
    assert not processes.group_members(events.pids["E0"][0])


async def test_a_retired_stage_is_not_started_again_unless_it_is_taken_back(tmp_path: Path) -> None:
    events, one, other = Recorder(), spec(tmp_path, "P0"), spec(tmp_path, "P1")
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, one, other):
        await all_answered(supervisor, one, other)
        supervisor.retire("P0")
        supervisor.retire("P1")
        supervisor.retire("P1", False)
        for name in ("P0", "P1"):
            os.kill(events.pids[name][0], signal.SIGKILL)
        await until(lambda: events.of("over") and len(events.of("up")) == 3)
        assert [line[1] for line in events.of("over")] == ["P0"]
        assert events.of("over")[0][2].startswith("killed by SIGKILL")
        supervisor.add(one)
        await until(lambda: len(events.pids["P0"]) == 2)


async def test_a_stage_that_turns_sick_is_restarted(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    events = Recorder()
    async with running(Supervisor(events, QUICK, start=started()), spec(tmp_path, "E0", "--unhealthy-file", str(sick))):
        await until(lambda: events.of("up"))
        sick.touch()
        await until(lambda: events.of("down"))
        sick.unlink()
        await until(lambda: len(events.of("up")) == 2)
    assert events.of("down")[0][2] == "unhealthy: /health answers 503"


async def test_stages_of_one_turn_start_one_after_the_other(tmp_path: Path) -> None:
    events = Recorder()
    stages = [spec(tmp_path, name, "--delay", "0.3", turns=turns) for name, turns in (("E0", "01"), ("P0", "1"))]
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, *stages):
        await all_answered(supervisor, *stages)
    kinds = [(line[0], line[1]) for line in events.lines if line[0] != "phase"]
    assert kinds == [("before", "E0"), ("up", "E0"), ("before", "P0"), ("up", "P0")]


async def test_parallel_starts_are_limited(tmp_path: Path) -> None:
    events = Recorder()
    stages = [spec(tmp_path, name, "--delay", "0.3") for name in ("E0", "P0", "D0")]
    supervisor = Supervisor(events, QUICK, start=started(), parallel_starts=2)
    async with running(supervisor, *stages):
        await all_answered(supervisor, *stages)
    first_up = next(at for at, line in enumerate(events.lines) if line[0] == "up")
    assert [line[1] for line in events.lines[:first_up] if line[0] == "before"] == ["E0", "P0"]


async def test_a_command_that_cannot_be_made_any_more_is_tried_again(tmp_path: Path) -> None:
    """A program that is uninstalled (and installed again) under a running launch."""
    one, events, there = spec(tmp_path), Recorder(), True

    def command() -> Spawn:
        if not there:
            raise ConfigError("mooncake_master is not on PATH")
        return one.command()

    async with running(Supervisor(events, QUICK, start=started()), replace(one, command=command)):
        await until(lambda: events.of("up"))
        there = False
        os.kill(events.pids["E0"][0], signal.SIGKILL)
        await until(lambda: any("not on PATH" in line[2] for line in events.of("down")))
        there = True
        await until(lambda: len(events.of("up")) == 2)


@pytest.mark.parametrize(("method", "lives"), [("up", 3), ("down", 2)])
async def test_whoever_listens_and_fails_costs_a_life_and_not_the_launch(
    tmp_path: Path, method: str, lives: int
) -> None:
    events = Recorder()
    told, fails = getattr(events, method), [False, True]  # the second word of this kind

    def broken(*words: object) -> None:
        if fails and fails.pop(0):
            raise KeyError("oops")
        told(*words)

    setattr(events, method, broken)
    supervisor, stage = Supervisor(events, QUICK, start=started()), spec(tmp_path)
    async with running(supervisor, stage):
        await all_answered(supervisor, stage)
        os.kill(events.pids["E0"][0], signal.SIGKILL)
        await until(lambda: not fails and len(events.pids["E0"]) >= lives)


async def test_a_life_that_was_never_told_to_go_is_begun_again_without_being_counted(
    tmp_path: Path, root: RootHere
) -> None:
    """Whoever had begun it was killed in between; a first start that ends so has not failed."""
    events, stage = Recorder(), spec(tmp_path)

    def killed(child: Child) -> None:
        raise OSError("here it ends")

    with pytest.raises(OSError, match="here it ends"):
        await root.children.spawn(stage.command().argv, os.environ, output=2, noted=killed)
    (process,) = root.children.known
    assert await asyncio.wait_for(process.exited(), PATIENCE_S) == NOT_BEGUN
    stage.log_path.touch()
    record = Record(incarnation="first", pid=process.pid, born_ticks=process.born_ticks, began_at=1.0, lives=1)
    supervisor = Supervisor(events, QUICK, start=started())
    supervisor.add(stage, record, process)
    try:
        await all_answered(supervisor, stage)
        assert record.lives == 1 and record.incarnation != "first"
        assert not events.of("down") and not events.of("over") and len(events.pids["E0"]) == 1
    finally:
        await supervisor.close()


async def test_a_stage_that_ends_with_the_code_of_one_that_was_not_told_has_failed(tmp_path: Path) -> None:
    """If it has been told: it is its own code then."""
    events = Recorder()
    stage = replace(spec(tmp_path), command=lambda: Spawn(("/bin/sh", "-c", f"exit {NOT_BEGUN}"), os.environ))
    supervisor = Supervisor(events, QUICK, start=started())
    async with running(supervisor, stage):
        with pytest.raises(StageError, match=f"exited with code {NOT_BEGUN}"):
            await asyncio.wait_for(supervisor.answered("E0"), PATIENCE_S)
    assert len(events.pids["E0"]) == 1


async def test_first_starts_that_a_signal_ends_are_tried_again_as_often_as_patience_says(tmp_path: Path) -> None:
    events, patience = Recorder(), replace(QUICK, first_starts=3)
    stage = replace(spec(tmp_path), command=lambda: Spawn(("/bin/sh", "-c", "kill -9 $$"), os.environ))
    async with running(Supervisor(events, patience, start=started()), stage):
        await until(lambda: events.of("over"))
    assert len(events.pids["E0"]) == 3 and "killed by SIGKILL" in events.of("over")[0][2]
    events = Recorder()
    stage = replace(stage, command=lambda: Spawn(("/bin/sh", "-c", "exit 3"), os.environ))
    async with running(Supervisor(events, patience, start=started()), stage):
        await until(lambda: events.of("over"))
    assert len(events.pids["E0"]) == 1, "one that fails by itself would again"


async def test_short_lives_in_a_row_are_enough_where_patience_says_so(tmp_path: Path) -> None:
    events = Recorder()
    patience = replace(QUICK, settled_s=3600.0, short_lives=3)
    async with running(Supervisor(events, patience, start=started()), spec(tmp_path)):
        for life in range(3):
            await until(lambda life=life: len(events.of("up")) > life)
            os.kill(events.pids["E0"][-1], signal.SIGKILL)
        await until(lambda: events.of("over"))
    assert len(events.pids["E0"]) == 3


async def test_a_stage_may_say_otherwise_how_it_is(tmp_path: Path) -> None:
    answers: dict[str, int | None] = {"now": None}

    async def health(url: str, timeout_s: float) -> int | None:
        assert url == "anywhere" and timeout_s == QUICK.health_timeout_s
        return answers["now"]

    events = Recorder()
    command = Spawn(("/bin/sleep", "600"), os.environ)
    stage = StageSpec("E0", "anywhere", tmp_path / "E0.log", lambda: command, health=health)
    async with running(Supervisor(events, QUICK, start=started()), stage):
        await until(lambda: events.of("phase"))
        assert not events.of("up")
        answers["now"] = 200
        await until(lambda: events.of("up"))
        answers["now"] = 503
        await until(lambda: events.of("down"))
