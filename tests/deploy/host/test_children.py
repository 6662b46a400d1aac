"""Processes that outlive whoever has them started: begun, adopted, watched; here their root is the test's process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host import children as host_children
from deploy.host import processes, spawned
from deploy.host.children import EXIT, UNKNOWN_EXIT, Child, Children
from deploy.host.spawned import NOT_BEGUN
from tests.deploy.rooted_here import ChildrenHere, root_here
from tests.waiting import until

ENV = dict(os.environ)
NOBODY = 2**22 + 1
ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.close(1)
    time.sleep(60)
os._exit(0)
"""


@pytest.fixture
def children() -> Iterator[ChildrenHere]:
    with root_here() as root:
        yield root.children


async def shell(children: Children, code: str) -> Child:
    return await children.spawn(("/bin/sh", "-c", code), ENV, output=2)


async def ended(child: Child) -> int:
    return await asyncio.wait_for(child.exited(), 30)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def an_orphan() -> int:
    """Pid of one whose parent has ended."""
    pid = int(subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True).stdout)
    await until(lambda: parent(pid) == os.getpid())
    return pid


async def test_a_hundred_children_have_a_hundred_ends(children: ChildrenHere) -> None:
    begun = [await shell(children, f"exit {n}") for n in range(50)]
    begun += await asyncio.gather(*(shell(children, f"exit {n}") for n in range(50, 100)))
    assert [await ended(child) for child in begun] == list(range(100))
    assert len({child.pid for child in begun}) == 100


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_signal_is_told_as_minus_its_number(children: ChildrenHere, number: signal.Signals) -> None:
    child = await shell(children, "exec sleep 60")
    assert child.poll() is None
    os.kill(child.pid, number)
    assert await ended(child) == -number == child.poll()


async def test_other_children_of_this_process_are_left_to_those_who_started_them(children: ChildrenHere) -> None:
    others = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    assert await ended(await shell(children, "exit 3")) == 3
    assert others.wait() == 7


async def test_a_child_leads_a_session_and_has_what_it_was_given_alone(children: ChildrenHere, tmp_path: Path) -> None:
    code = """
import os, sys
print(os.getpid() == os.getpgid(0) == os.getsid(0), os.readlink("/proc/self/fd/0"))
os.write(3, b"third "), os.write(4, b"fourth")
print(sorted(int(one) for one in os.listdir("/proc/self/fd"))[:-1], file=sys.stderr)
"""
    log = tmp_path / "log"
    argv = (sys.executable, "-c", code)
    reader, writer = os.pipe()
    try:
        with log.open("ab") as file:
            # Numbers that cross: what is to be 4 lies on 3 in one of them, most likely.
            child = await children.spawn(argv, ENV, output=file.fileno(), passed=(writer, writer))
            assert await ended(child) == 0
        os.close(writer)
        assert os.read(reader, 100) == b"third fourth"
    finally:
        os.close(reader)
    said = log.read_text().splitlines()
    assert "True /dev/null" in said and "[0, 1, 2, 3, 4]" in said


async def test_a_child_heeds_the_signals_that_python_ignores(children: ChildrenHere, tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        argv = ("/bin/grep", "-E", "SigIgn|SigBlk", "/proc/self/status")
        assert await ended(await children.spawn(argv, ENV, output=log.fileno())) == 0
    blocked, ignored = (int(line.split()[1], 16) for line in (tmp_path / "log").read_text().splitlines())
    assert blocked == 0 and ignored % (1 << 31) == 0, "above that are the C library's own"


async def test_a_megabyte_of_environment_and_of_arguments_is_taken(children: ChildrenHere) -> None:
    env = {**ENV, **{f"N{n}": "x" * 1000 for n in range(1000)}}
    argv = ("/bin/sh", "-c", 'exit "$#"', *["y" * 10_000] * 4)
    assert await ended(await children.spawn(argv, env, output=2)) == 3


async def test_what_cannot_be_executed_says_so_and_leaves_nothing(children: ChildrenHere, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        await children.spawn(("/nowhere/python",), ENV, output=2)
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o700)
    with (tmp_path / "log").open("ab") as log:
        assert await ended(await children.spawn((str(text),), ENV, output=log.fileno())) == 127
    assert str(text) in (tmp_path / "log").read_text()
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_a_child_does_nothing_before_its_caller_knows_of_it(children: ChildrenHere, tmp_path: Path) -> None:
    did = tmp_path / "did"
    knew: list[Child] = []

    def noted(child: Child) -> None:
        time.sleep(0.2)
        assert not did.exists() and child.poll() is None and parent(child.pid) == os.getpid()
        knew.append(child)

    child = await children.spawn(("/bin/touch", str(did)), ENV, output=2, noted=noted)
    assert knew == [child] and await ended(child) == 0 and did.exists()


async def test_one_that_cannot_be_noted_is_not_begun(children: ChildrenHere, tmp_path: Path) -> None:
    def noted(child: Child) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await children.spawn(("/bin/touch", str(tmp_path / "did")), ENV, output=2, noted=noted)
    assert await ended(children.known[0]) == NOT_BEGUN and not (tmp_path / "did").exists()


async def test_a_start_that_is_given_up_leaves_no_process(children: ChildrenHere) -> None:
    """Whichever step it had come to."""
    for steps in range(12):
        starting = asyncio.create_task(shell(children, "exec sleep 987"))
        for _ in range(steps):
            await asyncio.sleep(0.004)
        starting.cancel()
        (result,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(result, Child):
            os.kill(result.pid, signal.SIGKILL)
    await until(lambda: not [one for one in processes.running() if ours(one.pid)])
    assert {await ended(child) for child in children.known} <= {NOT_BEGUN, -signal.SIGKILL}


def ours(pid: int) -> bool:
    """Whether it does what that start is for, or is about to."""
    try:
        return b"sleep 987" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_a_starter_that_never_says_a_word_is_not_waited_for(
    children: ChildrenHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(host_children, "SPAWN_S", 0.3)
    monkeypatch.setattr(host_children, "_SPAWNED", str(silent))
    with pytest.raises(OSError, match="has not begun within"):
        await shell(children, "exit 0")
    silent.write_text("raise SystemExit(1)")
    with pytest.raises(OSError, match="no process can be made"):
        await shell(children, "exit 0")


async def test_one_that_has_come_to_somebody_else_is_not_begun(children: ChildrenHere, tmp_path: Path) -> None:
    """It would not end with the deployment."""
    ours, theirs = socket.socketpair()
    quick = Path(spawned.__file__).read_text().replace("ORPHANED_S = 10.0", "ORPHANED_S = 0.2")
    (tmp_path / "spawned.py").write_text(quick)
    with ours, theirs:
        argv = (str(tmp_path / "spawned.py"), "1", str(theirs.fileno()), "/bin/touch", str(tmp_path / "did"))
        subprocess.run([sys.executable, "-I", "-S", *argv], pass_fds=[theirs.fileno()], check=True)
        theirs.close()
        assert await asyncio.to_thread(ours.recv, 1) == b"" and not (tmp_path / "did").exists()


async def test_an_orphan_is_adopted_and_its_end_is_known(children: ChildrenHere) -> None:
    pid = await an_orphan()
    child = children.adopt(pid)
    found = processes.stat(pid)
    assert found is not None and (child.pid, child.born_ticks, child.poll()) == (pid, found.start_ticks, None)
    os.kill(pid, signal.SIGKILL)
    assert await ended(child) == -signal.SIGKILL


async def test_one_that_has_ended_before_has_its_exit_code_at_once(children: ChildrenHere) -> None:
    pid = await an_orphan()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert children.adopt(pid).poll() == -signal.SIGKILL


async def test_whoever_has_the_pid_now_is_not_taken_for_the_one_that_had_it(children: ChildrenHere) -> None:
    other = await shell(children, "exec sleep 60")
    assert Children().adopt(other.pid, other.born_ticks + 1).poll() == UNKNOWN_EXIT
    assert Children().adopt(NOBODY, 1).poll() == UNKNOWN_EXIT
    assert other.poll() is None


async def test_ends_are_read_from_what_the_root_has_written(
    children: ChildrenHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last word may be on its way, and is waited for; a root that says nothing is not."""
    monkeypatch.setattr(host_children, "REAPED_S", 1.0)
    exits = os.memfd_create("exits")
    try:
        watching = Children(os.getpid(), exits)
        one, other = [await shell(children, "exec sleep 60") for _ in range(2)]
        seen = [watching.adopt(child.pid, child.born_ticks) for child in (one, other)]
        os.write(exits, EXIT.pack(one.pid, 3 << 8, one.born_ticks - 7))  # that of somebody long ago
        for child in (one, other):
            os.kill(child.pid, signal.SIGKILL)
        assert [await ended(child) for child in (one, other)] == [-signal.SIGKILL] * 2
        await asyncio.sleep(0.05)
        assert [child.poll() for child in seen] == [None, None]
        word = EXIT.pack(one.pid, 5 << 8, one.born_ticks)
        os.write(exits, word[:5])
        await asyncio.sleep(0.05)
        assert seen[0].poll() is None, "half a word is none"
        os.write(exits, word[5:])
        assert [await ended(child) for child in seen] == [5, UNKNOWN_EXIT]
        assert Children(os.getpid(), exits).adopt(one.pid, one.born_ticks).poll() == 5
    finally:
        os.close(exits)
