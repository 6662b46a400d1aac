"""A keeper as a process: its parts come again, what they had started goes on, and in the end nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.host import processes
from tests.waiting import until

SCRIPT = str(Path(__file__).with_name("kept.py"))
REPOSITORY = str(Path(__file__).parents[3])
ASKED = "await asyncio.wait([asyncio.ensure_future({})], timeout=0.01)"
"""A call is made, and not waited for."""

MARK = "EPD_TEST_KEEPER"
SLEEP = "await keeper.spawn({name!r}, ('/bin/sleep', '600'), dict(os.environ), output=2, tag={tag!r})"


@dataclass
class Told:
    """One life of a part, at the other end of its socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0

    async def do(self, code: str) -> Any:
        """The value of an expression in that process; raises AssertionError with what it raised there."""
        answer = await self.try_(code)
        assert "error" not in answer, answer
        return answer["value"]

    async def try_(self, code: str) -> dict[str, Any]:
        self.ask(code)
        return dict(json.loads(await asyncio.wait_for(self.reader.readline(), 30)))

    def ask(self, code: str) -> None:
        self.writer.write(json.dumps(code).encode() + b"\n")

    async def sleeper(self, name: str, tag: bytes = b"") -> int:
        """Pid of a process that it has had started."""
        await self.do(f"({SLEEP.format(name=name, tag=tag)}).pid")
        return int(await self.do(f"[one.pid for one in await keeper.entries() if one.name == {name!r}][0]"))


@dataclass
class Kept:
    folder: Path
    process: subprocess.Popen[bytes]
    lives: dict[str, asyncio.Queue[Told]] = field(default_factory=dict)

    async def life(self, name: str) -> Told:
        """The next life of a part."""
        told = await asyncio.wait_for(self.lives[name].get(), 30)
        told.pid = int(await told.do("os.getpid()"))
        return told

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def descriptors(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextlib.asynccontextmanager
async def keeping(folder: Path, *settings: str) -> AsyncIterator[Kept]:
    lives: dict[str, asyncio.Queue[Told]] = {"controller": asyncio.Queue(), "agent": asyncio.Queue()}

    def accept(name: str) -> Any:
        return lambda reader, writer: lives[name].put_nowait(Told(reader, writer))

    servers = [await asyncio.start_unix_server(accept(name), folder / f"{name}.sock", limit=1 << 24) for name in lives]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(folder), *settings],
        stderr=(folder / "said").open("wb"),
        env={**os.environ, "PYTHONPATH": REPOSITORY, MARK: str(folder)},
    )
    try:
        yield Kept(folder, process, lives)
    finally:
        process.kill()
        process.wait()
        for left in processes.running():
            if processes.has_environment(left.pid, MARK, str(folder)):
                processes.signal_process(left.pid, signal.SIGKILL)
        for server in servers:
            server.close()


def runs(pid: int) -> bool:
    found = processes.stat(pid)
    return found is not None and not found.dead


async def test_a_part_that_dies_comes_again_and_finds_what_it_had_started(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        stage = await agent.sleeper("E0", b"record")
        os.kill(agent.pid, signal.SIGKILL)
        second = await kept.life("agent")
        assert second.pid != agent.pid and runs(stage)
        entries = await second.do("[(one.name, one.tag, one.pid, one.code) for one in await keeper.entries()]")
        assert entries == [["E0", "b'record'", stage, None]]
        os.kill(stage, signal.SIGKILL)
        assert await second.do("await [one.child for one in await keeper.entries()][0].exited()") == -signal.SIGKILL


async def test_an_end_that_no_part_was_there_for_is_told_to_the_next(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        stage = await agent.sleeper("E0")
        os.kill(kept.process.pid, signal.SIGSTOP)
        os.kill(agent.pid, signal.SIGKILL)
        os.kill(stage, signal.SIGTERM)
        os.kill(kept.process.pid, signal.SIGCONT)
        second = await kept.life("agent")
        entries = "[(one.pid, one.code, one.child.poll()) for one in await keeper.entries()]"
        assert await second.do(entries) == [[stage, -signal.SIGTERM, -signal.SIGTERM]]


async def test_a_child_has_no_descriptor_but_those_that_it_was_given(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        for name in ("E0", "E1"):
            pid = await agent.sleeper(name)
            await until(lambda pid=pid: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])  # once it is loaded


async def test_requests_in_a_burst_are_all_answered(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        burst = "len(await asyncio.gather(*(keeper.note(str(n), bytes(10_000)) for n in range(500))))"
        assert await agent.do(burst) == 500


async def test_a_hundred_children_have_a_hundred_ends(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        one = "keeper.spawn(str(n), ('/bin/sh', '-c', f'exit {n}'), dict(os.environ), output=2)"
        assert await agent.do(f"[await (await {one}).exited() for n in range(50)]") == list(range(50))
        children = await agent.do(f"[await child.exited() for child in [await {one} for n in range(50, 100)]]")
        assert children == list(range(50, 100))


async def test_what_a_dead_part_had_asked_for_and_nobody_had_read_is_not_done(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        os.kill(kept.process.pid, signal.SIGSTOP)
        await agent.do(ASKED.format(SLEEP.format(name="E0", tag=b"").removeprefix("await ")))
        os.kill(agent.pid, signal.SIGKILL)
        await until(lambda: not runs(agent.pid))
        os.kill(kept.process.pid, signal.SIGCONT)
        assert await (await kept.life("agent")).do("await keeper.entries()") == []


async def test_parts_that_are_killed_in_the_middle_of_a_question_end_nothing_else(tmp_path: Path) -> None:
    async with keeping(tmp_path, "BACKOFF_MAX_S=0.02") as kept:
        controller = await kept.life("controller")
        for life in range(10):
            agent = await kept.life("agent")
            if life == 0:
                await agent.do("await keeper.ready()")
            agent.ask(f"[{ASKED.format('keeper.entries()')} for _ in range(1000)]")
            os.kill(agent.pid, signal.SIGKILL)
        await kept.life("agent")
        assert await controller.do("[one.restarts for one in await keeper.parts()]") == [0, 10]


async def test_parts_are_told_each_of_its_own(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent, controller = await kept.life("agent"), await kept.life("controller")
        await agent.sleeper("E0")
        await controller.sleeper("front.0")
        for part, name in ((agent, "E0"), (controller, "front.0")):
            assert await part.do("[one.name for one in await keeper.entries()]") == [name]
        refused = await agent.try_("await keeper.over(0)")
        assert refused["error"] == "ValueError" and kept.process.poll() is None


async def test_a_megabyte_of_environment_and_of_tags_is_taken(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        env = "{str(n): 'x' * 1000 for n in range(1000)}"
        child = f"await keeper.spawn('E0', ('/bin/sh', '-c', 'exit 3'), {env}, output=2, tag=bytes(1 << 20))"
        assert await agent.do(f"await ({child}).exited()") == 3
        assert await agent.do("[len(one.tag) for one in await keeper.entries()]") == [1 << 20]


async def test_errors_are_those_of_a_keeper_in_process(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        await agent.sleeper("E0")
        spawn = "await keeper.spawn({!r}, ('/nowhere/x',), {{}}, output=2)"
        before = kept.descriptors()
        for code, error in (
            (spawn.format("E1"), "FileNotFoundError"),
            (spawn.format("E0"), "ValueError"),
            ("await keeper.forget('E0')", "ValueError"),
            ("await keeper.adopt('E1', 1)", "ProcessLookupError"),
            (f"await keeper.adopt('E1', {os.getpid()})", "ProcessLookupError"),
            ("await keeper.adopt('E1', os.getpid())", "ValueError"),
        ):
            assert (await agent.try_(code))["error"] == error, code
        assert kept.descriptors() == before


async def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        os.kill(kept.process.pid, signal.SIGSTOP)
        await agent.do(ASKED.format(SLEEP.format(name="E0", tag=b"").removeprefix("await ")))
        gone = "[task.cancel() for task in asyncio.all_tasks() if 'spawn' in repr(task)]"
        assert await agent.do(gone) == [True]
        os.kill(kept.process.pid, signal.SIGCONT)
        await until(lambda: _ended(agent))


async def _ended(part: Told) -> bool:
    return bool(await part.do("[one.code for one in await keeper.entries()]") == [-signal.SIGKILL])


async def test_signals_are_told_in_order_and_again_to_another_life(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        controller = await kept.life("controller")
        kept.process.send_signal(signal.SIGTERM)
        await until(lambda: _heard(controller, [signal.SIGTERM]))
        kept.process.send_signal(signal.SIGHUP)
        await until(lambda: _heard(controller, [signal.SIGTERM, signal.SIGHUP]))
        os.kill(controller.pid, signal.SIGKILL)
        controller = await kept.life("controller")
        await until(lambda: _heard(controller, [signal.SIGTERM, signal.SIGHUP]))
        assert not await (await kept.life("agent")).do("heard")


async def _heard(part: Told, numbers: list[int]) -> bool:
    return bool(await part.do("heard") == numbers)


async def test_over_ends_every_part_and_the_keeper_with_that_code(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        controller, agent = await kept.life("controller"), await kept.life("agent")
        controller.ask("await keeper.over(7)")
        assert await kept.ended() == 7
        assert not runs(controller.pid) and not runs(agent.pid)
        assert (tmp_path / "undone").exists()


@pytest.mark.parametrize(
    ("sent", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT] * 2, 130), ([signal.SIGTERM, *[signal.SIGINT] * 3], 130)],
)
async def test_a_controller_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, sent: list[signal.Signals], code: int
) -> None:
    quick = {1: "QUICK_S=0.2", 2: "QUICKER_S=0.1"}.get(len(sent), "KILL_TIMEOUT_S=5")
    async with keeping(tmp_path, quick) as kept:
        controller, agent = await kept.life("controller"), await kept.life("agent")
        os.kill(controller.pid, signal.SIGSTOP)
        for number in sent:
            kept.process.send_signal(number)
            await asyncio.sleep(0.02)
        assert await kept.ended() == code
        assert not runs(controller.pid) and not runs(agent.pid)


async def test_a_part_that_was_never_ready_is_tried_three_times(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        for _ in range(3):
            os.kill((await kept.life("agent")).pid, signal.SIGKILL)
        assert await kept.ended() == 1
        assert "never ready" in (tmp_path / "said").read_text()


async def test_a_part_that_was_ready_once_is_started_for_ever(tmp_path: Path) -> None:
    async with keeping(tmp_path, "BACKOFF_MAX_S=0.02") as kept:
        for life in range(6):
            agent = await kept.life("agent")
            if life == 0:
                await agent.do("await keeper.ready()")
            os.kill(agent.pid, signal.SIGKILL)
        assert (await kept.life("agent")).pid and kept.process.poll() is None


async def test_the_end_of_the_keeper_is_that_of_its_parts(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        parts = [(await kept.life(name)).pid for name in ("controller", "agent")]
        kept.process.kill()
        await until(lambda: not any(map(runs, parts)))


async def test_a_part_has_nothing_of_the_keepers(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        os.kill(agent.pid, signal.SIGKILL)
        again, controller = await kept.life("agent"), await kept.life("controller")
        for part in (again, controller):
            links = await part.do(
                "[os.readlink(f'/proc/self/fd/{one}') for one in os.listdir('/proc/self/fd') "
                "if os.path.lexists(f'/proc/self/fd/{one}')]"
            )
            assert not [link for link in links if link.endswith("held")]
            assert os.getpgid(part.pid) == part.pid == os.getsid(part.pid)
            theirs = {os.readlink(f"/proc/{kept.process.pid}/fd/{one}") for one in kept.descriptors()}
            assert not theirs & {link for link in links if link.startswith(("socket:", "pipe:"))} - _standard(part.pid)
            assert await part.do("str(signal.getsignal(signal.SIGTERM))") == str(signal.Handlers.SIG_DFL)
            assert await part.do("list(signal.pthread_sigmask(signal.SIG_BLOCK, []))") == []
        assert len(list(Path(f"/proc/{kept.process.pid}/task").iterdir())) == 1


def _standard(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{one}") for one in (0, 1, 2)}


async def test_a_part_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    async with keeping(tmp_path) as kept:
        agent = await kept.life("agent")
        pids = [await agent.sleeper(f"E{n}") for n in range(400)]
        os.kill(agent.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        second = await kept.life("agent")
        assert await second.do("sum(one.code is not None for one in await keeper.entries())") == 400


async def test_with_its_owner_everything_ends_at_once(tmp_path: Path) -> None:
    owner = subprocess.Popen(["/bin/sleep", "600"])
    try:
        async with keeping(tmp_path, f"owner={owner.pid}") as kept:
            parts = [await kept.life(name) for name in ("controller", "agent")]
            os.kill(parts[0].pid, signal.SIGSTOP)  # nobody is asked
            for part in parts[1:]:
                links = await part.do(
                    "[os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64) if os.path.lexists(f'/proc/self/fd/{n}')]"
                )
                assert not [link for link in links if "pidfd" in link]
            owner.kill()
            assert await kept.ended() == 130
            assert not any(runs(part.pid) for part in parts)
    finally:
        owner.kill()
        owner.wait()
    assert (tmp_path / "undone").exists()


async def test_it_is_said_once_when_all_parts_are_ready(tmp_path: Path) -> None:
    async with keeping(tmp_path, "BACKOFF_MAX_S=0.02") as kept:
        controller, agent = await kept.life("controller"), await kept.life("agent")
        await controller.do("await keeper.ready()")
        assert not (tmp_path / "begun").exists()
        await agent.do("await keeper.ready()")
        await until((tmp_path / "begun").exists)
        assert (tmp_path / "begun").read_text() == ""
        (tmp_path / "begun").unlink()
        os.kill(agent.pid, signal.SIGKILL)
        await (await kept.life("agent")).do("await keeper.ready()")
        assert not (tmp_path / "begun").exists()


async def test_a_part_that_others_can_do_without_is_given_up(tmp_path: Path) -> None:
    async with keeping(tmp_path, "vital=no") as kept:
        controller = await kept.life("controller")
        await controller.do("await keeper.ready()")
        for _ in range(3):
            os.kill((await kept.life("agent")).pid, signal.SIGKILL)
        begun = tmp_path / "begun"
        await until(lambda: begun.exists() and begun.read_text() == "agent")  # made first, written then
        assert await controller.do("[one.pid for one in await keeper.parts()]") == [controller.pid, None]
        assert kept.process.poll() is None and kept.lives["agent"].empty()
