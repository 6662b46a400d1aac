"""What one life leaves to the next is an old content or a new one, whenever the life was killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from deploy.host.state import SharedState, StateFiles
from tests.waiting import wait_for

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def files() -> Iterator[StateFiles]:
    made = StateFiles.make()
    yield made
    for descriptor in (*made.halves, made.count):
        os.close(descriptor)


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """Pid of a process that does it again and again until it is killed."""
    if (pid := os.fork()) == 0:
        try:
            while True:
                work()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def writer(files: StateFiles) -> Callable[[], None]:
    """Writes sections that differ in size and content from one time to the next, each of one byte all through."""
    state, chance = SharedState(files), random.Random(os.urandom(8))

    def write() -> None:
        content = bytes([chance.randrange(256)]) * chance.randrange(1, 8 * PAGE)
        state.write(chance.choice(("instances", "front doors")), content)

    return write


def assert_whole(sections: dict[str, bytes]) -> None:
    assert sections["settled"] == b"for ever"
    for name in sections.keys() - {"settled"}:
        assert len(set(sections[name])) == 1, name


def test_before_the_first_word_there_is_nothing(files: StateFiles) -> None:
    assert files.sections() == {} and SharedState(files).read("instances") is None


async def test_the_next_life_reads_what_was_written_last(files: StateFiles) -> None:
    first = SharedState(files)
    contents = {f"section {n}": os.urandom(n * PAGE) for n in range(6)}
    for name, content in contents.items():
        first.write(name, b"of before")
        first.write(name, content)
    await first.kept()
    second = SharedState(files)
    assert {name: second.read(name) for name in contents} == contents == files.sections()
    second.write("section 5", b"")
    assert SharedState(files).read("section 5") == b"", "shorter than before"
    assert SharedState(files).read("section 4") == contents["section 4"]


def test_a_writer_that_is_killed_at_any_moment_leaves_what_was_or_what_is_to_be(files: StateFiles) -> None:
    SharedState(files).write("settled", b"for ever")
    chance, seen = random.Random(0), set()
    for _ in range(60):
        begun = os.pread(files.count, 64, 0)
        with forked(writer(files)):
            wait_for(lambda begun=begun: os.pread(files.count, 64, 0) != begun, "it writes")
            time.sleep(chance.uniform(0.0, 0.004))
        found = files.sections()
        assert_whole(found)
        seen.add(tuple(sorted(found.items())))
    assert len(seen) > 20, "most of them had written something"


def test_who_reads_while_another_process_writes_finds_it_whole(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root does, as often as it looks: what is written twice meanwhile is not taken for what was there."""
    state, sizes = SharedState(files), [5, 3 * PAGE, 5, 7 * PAGE]
    state.write("instances", b"0" * PAGE)
    fstat = os.fstat

    def overtaken(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        for number in range(2):
            if sizes:
                state.write("instances", b"%d" % number * sizes.pop(0))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", overtaken)
        assert files.sections() == {"instances": b"1" * 7 * PAGE}
    assert not sizes
