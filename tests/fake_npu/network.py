"""What joins fake Transfer Engines, and what becomes of each descriptor there: it lands in any order, late or never.

The engines and their rules are in `engine.py`.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.fake_npu.device import FakeDevice

MAX_WAITING = 1024  # tasks of one engine; further ones fail. Mooncake's default for TCP
PENDING, DONE, FAILED, TOO_LATE = 0, 1, -1, -2


class Fault(enum.Enum):
    """What becomes of one descriptor. Late: at `FakeTransferEngine.land`."""

    NONE = "it lands and is done"
    LATE = "pending; lands late and is then done"
    TOO_LATE = "too late; lands late and is then done"
    FAILS = "failed; never lands"
    FAILS_AND_LANDS = "failed; lands late all the same"
    LOST = "pending for good; never lands"


_SAYS = {Fault.LATE: PENDING, Fault.TOO_LATE: TOO_LATE, Fault.LOST: PENDING}
_LANDS_LATE = (Fault.LATE, Fault.TOO_LATE, Fault.FAILS_AND_LANDS)


class Peer(Protocol):
    """What an engine has to know of another one that it reaches."""

    device: FakeDevice

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered, all in one region."""


class FakeNetwork:
    """What joins the engines of several processes.

    Attributes:
        connects_with_self: two processes of one device may be a pair, as from CANN 9.1 on.
        latency_s, bytes_per_s: how long a task takes; may be changed at any time.
        seed: of the order in which tasks run; None: as they came.
        fault: what becomes of a descriptor (source, target, bytes); asked when it is accepted.
        says_minus_one: what an engine answers where it finds nobody, 2^64 - 1 instead of 0.
        gate: cleared, accepted tasks do not run until it is set.
        by_hand: engines have no thread; tasks run in `FakeTransferEngine.run`.
    """

    def __init__(
        self,
        *,
        connects_with_self: bool = False,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        seed: int | None = None,
        fault: Callable[[tuple[int, int, int]], Fault] = lambda descriptor: Fault.NONE,
        says_minus_one: bool = False,
        by_hand: bool = False,
    ) -> None:
        self.connects_with_self = connects_with_self
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.chance = None if seed is None else random.Random(seed)
        self.fault = fault
        self.says_minus_one = says_minus_one
        self.by_hand = by_hand
        self.gate = threading.Event()
        self.gate.set()
        self._engines = weakref.WeakValueDictionary[str, Peer]()
        self._ports = itertools.count(20000)

    def join(self, host: str, engine: Peer) -> int:
        """The RPC port at `host` under which other engines find this one."""
        port = next(self._ports)
        self._engines[f"{host}:{port}"] = engine
        return port

    def at(self, session: str) -> Peer | None:
        return self._engines.get(session)


@dataclass(eq=False)
class Task:
    """One descriptor of a batch."""

    source: int
    target: int
    nbytes: int
    fault: Fault
    status: int = PENDING
    seen_ended: bool = False  # somebody asked for this task, and it had ended

    def land(self) -> None:
        ctypes.memmove(self.target, self.source, self.nbytes)
        if self.fault is not Fault.FAILS_AND_LANDS:
            self.status = DONE


@dataclass
class Tasks:
    """What waits in one engine, for its thread or for whoever runs it by hand."""

    network: FakeNetwork
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[Task] = field(default_factory=list)
    late: list[Task] = field(default_factory=list)
    running: int = 0
    closed: bool = False

    def put(self, tasks: Sequence[Task]) -> None:
        with self.changed:
            for task in tasks:
                if len(self.waiting) + self.running >= MAX_WAITING:
                    task.status = FAILED
                else:
                    self.waiting.append(task)
            self.changed.notify()

    def take(self) -> Task:
        """The one that runs next; the caller holds `changed` and there is one."""
        chance = self.network.chance
        self.running += 1
        return self.waiting.pop(chance.randrange(len(self.waiting)) if chance else 0)

    def end(self, task: Task) -> None:
        if task.fault is Fault.NONE:
            task.land()
        else:
            task.status = _SAYS.get(task.fault, FAILED)
            if task.fault in _LANDS_LATE:
                self.late.append(task)
        self.running -= 1

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()


def execute(tasks: Tasks) -> None:
    """An engine's thread."""
    network = tasks.network
    while True:
        with tasks.changed:
            tasks.changed.wait_for(lambda: tasks.waiting or tasks.closed)
            if tasks.closed:
                return
        network.gate.wait()  # the choice falls afterwards: among all that came meanwhile
        with tasks.changed:
            task = tasks.take()
        time.sleep(network.latency_s + task.nbytes / network.bytes_per_s)
        tasks.end(task)
