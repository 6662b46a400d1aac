"""A root as a process: control comes again, what it had started goes on, and in the end nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.host import processes
from deploy.host.spawned import NOT_BEGUN
from tests.waiting import until

SCRIPT = str(Path(__file__).with_name("controlled.py"))
REPOSITORY = str(Path(__file__).parents[3])
MARK = "EPD_TEST_ROOT"
QUICK = "BACKOFF_MAX_S=0.02"


@dataclass
class Told:
    """One life of control, at the other end of its socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0

    async def do(self, code: str) -> Any:
        """The value of an expression in that process; raises AssertionError with what it raised there."""
        self.ask(code)
        answer = json.loads(await asyncio.wait_for(self.reader.readline(), 30))
        assert "error" not in answer, answer
        return answer["value"]

    def ask(self, code: str) -> None:
        self.writer.write(json.dumps(code).encode() + b"\n")

    async def sleeper(self, name: str = "E0") -> int:
        """Pid of a process that it has started and written down."""
        return int(await self.do(f"sleeper({name!r})"))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@dataclass
class Rooted:
    folder: Path
    process: subprocess.Popen[bytes]
    lives: asyncio.Queue[Told]

    async def life(self) -> Told:
        """The next life of control."""
        told = await asyncio.wait_for(self.lives.get(), 30)
        told.pid = int(await told.do("os.getpid()"))
        return told

    async def ready(self) -> Told:
        """The next life, which is ready."""
        told = await self.life()
        await told.do("life.state.write('ready', b'')")
        return told

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    @property
    def said(self) -> list[str]:
        return (self.folder / "said").read_text().splitlines()

    def did(self, name: str) -> bool:
        return (self.folder / name).exists()


@contextlib.asynccontextmanager
async def rooted(folder: Path, *settings: str, **options: Any) -> AsyncIterator[Rooted]:
    lives: asyncio.Queue[Told] = asyncio.Queue()
    server = await asyncio.start_unix_server(
        lambda reader, writer: lives.put_nowait(Told(reader, writer)), folder / "control.sock", limit=1 << 24
    )
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(folder), *settings],
        stderr=(folder / "said").open("wb"),
        env={**os.environ, "PYTHONPATH": REPOSITORY, MARK: str(folder)},
        **options,
    )
    try:
        yield Rooted(folder, process, lives)
    finally:
        process.kill()
        process.wait()
        for left in processes.running():
            if processes.has_environment(left.pid, MARK, str(folder)):
                processes.signal_process(left.pid, signal.SIGKILL)
        server.close()


def runs(pid: int) -> bool:
    found = processes.stat(pid)
    return found is not None and not found.dead


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- lives of control ---------------------------------------------------------------------------------------------


async def test_control_that_is_killed_comes_again_and_finds_what_it_had_started(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        first = await root.ready()
        stage = await first.sleeper()
        first.kill()
        second = await root.life()
        assert second.pid != first.pid and runs(stage) and parent(stage) == root.process.pid
        assert await second.do("[life.restarts, found('E0').pid, found('E0').poll()]") == [1, stage, None]
        os.kill(stage, signal.SIGKILL)
        assert await second.do("found('E0').exited()") == -signal.SIGKILL


async def test_an_end_that_no_life_was_there_for_is_told_with_its_code_to_the_next(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        first = await root.ready()
        stage = await first.sleeper()
        await first.do("sleeper('P0', argv=('/bin/sh', '-c', 'exit 3'))")
        os.kill(root.process.pid, signal.SIGSTOP)
        first.kill()
        os.kill(stage, signal.SIGTERM)
        os.kill(root.process.pid, signal.SIGCONT)
        second = await root.life()
        assert await second.do("[found('E0').poll(), found('P0').poll()]") == [-signal.SIGTERM, 3]
        second.kill()
        third = await root.life()
        assert await third.do("[found('E0').poll(), found('P0').poll()]") == [-signal.SIGTERM, 3]


async def test_a_hundred_children_have_a_hundred_ends(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        one = "children.spawn(('/bin/sh', '-c', f'exit {n}'), dict(os.environ), output=2)"
        assert await control.do(f"[await (await {one}).exited() for n in range(50)]") == list(range(50))
        ends = await control.do(f"[await child.exited() for child in [await {one} for n in range(50, 100)]]")
        assert ends == list(range(50, 100))


async def test_what_ends_while_control_does_not_listen_is_known_when_it_does(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        pids = await control.do("[await sleeper(f'E{n}') for n in range(100)]")
        os.kill(control.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(processes.stat(pid) for pid in pids), "all to be collected")
        os.kill(control.pid, signal.SIGCONT)
        ends = "[await asyncio.wait_for(found(f'E{n}').exited(), 10) for n in range(100)]"
        assert await control.do(ends) == [-signal.SIGKILL] * 100


async def test_one_that_was_noted_and_never_told_to_go_has_done_nothing(tmp_path: Path) -> None:
    did = tmp_path / "did"
    async with rooted(tmp_path, QUICK) as root:
        control = await root.ready()
        for when in ("lambda child: os.kill(os.getpid(), 9)", "fail"):
            control.ask(f"!sleeper('E0', {when}, ('/bin/touch', {str(did)!r}))")
            control = await root.life()
            assert await control.do("found('E0').exited()") == NOT_BEGUN
        assert not did.exists()


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(1)", "os._exit(70)", "os.abort()", "os._exit(131)"])
async def test_control_that_ends_without_a_word_has_crashed(tmp_path: Path, end: str) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        stage = await control.sleeper()
        control.ask(end)
        assert (await root.life()).pid != control.pid and runs(stage)
        assert root.process.poll() is None


@pytest.mark.parametrize(
    "raised", ["!fail()", "!asyncio.get_running_loop().run_in_executor(None, fail)", "!os.nothing"]
)
async def test_an_error_in_control_ends_it_and_not_what_it_has_started(tmp_path: Path, raised: str) -> None:
    """Also one that is raised in one of its tasks: nothing is unwound."""
    async with rooted(tmp_path) as root:
        control = await root.ready()
        stages = [await control.sleeper(name) for name in ("E0", "P0")]
        control.ask(raised)
        again = await root.life()
        assert all(map(runs, stages)) and not root.did("unwound")
        assert await again.do("[found(name).poll() for name in ('E0', 'P0')]") == [None, None]
        assert any("Traceback" in line for line in root.said)
        assert any("failed (exit code 70)" in line for line in root.said)


async def test_lives_that_are_short_are_further_and_further_apart(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        (await root.ready()).kill()
        for _ in range(3):
            (await root.life()).kill()
        await root.life()
        delays = [line.rpartition(" in ")[2] for line in root.said if "was killed by SIGKILL" in line]
        assert delays == ["0.0 s", "0.1 s", "0.2 s", "0.4 s"]


async def test_control_that_lived_for_long_is_followed_at_once(tmp_path: Path) -> None:
    async with rooted(tmp_path, "SETTLED_S=0") as root:
        (await root.ready()).kill()
        for _ in range(4):
            (await root.life()).kill()
        await root.life()
        assert {line.rpartition(" in ")[2] for line in root.said} == {"0.0 s"}


async def test_control_that_was_never_ready_is_tried_three_times(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        for _ in range(3):
            (await root.life()).kill()
        assert await root.ended() == 1
        assert "never ready" in root.said[-1] and root.did("undone")


async def test_control_that_was_ready_once_is_started_for_ever(tmp_path: Path) -> None:
    async with rooted(tmp_path, QUICK) as root:
        (await root.ready()).kill()
        for _ in range(6):
            (await root.life()).kill()
        assert (await root.life()).pid and root.process.poll() is None


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 130])
async def test_control_says_when_all_is_over_and_with_which_code(tmp_path: Path, code: int) -> None:
    async with rooted(tmp_path) as root:
        control = await root.life()
        stage = await control.sleeper()
        control.ask(f"end_now({code})")
        assert await root.ended() == code
        await until(lambda: not runs(stage))
        assert not runs(control.pid) and not root.did("unwound") and root.did("undone") and root.did("left")


async def test_control_that_returns_is_over(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.life()
        control.writer.close()
        assert await root.ended() == 0 and root.did("unwound")


async def test_signals_are_told_in_order_and_again_to_another_life(tmp_path: Path) -> None:
    async with rooted(tmp_path, "QUICK_S=60") as root:
        control = await root.ready()
        for number, heard in (
            (signal.SIGHUP, [signal.SIGHUP]),
            (signal.SIGTERM, [signal.SIGHUP, signal.SIGTERM]),
        ):
            root.process.send_signal(number)
            await until(lambda heard=heard: _heard(control, heard))
        control.kill()
        again = await root.life()
        await until(lambda: _heard(again, [signal.SIGHUP, signal.SIGTERM]))
        root.process.send_signal(signal.SIGTERM)
        await until(lambda: _heard(again, [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM]))


async def test_a_signal_between_two_lives_is_told_to_the_next_which_comes_at_once(tmp_path: Path) -> None:
    async with rooted(tmp_path, "BACKOFF_S=600", "BACKOFF_MAX_S=600", "QUICK_S=60") as root:
        (await root.ready()).kill()
        (await root.life()).kill()
        await until(lambda: any("600.0 s" in line for line in root.said))
        root.process.send_signal(signal.SIGINT)
        control = await root.life()
        await until(lambda: _heard(control, [signal.SIGINT]))


async def _heard(control: Told, numbers: list[int]) -> bool:
    return bool(await control.do("heard") == numbers)


@pytest.mark.parametrize(
    ("sent", "quick"),
    [
        ([signal.SIGINT], "QUICK_S=0.2"),
        ([signal.SIGHUP], "QUICK_S=0.2"),
        ([signal.SIGINT] * 2, "QUICKER_S=0.1"),
        ([signal.SIGTERM], "BEYOND_DRAIN_S=0.1"),
        ([signal.SIGTERM, signal.SIGINT], "QUICK_S=0.2"),
        ([signal.SIGTERM, *[signal.SIGINT] * 3], "KILL_TIMEOUT_S=5"),
    ],
)
async def test_control_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, sent: list[signal.Signals], quick: str
) -> None:
    async with rooted(tmp_path, quick) as root:
        control = await root.ready()
        stage = await control.sleeper()
        os.kill(control.pid, signal.SIGSTOP)
        for number in sent:
            root.process.send_signal(number)
            await asyncio.sleep(0.02)
        begun = time.monotonic()
        assert await root.ended() == 130
        assert time.monotonic() - begun < 5
        await until(lambda: not runs(control.pid) and not runs(stage))
        assert any("nobody has ended it in time" in line for line in root.said)


async def test_until_its_deadline_control_is_waited_for(tmp_path: Path) -> None:
    """A second signal brings it nearer, and SIGTERM after that does not put it off."""
    async with rooted(tmp_path, "QUICK_S=60", "QUICKER_S=0.5") as root:
        control = await root.ready()
        root.process.send_signal(signal.SIGINT)
        await until(lambda: _heard(control, [signal.SIGINT]))
        await asyncio.sleep(0.7)
        assert root.process.poll() is None
        begun = time.monotonic()
        root.process.send_signal(signal.SIGINT)
        await until(lambda: _heard(control, [signal.SIGINT] * 2))
        root.process.send_signal(signal.SIGTERM)
        assert await root.ended() == 130 and 0.4 < time.monotonic() - begun < 5


async def test_the_end_of_the_root_is_that_of_all(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        pids = [control.pid, await control.sleeper("E0"), await control.sleeper("P0")]
        root.process.kill()
        await until(lambda: not any(map(runs, pids)))


async def test_the_root_looks_whether_all_has_to_end(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        os.kill(control.pid, signal.SIGSTOP)  # nobody is asked
        (tmp_path / ".why").write_text("whom it belongs to has gone")
        (tmp_path / ".why").rename(tmp_path / "why")
        assert await root.ended() == 1
        assert root.said[-1] == "whom it belongs to has gone" and not runs(control.pid) and root.did("undone")


# --- what they are to the kernel ----------------------------------------------------------------------------------


async def test_a_child_has_no_descriptor_but_those_that_it_was_given(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # left open by whoever starts the root
    try:
        async with rooted(tmp_path, pass_fds=(reader, writer)) as root:
            control = await root.ready()
            for name in ("E0", "E1"):
                pid = await control.sleeper(name)
                await until(lambda pid=pid: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])
    finally:
        os.close(reader)
        os.close(writer)


async def test_control_has_nothing_that_is_the_roots(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        (await root.ready()).kill()
        control = await root.life()
        files = [os.readlink(f"/proc/{control.pid}/fd/{one}") for one in os.listdir(f"/proc/{control.pid}/fd")]
        assert not [one for one in files if one.endswith("held")]
        held = [os.readlink(f"/proc/{root.process.pid}/fd/{one}") for one in os.listdir(f"/proc/{root.process.pid}/fd")]
        assert [one for one in held if one.endswith("held")]
        pipes = [one for one in held if one.startswith("pipe:")]
        assert len(pipes) == 1, "one end of one pipe: that of the life before is closed"
        found = processes.stat(control.pid)
        assert found is not None and found.name == "epd control" and parent(control.pid) == root.process.pid
        assert os.getpgid(control.pid) == control.pid == os.getsid(control.pid)
        assert await control.do("str(signal.getsignal(signal.SIGTERM))") == str(signal.Handlers.SIG_DFL)
        assert await control.do("list(signal.pthread_sigmask(signal.SIG_BLOCK, []))") == []


async def test_control_takes_in_no_orphans_they_come_to_the_root(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        control = await root.ready()
        takes = "(lambda found: (ctypes.CDLL(None).prctl(37, ctypes.byref(found)), found.value))(ctypes.c_int(-1))"
        assert await control.do(takes) == [0, 0]
        assert parent(await control.sleeper()) == root.process.pid


async def test_the_root_has_one_thread(tmp_path: Path) -> None:
    async with rooted(tmp_path) as root:
        (await root.ready()).kill()
        await (await root.life()).sleeper()
        assert len(os.listdir(f"/proc/{root.process.pid}/task")) == 1


async def test_an_invoker_that_ignores_ends_of_children_changes_nothing(tmp_path: Path) -> None:
    async with rooted(tmp_path, "chld=ignored") as root:
        control = await root.ready()
        await control.do("sleeper('P0', argv=('/bin/sh', '-c', 'exit 3'))")
        assert await control.do("found('P0').exited()") == 3
        control.kill()
        control = await root.life()
        assert await control.do("found('P0').poll()") == 3
        control.ask("end_now(0)")
        assert await root.ended() == 0


async def test_the_terminal_is_the_roots_alone(tmp_path: Path) -> None:
    """Ctrl-C there is heard once, from the root; no process below it can read what is typed, or is stopped by it."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    try:
        options = {"start_new_session": True, "stdin": theirs, "preexec_fn": take_terminal, "pass_fds": (theirs,)}
        async with rooted(tmp_path, "QUICK_S=60", **options) as root:
            control = await root.ready()
            stage = await control.sleeper()
            terminals = [_terminal(pid) for pid in (root.process.pid, control.pid, stage)]
            assert terminals[0] != 0 and terminals[1:] == [0, 0]
            os.write(ours, b"\x03")
            await until(lambda: _heard(control, [signal.SIGINT]))
            assert runs(stage)
    finally:
        os.close(ours)
        os.close(theirs)


def _terminal(pid: int) -> int:
    """The number of its controlling terminal; 0: none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4])
