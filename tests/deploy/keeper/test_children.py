"""Processes that are kept: started, adopted, collected once, and what is noted of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.keeper.in_process import InProcess
from deploy.keeper.interface import Child
from tests.waiting import until

ENV = dict(os.environ)
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
def keeper() -> Iterator[InProcess]:
    one = InProcess()
    with contextlib.closing(one):
        yield one


async def program(keeper: InProcess, name: str, code: str, *passed: int, output: int = 2) -> Child:
    return await keeper.spawn(name, (sys.executable, "-c", code), ENV, output=output, passed=passed)


async def ended(child: Child) -> int:
    return await asyncio.wait_for(child.exited(), 30)


def an_orphan() -> int:
    """Pid of one whose parent has ended."""
    return int(subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True).stdout)


async def test_a_hundred_children_have_a_hundred_ends(keeper: InProcess) -> None:
    children = [await keeper.spawn(f"{n}", ("/bin/sh", "-c", f"exit {n}"), ENV, output=2) for n in range(100)]
    assert [await ended(child) for child in children] == list(range(100))
    assert {entry.name: entry.code for entry in await keeper.entries()} == {f"{n}": n for n in range(100)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_signal_is_told_as_minus_its_number(keeper: InProcess, number: signal.Signals) -> None:
    child = await keeper.spawn("E0", ("/bin/sleep", "60"), ENV, output=2)
    assert child.poll() is None
    os.kill(child.pid, number)
    assert await ended(child) == -number == child.poll()


async def test_other_children_of_this_process_are_left_to_those_who_started_them(keeper: InProcess) -> None:
    others = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    assert await ended(await keeper.spawn("E0", ("/bin/sh", "-c", "exit 3"), ENV, output=2)) == 3
    assert others.wait() == 7


async def test_a_child_leads_a_session_and_has_what_it_was_given_alone(keeper: InProcess, tmp_path: Path) -> None:
    code = """
import os, signal, sys
print(os.getpid() == os.getpgid(0) == os.getsid(0), os.readlink("/proc/self/fd/0"))
os.write(3, b"third "), os.write(4, b"fourth")
print(sorted(int(one) for one in os.listdir("/proc/self/fd"))[:-1], file=sys.stderr)
print(signal.getsignal(signal.SIGTERM), file=sys.stderr)
"""
    log = tmp_path / "log"
    reader, writer = os.pipe()
    try:
        with log.open("ab") as file:
            # Numbers that cross: what is to be 4 lies on 3 in one of them, most likely.
            assert await ended(await program(keeper, "E0", code, writer, writer, output=file.fileno())) == 0
        os.close(writer)
        assert os.read(reader, 100) == b"third fourth"
    finally:
        os.close(reader)
    said = log.read_text().splitlines()
    assert "True /dev/null" in said and "[0, 1, 2, 3, 4]" in said


async def test_what_cannot_be_executed_says_so_and_leaves_the_name_free(keeper: InProcess) -> None:
    with pytest.raises(FileNotFoundError):
        await keeper.spawn("E0", ("/nowhere/python",), ENV, output=2)
    assert await keeper.entries() == ()
    assert await ended(await keeper.spawn("E0", ("/bin/true",), ENV, output=2)) == 0


async def test_a_name_that_runs_is_not_given_twice_nor_forgotten(keeper: InProcess) -> None:
    child = await keeper.spawn("E0", ("/bin/sleep", "60"), ENV, output=2)
    with pytest.raises(ValueError, match="E0"):
        await keeper.spawn("E0", ("/bin/true",), ENV, output=2)
    with pytest.raises(ValueError, match="E0"):
        await keeper.adopt("E0", child.pid)
    with pytest.raises(ValueError, match="E0"):
        await keeper.forget("E0")
    os.kill(child.pid, signal.SIGKILL)
    await ended(child)
    await keeper.forget("E0")
    await keeper.forget("E0")
    assert await keeper.entries() == ()


async def test_an_orphan_is_adopted_and_collected(keeper: InProcess) -> None:
    orphan = an_orphan()
    await until(lambda: _parent(orphan) == os.getpid())
    child = await keeper.adopt("E0", orphan, tag=b"record")
    assert (child.name, child.tag, child.pid, child.poll()) == ("E0", b"record", orphan, None)
    with pytest.raises(ValueError, match=str(orphan)):
        await keeper.adopt("E1", orphan)
    os.kill(orphan, signal.SIGKILL)
    assert await ended(child) == -signal.SIGKILL


async def test_a_process_that_has_ended_or_is_none_of_ours_is_not_adopted(keeper: InProcess) -> None:
    orphan = an_orphan()
    await until(lambda: _parent(orphan) == os.getpid())
    os.kill(orphan, signal.SIGKILL)
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    for pid in (orphan, os.getppid(), 1, 0, -1, 2**22 + 1):
        with pytest.raises(ProcessLookupError):
            await keeper.adopt("E0", pid)
    assert await keeper.entries() == ()


async def test_what_is_noted_stays_through_lives_until_it_is_forgotten(keeper: InProcess) -> None:
    reader, writer = os.pipe()
    await keeper.note("template", b"accepted", writer)
    os.close(writer)
    assert await ended(await keeper.spawn("template", ("/bin/false",), ENV, output=2)) == 1
    (entry,) = await keeper.entries()
    assert (entry.tag, entry.code, entry.child and entry.child.poll()) == (b"accepted", 1, 1)
    assert entry.descriptor is not None
    os.write(entry.descriptor, b"still open")
    os.close(entry.descriptor)
    assert os.read(reader, 100) == b"still open"
    assert await ended(await keeper.spawn("template", ("/bin/true",), ENV, output=2, tag=b"begun")) == 0
    (entry,) = await keeper.entries()
    assert (entry.tag, entry.code) == (b"begun", 0) and entry.descriptor is not None
    os.close(entry.descriptor)
    await keeper.forget("template")
    assert os.read(reader, 100) == b"", "nobody has it any more"
    os.close(reader)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
