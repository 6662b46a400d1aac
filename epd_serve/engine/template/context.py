"""multiprocessing's *spawn*, carried out by the stage's root: the new process is forked, not executed.

What the caller sees is spawn's: target and arguments are pickled, the new process has the caller's environment as it is
at this moment, and nothing else of the caller. What native libraries read of it when they are loaded cannot change in a
fork; where it did, and where another program is to be executed (vLLM binds to NUMA nodes so), the process is spawned
the ordinary way.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import struct
import sys
from multiprocessing import context, popen_fork, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from typing import ClassVar

from epd_serve.engine.template.fresh import begin_afresh, native_environment, obey_openmp
from epd_serve.engine.template.messages import NUMBER
from epd_serve.engine.template.stage_root import ask_for_process

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("=I")


class RootContext(context.SpawnContext):
    """`multiprocessing.get_context("spawn")` in a stage whose root forks.

    Attributes:
        root: where the root takes requests. native: the environment that the loaded libraries have read.
    """

    root: ClassVar[socket.socket]
    native: ClassVar[dict[str, str]]


class RootProcess(context.SpawnProcess):
    """A process of that context."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_fork.Popen:  # type: ignore[override]
        native = native_environment()
        if differing := sorted({name for name, _ in native.items() ^ RootContext.native.items()}):
            logger.warning("%s is executed, not forked: it gets other %s", process_obj.name, ", ".join(differing))
        elif os.fsdecode(spawn.get_executable()) == sys.executable:
            return _Popen(process_obj)
        return popen_spawn_posix.Popen(process_obj)


RootContext.Process = RootProcess


class _Popen(popen_fork.Popen):
    """As `popen_forkserver.Popen`, with the environment ahead of everything else."""

    method = "spawn"

    class DupFd:
        """A descriptor on its way to the new process: which of those that it received."""

        received: ClassVar[list[int] | None] = None

        def __init__(self, index: int) -> None:
            self.index = index

        def detach(self) -> int:
            assert self.received is not None, "only a process that the root has forked is handed descriptors"
            return self.received[self.index]

    def __init__(self, process_obj: process.BaseProcess) -> None:
        self._descriptors: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return len(self._descriptors) - 1

    def _launch(self, process_obj: process.BaseProcess) -> None:
        data = io.BytesIO()
        preparation = spawn.get_preparation_data(process_obj.name)
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        status, child_status = os.pipe()
        child_data, to_child = os.pipe()
        try:
            resource_tracker.ensure_running()
            tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
            ask_for_process(RootContext.root, [child_status, child_data, tracker, *self._descriptors])
        finally:
            os.close(child_status)
            os.close(child_data)
        self.sentinel = status
        # The end of the data that stays open tells the new process of this one's end.
        self.finalizer = util.Finalize(self, _close, (os.dup(to_child), status))
        env = json.dumps(dict(os.environ)).encode()
        with open(to_child, "wb") as pipe:
            pipe.write(_LENGTH.pack(len(env)) + env)
            pipe.write(data.getbuffer())
        self.pid = _read_number(status)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            try:
                self.returncode = _read_number(self.sentinel)
            except (OSError, EOFError):  # the root has been killed, and this process is about to be
                self.returncode = 255
        return self.returncode


def forked() -> bool:
    """Whether the stage's root has forked this process, which thereby dies with the root."""
    return _Popen.DupFd.received is not None


def be_forked_process(descriptors: list[int]) -> int:
    """What a process does that the root has forked for a `RootProcess`. Returns its exit code."""
    data, tracker, *received = descriptors
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    _Popen.DupFd.received = received
    (length,) = _LENGTH.unpack(_exactly(data, _LENGTH.size))
    begin_afresh(json.loads(_exactly(data, length)))
    obey_openmp()
    return spawn._main(data, os.dup(data))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_number(descriptor: int) -> int:
    return int(NUMBER.unpack(_exactly(descriptor, NUMBER.size))[0])


def _exactly(descriptor: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        chunk = os.read(descriptor, size - len(found))
        if not chunk:
            raise EOFError("the stage's root has gone")
        found += chunk
    return found
