"""The two processes of `epd-bench interference`: each has a share of the cores, prepares operators and runs them.

Owns the messages between measurement and process, and what a share means for each kind of device; the operators are
`npu_ops`'s.
"""

from __future__ import annotations

import argparse
from multiprocessing.connection import Connection

from bench.clients.process import Child
from bench.micro.interference.operators import Sizes
from deploy.planner.interference import Shares
from epd_serve.errors import ConfigError
from npu_ops.core_grants import CoreOrder
from npu_ops.core_sets import TooFewCoresError, core_sets
from npu_ops.mps import PERCENTAGE_ENV, percentage, why_no_mps

PREPARE_S = 180.0
"""Loading a framework, joining a ring and compiling a kernel may take minutes on a busy machine."""

FLAG = "--core-share"
NAMES = ("first", "second")

Span = tuple[float, float]


def parse_shares(text: str) -> Shares:
    """`0.3,0.7`: the type of a flag that takes two shares that fit on one device."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: two numbers, such as 0.5,0.5") from None
    if not (first > 0 and second > 0 and first + second <= 1.0 + 1e-9):
        raise argparse.ArgumentTypeError(f"{text}: both have to be above 0, and their sum at most 1")
    return first, second


def orders_of(kind: str, shares: Shares, cores: tuple[int, ...] | None = None) -> tuple[CoreOrder, CoreOrder]:
    """What each process has to do; on CPU with disjoint cores.

    Args:
        cores: to use on CPU; by default those this process may run on.

    Raises:
        ConfigError: nothing would hold a process to its share, or a CPU has too few cores.
    """
    if kind == "cuda" and (why_not := why_no_mps()):
        raise ConfigError(
            f"{FLAG}: without MPS the processes of a GPU take turns ({why_not}); "
            f"start nvidia-cuda-mps-control -d, or leave {FLAG} out",
            param=FLAG,
        )
    sets: list[tuple[int, ...]] = [(), ()]
    if kind == "cpu":
        try:
            sets = core_sets(1, cores).divided([0], list(shares))
        except TooFewCoresError as error:
            raise ConfigError(f"{FLAG} {shares[0]:g},{shares[1]:g}: {error}", param=FLAG) from error
    given = dict(zip(NAMES, shares, strict=True))
    first, second = (CoreOrder(kind, name, given, own) for name, own in zip(NAMES, sets, strict=True))
    return first, second


class OperatorProcess(Child):
    """The measurement's end. `order`: its share of the device's cores, or None for all of them."""

    def __init__(self, kind: str, index: int, sizes: Sizes, order: CoreOrder | None = None) -> None:
        # MPS reads a process's share when it first uses the device.
        mps = {PERCENTAGE_ENV: percentage(order.share)} if order is not None and kind == "cuda" else {}
        super().__init__(__name__, kind, index, sizes, order, env=mps)

    def ready(self) -> str:
        """Wait until it has the device; what of the cores it has, "" without a share.

        Raises:
            StageError: it cannot have the device, or not its share.
        """
        return str(self.hear(PREPARE_S))

    def prepare(self, name: str) -> int:
        """How many calls a sample of it has. Raises StageError where the device cannot run it."""
        return int(self.ask((name,), PREPARE_S))

    def begin(self, name: str, begin: float, end: float) -> None:
        """Run a prepared operator from `begin` to `end` on CLOCK_MONOTONIC."""
        self.tell((name, begin, end))

    def spans(self, timeout_s: float) -> list[Span]:
        """When each sample of the last run began and ended."""
        spans: list[Span] = self.hear(timeout_s)
        return spans


def main(pipe: Connection, kind: str, index: int, sizes: Sizes, order: CoreOrder | None) -> None:
    """In the process: prepare an operator that is named, run one that is named with two moments."""
    from bench.micro.interference.run import Runner  # brings torch, which only this process needs

    runner = Runner(kind, index, sizes, order)
    pipe.send(runner.grant.summary() if runner.grant is not None else "")
    try:
        for name, *span in iter(pipe.recv, None):
            pipe.send(runner.run(name, *span) if span else runner.prepare(name).repeats)
    finally:
        runner.close()
