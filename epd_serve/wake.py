"""Waking those who sleep: a thread that polls sockets, and any thread or process on a bell.

What sleeps here sleeps in the kernel: it takes no CPU time until it is woken, and no ring is lost between a look at
what was waited for and the sleep.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import platform
import threading
import time
from pathlib import Path

import zmq

from epd_serve.sockets import open_socket

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX_CALLS = {"x86_64": 202, "ppc64le": 221, "s390x": 238}
_FUTEX_CALL = _FUTEX_CALLS.get(platform.machine(), 98)  # number 98 on aarch64, riscv64 and all newer ones
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # between processes, so without FUTEX_PRIVATE_FLAG
_EVERYBODY = 2**31 - 1
_WORD_BYTES = 4
_PR_SET_TIMERSLACK = 29


class WakeLine:
    """Lets threads wake one that sleeps in a ZMQ poll. `ring` belongs to the callers, the rest to the sleeper."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a ZMQ socket is one thread's at a time
        self._caller, self.listener = open_socket(zmq.PAIR), open_socket(zmq.PAIR)
        name = f"inproc://epd-wake-{next(_numbers)}"  # ZMQ frees the name of a closed socket some time later
        self.listener.bind(name)
        self._caller.connect(name)

    def ring(self) -> None:
        try:
            with self._lock:
                self._caller.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            return  # the line is full of unanswered rings: the listener will wake anyway

    def answer(self) -> None:
        """Consume all rings at hand."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.listener.recv(zmq.NOBLOCK)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A word of shared memory to sleep on (Linux futex, see `man 2 futex`). Anybody rings; each sleeper has its own.

    The word is the time of the last ring, so rings of several threads or processes at once cannot cancel each other
    out, as they could if they counted.

    Args:
        path: a file of 4 bytes that all who share the bell open, made by the first of them and removed by whoever owns
            its folder; None for a bell within this process.

    Raises:
        OSError: the file cannot be made or mapped.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _WORD_BYTES)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, _WORD_BYTES)
                self._memory = mmap.mmap(file, _WORD_BYTES)
            finally:
                os.close(file)
        self._word = ctypes.c_uint32.from_buffer(self._memory)
        if self._futex(_FUTEX_WAKE, 0, None) < 0:
            raise OSError(ctypes.get_errno(), "this kernel has no futex, on which idle stages sleep")
        self._heard = self._word.value

    def ring(self) -> None:
        """End all sleeps. A sleeper that looks for what it waits for just now will not fall asleep."""
        self._word.value = time.monotonic_ns() & 0xFFFFFFFF
        self._futex(_FUTEX_WAKE, _EVERYBODY, None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a ring or for `timeout_s`; at once where it rang since the last `wait` ended (or the beginning).

        Returns whether it rang. One thread at a time; look for what you wait for after it, not before it alone.
        """
        end = time.monotonic() + timeout_s
        while self._word.value == self._heard and (left_s := end - time.monotonic()) > 0:
            seconds = int(left_s)
            timeout = _Timespec(seconds, int((left_s - seconds) * 1e9))
            self._futex(_FUTEX_WAIT, self._heard, ctypes.byref(timeout))
        before, self._heard = self._heard, self._word.value
        return self._heard != before

    def _futex(self, operation: int, value: int, timeout: object) -> int:
        """Of a wait, errors are no news: the word has changed already, a signal came, or the time is over."""
        address = ctypes.c_void_p(ctypes.addressof(self._word))
        return int(_libc.syscall(_FUTEX_CALL, address, operation, ctypes.c_uint32(value), timeout, None, 0))


ON_TIME_NS = 50_000
"""As late as the kernel lets waits end by itself."""


def end_waits_late(late_ns: int) -> None:
    """Let timed waits of this thread, and of those that it starts from now on, end up to `late_ns` late, so that many
    of them share a wake-up. What is waited for ends them at once as ever, but for Python's lock: who holds it is asked
    to give it up when a timed wait has ended. 0: as at the thread's start; `ON_TIME_NS`: on time, in a thread that was
    started by one whose waits end late."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(late_ns), 0, 0, 0)


class IdleWaiter:
    """What a scheduler with nothing to run sleeps on, between two steps that compute nothing.

    vLLM steps about every millisecond while a request waits for a connector: on CPU that takes the core on which the
    other stage computes. Connectors say in a step that they wait (`expect_wake`), whoever makes a difference calls
    `wake`, and the engine sleeps once between steps (`epd_serve.engine.idle_steps`), however many wait. It does not
    where one of them has something that only another step moves (`need_step`).
    """

    def __init__(self) -> None:
        self._bell = Bell()
        self._path: Path | None = None
        self._expected = self._needed = False

    def share(self, path: Path) -> None:
        """From now on processes that name the same path wake each other. Before any thread of this one sleeps."""
        if path != self._path:
            self._bell, self._path = Bell(path), path

    def wake(self) -> None:
        """Something has changed: ends the sleep, or the next one at once. Any thread, any process of the stage."""
        self._bell.ring()

    def expect_wake(self) -> None:
        """This step computes nothing because of one who will call `wake`."""
        self._expected = True

    def need_step(self) -> None:
        """Whatever others wait for: the next step must come soon."""
        self._needed = True

    def wake_is_expected(self) -> bool:
        """Whether that was said since the last time this was asked, and nobody needs a step."""
        expected = self._expected and not self._needed
        self._expected = self._needed = False
        return expected

    def wait(self, timeout_s: float) -> None:
        """Sleep until something has changed since the last sleep ended, or for `timeout_s`."""
        self._bell.wait(timeout_s)


idle_waiter = IdleWaiter()  # one scheduler per process
