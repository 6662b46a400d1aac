"""Shares of a device's cores as two numbers, and on CPU the cores that they are."""

from __future__ import annotations

import os

from epd_serve.errors import ConfigError
from npu_ops.interference_profile import Shares


def parse_shares(text: str) -> Shares:
    """`0.3,0.7`. Raises ConfigError for anything but two shares that fit on one device."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--core-share {text}: two numbers, such as 0.5,0.5", param="--core-share") from None
    if not (first > 0 and second > 0 and first + second <= 1.0 + 1e-9):
        raise ConfigError(
            f"--core-share {text}: both have to be above 0, and their sum at most 1", param="--core-share"
        )
    return first, second


def cores_of_shares(
    shares: Shares | None, cores: tuple[int, ...] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Core ids of both; disjoint with shares, all for both without.

    Raises:
        ConfigError: a share is not a whole core.
    """
    usable = tuple(sorted(os.sched_getaffinity(0))) if cores is None else cores
    if shares is None:
        return usable, usable
    first, second = (int(share * len(usable) + 1e-9) for share in shares)
    if not (first and second):
        raise ConfigError(
            f"--core-share {shares[0]:g},{shares[1]:g}: of {len(usable)} cores that leaves one side without any",
            param="--core-share",
        )
    return usable[:first], usable[len(usable) - second :]
