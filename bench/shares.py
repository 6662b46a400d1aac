"""Shares of a device's cores for the two processes of `epd-bench interference`, as orders that they carry out."""

from __future__ import annotations

from epd_serve.errors import ConfigError
from npu_ops.core_grants import CoreOrder
from npu_ops.core_sets import TooFewCoresError, core_sets
from npu_ops.interference_profile import Shares
from npu_ops.mps import why_no_mps

FLAG = "--core-share"
NAMES = ("first", "second")


def parse_shares(text: str) -> Shares:
    """`0.3,0.7`. Raises ConfigError for anything but two shares that fit on one device."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{FLAG} {text}: two numbers, such as 0.5,0.5", param=FLAG) from None
    if not (first > 0 and second > 0 and first + second <= 1.0 + 1e-9):
        raise ConfigError(f"{FLAG} {text}: both have to be above 0, and their sum at most 1", param=FLAG)
    return first, second


def orders_of(kind: str, shares: Shares, cores: tuple[int, ...] | None = None) -> tuple[CoreOrder, CoreOrder]:
    """What each process has to do; on CPU with disjoint cores.

    Args:
        cores: to use on CPU; by default those this process may run on.

    Raises:
        ConfigError: nothing would hold a process to its share, or a CPU has too few cores.
    """
    given = dict(zip(NAMES, shares, strict=True))
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
    first, second = (CoreOrder(kind, name, given, own) for name, own in zip(NAMES, sets, strict=True))
    return first, second
