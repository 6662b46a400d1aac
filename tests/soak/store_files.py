"""`python -m tests.soak.store_files`: would one tmpfs file per feature do what the arena does, and as fast?

`Files` is a store that leaves it to the kernel: a temporary file is written under an exclusive lock and published by
`rename`; a shared lock and a look at the name behind it is a lease; the oldest unlocked file is taken for the next
feature (a new one would fault in each of its pages), which evicts it; whoever dies lets go of his locks. Writers and
readers take turns on both stores, each on its own keys, in stores that are full; ratios are of medians of one run. A
device's page-locked bounce buffer would be filled by the same `get`: a file is neither page-locked nor registered.

`killed` are the steps at which a process died by SIGKILL, in a PID namespace of its own where this user may make one,
after which every readable feature was whole and the room of the dead was taken for the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bench.clients.process import Child
from bench.micro.ep.store_speed import timed
from bench.record import ROOT
from store.arena import Arena
from store.errors import StoreFullError
from tests.soak.harness import Result, Soak
from tests.store.conftest import CONTAINED, get_into

Bytes = npt.NDArray[np.uint8]
MODULE = "tests.soak.store_files"
SIZES = {"200k": 200_000, "8m": 8_572_928, "60m": 60_000_000}
ROUNDS = {"200k": (400, 60), "8m": (120, 30), "60m": (24, 8)}
"""Of each writer, and with --quick."""
WRITERS = (1, 8)
PLACES, BUFFERS, AGE = 4, 2, 1
LOOKS = 100
"""For room, where others take what was just seen."""
MANY = 4096
"""Features at one time that the arena has slots for: how long does either take to find the one to evict?"""
PUT_STEPS = ("opened", "locked", "evicted", "sized", "half", "written", "published")
GET_STEPS = ("found", "leased", "mapped")


class Files:
    """Features by key, for all processes that share the folder.

    Args:
        step: told where a call has got to.
    """

    def __init__(self, folder: Path, capacity_bytes: int, step: Callable[[str], None] = lambda at: None) -> None:
        self._folder, self._capacity_bytes, self._step = folder, capacity_bytes, step
        self._names = itertools.count()
        self._mapped: dict[int, Bytes] = {}

    def put(self, key: str, data: Bytes, *, kept: bool = False) -> None:
        """`kept`: not by write(2), but to a mapping that this process keeps of every file it has seen.

        Raises:
            StoreFullError: everything is leased or being written.
        """
        fd, name = self._room(data.nbytes + 8)
        try:
            self._step("sized")
            digest = xxhash.xxh3_64_digest(data.data)
            half = data.nbytes // 2
            if kept:
                stored = self._kept(fd, data.nbytes + 8)
                np.copyto(stored[:-8], data)
                stored[-8:] = np.frombuffer(digest, dtype=np.uint8)
            else:
                os.pwrite(fd, data[:half].data, 0)
                self._step("half")
                os.pwritev(fd, [data[half:].data, digest], half)
            self._step("written")
            _touch(fd)
            os.rename(name, self._folder / key)
            self._step("published")
        finally:
            _let_go(fd)

    @contextlib.contextmanager
    def lease(self, key: str) -> Iterator[int | None]:
        """Its file, which nobody evicts inside the `with`; None where it is missing."""
        path = self._folder / key
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            yield None
            return
        try:
            self._step("found")
            yield fd if _locked(fd, fcntl.LOCK_SH) and _is_at(fd, path) else None
        finally:
            _let_go(fd)

    def get(self, key: str, target: Bytes) -> bool:
        """Copies it to `target` by read(2)."""
        with self.lease(key) as fd:
            if fd is None:
                return False
            self._step("leased")
            digest = bytearray(8)
            _touch(fd)
            os.preadv(fd, [target.data, digest], 0)
            return xxhash.xxh3_64_digest(target.data) == digest

    def get_mapped(self, key: str, target: Bytes, *, kept: bool = False) -> bool:
        """Copies it to `target` from a mapping, which is what a lease without a copy needs. `kept`: as in `put`."""
        with self.lease(key) as fd:
            if fd is None:
                return False
            _touch(fd)
            stored = self._kept(fd, target.nbytes + 8) if kept else _mapping(fd, target.nbytes + 8)
            self._step("mapped")
            np.copyto(target, stored[:-8])
            return xxhash.xxh3_64_digest(stored[:-8].data) == stored[-8:].tobytes()

    def _kept(self, fd: int, nbytes: int) -> Bytes:
        inode = os.fstat(fd).st_ino
        if inode not in self._mapped or self._mapped[inode].nbytes != nbytes:
            self._mapped[inode] = _mapping(fd, nbytes)
        return self._mapped[inode]

    def _room(self, nbytes: int) -> tuple[int, Path]:
        """A file of that size, locked exclusively, under a name that nobody reads."""
        for _ in range(LOOKS):
            found = sorted(self._found())
            name = self._folder / f"tmp-{os.getpid()}-{next(self._names)}"
            if sum(size for _, size, _ in found) + nbytes <= self._capacity_bytes:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._step("opened")
                if _locked(fd, fcntl.LOCK_EX) and _is_at(fd, name):
                    self._step("locked")
                    os.posix_fallocate(fd, 0, nbytes)
                    return fd, name
                os.close(fd)
                continue
            for _, size, path in found:
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDWR)
                    if _locked(fd, fcntl.LOCK_EX) and _is_at(fd, Path(path)):
                        os.rename(path, name)
                        self._step("evicted")
                        if size != nbytes:
                            os.ftruncate(fd, nbytes)
                        return fd, name
                    os.close(fd)
        raise StoreFullError("all is leased or being written")

    def _found(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, size and path of every file."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat()
                    yield about.st_mtime_ns, about.st_size, entry.path


def _mapping(fd: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)


def _let_go(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping that is kept would keep it: the lock is the open file's, not the fd's
    os.close(fd)


def _touch(fd: int) -> None:
    now = time.time_ns()  # the kernel's own clock for files may tick every 4 ms
    os.utime(fd, ns=(now, now))


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def main(
    pipe: Connection, arena_path: str, folder: str, nbytes: int, writers: int, writer: int, rounds: int, mixed: bool
) -> None:
    """One writer: how long each variant took, turn by turn, once it is told to begin. `mixed`: half its size or so."""
    arena, files = Arena.attach(arena_path), Files(Path(folder), 2 * _capacity(nbytes, writers))
    rng = np.random.default_rng(writer)
    sources = itertools.cycle([rng.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(BUFFERS)])
    targets = itertools.cycle([np.ones(nbytes, dtype=np.uint8) for _ in range(BUFFERS)])

    def size(turn: int) -> int:
        return nbytes - (turn * 7919 % 101) * nbytes // 202 if mixed else nbytes

    def put_arena(turn: int) -> None:
        assert arena.put(f"{writer}-{turn}", next(sources)[: size(turn)], shape=(size(turn),), dtype="uint8")

    def put_file(turn: int, *, kept: bool = False) -> None:
        files.put(f"{writer}-{turn}{'-kept' * kept}", next(sources)[: size(turn)], kept=kept)

    def get_arena(turn: int) -> None:
        missed["arena"] += get_into(arena, f"{writer}-{turn - AGE}", target(turn)) is None

    def target(turn: int) -> Bytes:
        return next(targets)[: size(turn - AGE)]

    def get_file(turn: int) -> None:
        missed["file"] += not files.get(f"{writer}-{turn - AGE}", target(turn))

    def get_mapped(turn: int, *, kept: bool = False) -> None:
        missed["file"] += not files.get_mapped(f"{writer}-{turn - AGE}{'-kept' * kept}", target(turn), kept=kept)

    missed = {"arena": 0, "file": 0}
    for turn in range(-AGE, 0):
        put_arena(turn)
        put_file(turn)
        put_file(turn, kept=True)
    variants = {
        "arena put": put_arena,
        "file put": put_file,
        "arena get": get_arena,
        "file get": get_file,
        "file get, mapped": get_mapped,
        "file put, kept": lambda turn: put_file(turn, kept=True),
        "file get, kept": lambda turn: get_mapped(turn, kept=True),
    }
    pipe.send("ready")
    pipe.recv()
    taken_ms = timed(variants, rounds, warm_up=2 * PLACES)
    pipe.send((taken_ms, missed))
    arena.close()


def _capacity(nbytes: int, writers: int) -> int:
    return PLACES * writers * (-(-(nbytes + 8) // mmap.PAGESIZE) * mmap.PAGESIZE)


@contextlib.contextmanager
def stores(capacity_bytes: int) -> Iterator[tuple[str, Path]]:
    """An arena's path and a folder for files."""
    folder = Path(tempfile.mkdtemp(prefix="epd-files-", dir="/dev/shm"))
    path = f"{folder}.arena"
    try:
        Arena.create(path, capacity_bytes).close()
        yield path, folder
    finally:
        Arena.unlink(path)
        shutil.rmtree(folder)


def taken(nbytes: int, writers: int, rounds: int, *, mixed: bool) -> dict[str, Any]:
    """Median milliseconds of every variant, over all writers."""
    with contextlib.ExitStack() as stack:
        path, folder = stack.enter_context(stores(_capacity(nbytes, writers)))
        children = []
        for writer in range(writers):
            child = Child(MODULE, path, str(folder), nbytes, writers, writer, rounds, mixed)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            child.hear()
        for child in children:
            child.tell("go")
        heard = [child.hear(600.0) for child in children]
    medians = {
        variant: float(np.median([ms for taken_ms, _ in heard for ms in taken_ms[variant]])) for variant in heard[0][0]
    }
    missed = {store: sum(missed[store] for _, missed in heard) for store in ("arena", "file")}
    return {
        "bytes": nbytes,
        "writers": writers,
        "rounds": rounds,
        "mixed": mixed,
        "median_ms": medians,
        "missed": missed,
    }


def among_many(rounds: int) -> dict[str, float]:
    """Median milliseconds of a put of a page, in either store, full of `MANY` features of a page."""
    data = np.ones(mmap.PAGESIZE - 8, dtype=np.uint8)
    with stores(MANY * mmap.PAGESIZE) as (path, folder):
        arena, files = Arena.attach(path), Files(folder, MANY * data.nbytes)

        def put_arena(turn: int) -> None:
            assert arena.put(f"put-{turn}", data, shape=(), dtype="uint8")

        variants = {"arena put": put_arena, "file put": lambda turn: files.put(f"put-{turn}", data)}
        for number in range(MANY - 8):
            arena.put(str(number), data, shape=(), dtype="uint8")
            (folder / str(number)).write_bytes(data.tobytes())
        medians = {name: float(np.median(ms)) for name, ms in timed(variants, rounds, warm_up=5).items()}
        arena.close()
    return medians


def killed(step: str) -> bool:
    """Whether all is well after a process died there: what is readable is whole, and the dead one's room is had."""
    size, many = 40 * mmap.PAGESIZE, 4
    contained = subprocess.run([*CONTAINED, "true"], capture_output=True, check=False).returncode == 0
    with tempfile.TemporaryDirectory(prefix="epd-files-", dir="/dev/shm") as folder:
        files = Files(Path(folder), many * (size + 8))
        for number in range(many - (step in ("opened", "locked"))):
            files.put(f"old-{number}", np.full(size, number, dtype=np.uint8))
        died = subprocess.run(
            [*(CONTAINED if contained else ()), sys.executable, "-m", MODULE, "--die-at", step, folder],
            cwd=ROOT,
            check=False,
        ).returncode
        target = np.empty(size, dtype=np.uint8)
        whole = all(files.get(entry.name, target) for entry in Path(folder).iterdir() if entry.name[:3] != "tmp")
        for number in range(many):  # all places are had again
            files.put(f"new-{number}", np.full(size, number, dtype=np.uint8))
        had = all(files.get(f"new-{number}", target) for number in range(many))
        return died in (-signal.SIGKILL, 128 + signal.SIGKILL) and whole and had


def die_at(step: str, folder: str) -> None:
    """In the process that dies."""

    def die(at: str) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(137)  # the first process of a PID namespace gets no signal from itself

    size = 40 * mmap.PAGESIZE
    files = Files(Path(folder), 4 * (size + 8), die)
    target = np.empty(size, dtype=np.uint8)
    files.get("old-1", target)
    files.get_mapped("old-1", target)
    files.put("dying", np.ones(size, dtype=np.uint8))


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`file_put_over_arena_8m_8w`, … and what went wrong."""
    named: dict[str, float] = {}
    for row in rows:
        if "size" in row:
            ms, at = row["median_ms"], f"{row['size']}{'_mixed' * row['mixed']}_{row['writers']}w"
            named[f"file_put_over_arena_{at}"] = ms["file put"] / ms["arena put"]
            named[f"file_get_over_arena_{at}"] = ms["file get"] / ms["arena get"]
            named[f"file_get_mapped_over_arena_{at}"] = ms["file get, mapped"] / ms["arena get"]
            named[f"file_put_kept_over_arena_{at}"] = ms["file put, kept"] / ms["arena put"]
            named[f"file_get_kept_over_arena_{at}"] = ms["file get, kept"] / ms["arena get"]
        elif "among" in row:
            named[f"file_put_over_arena_among_{row['among']}"] = (
                row["median_ms"]["file put"] / row["median_ms"]["arena put"]
            )
        else:
            named["steps_killed_unwell"] = sum(not well for well in row["killed"].values())
    return named


def measure(arguments: argparse.Namespace) -> Result:
    rows: list[dict[str, Any]] = [{"killed": {step: killed(step) for step in (*GET_STEPS, *PUT_STEPS)}}]
    rows.append({"among": MANY, "median_ms": among_many(20 if arguments.quick else 100)})
    rows += [
        {"size": size} | taken(nbytes, writers, ROUNDS[size][arguments.quick], mixed=mixed)
        for size, nbytes in SIZES.items()
        for mixed in (False, True)
        for writers in WRITERS
    ]
    return figures(rows), rows, ""


SOAK = Soak("store_files", "tmpfs files against the arena", measure, (), kind="real memory and processes")

if __name__ == "__main__":
    if sys.argv[1:2] == ["--die-at"]:
        die_at(*sys.argv[2:])
    else:
        raise SystemExit(SOAK.main())
