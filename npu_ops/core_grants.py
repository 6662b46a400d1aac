"""What the workers of a stage are told about cores, and what each of them says it got. Values and their JSON.

The launcher writes the order into the environment of a stage, a worker carries it out (`core_limits.py`) and writes
its grant to a file, the launcher reads the files when the stage is up. Imports no framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

_FIXED = {
    "npu": "torch.npu.set_device_limit may be called once in a process, so a share of an NPU stays that of the start",
    "cuda": "MPS takes a share from the environment that a process starts with, so it stays that of the start",
}


def why_fixed(device: str) -> str:
    """Why the share of a worker on this kind of device stays as long as it runs; "" where it may change."""
    return _FIXED.get(device, "")


@dataclass(frozen=True)
class CoreOrder:
    """What one stage's workers have to do.

    Attributes:
        device: `npu`, `cuda` or `cpu`.
        instance: the stage.
        shares: of all instances on the device, itself included, each above 0, together at most 1; the same mapping in
            the same order for all of them, so that whole cores come out disjoint.
        cores: on CPU, the cores that its OpenMP workers are pinned to.
        enforced: whether anything holds the stage to its share; false on CUDA without MPS.
        report: path of a worker's grant, a template with `{rank}`, or "" for none.
    """

    device: str
    instance: str
    shares: Mapping[str, float]
    cores: tuple[int, ...] = ()
    enforced: bool = True
    report: str = ""

    @property
    def share(self) -> float:
        return self.shares[self.instance]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CoreOrder:
        """What `to_json` made."""
        raw = json.loads(text)
        return cls(**{**raw, "cores": tuple(raw["cores"])})


@dataclass(frozen=True)
class CoreGrant:
    """What one worker has, read back from where it is enforced.

    Attributes:
        rank: of the worker, within its stage.
        share: what was asked for.
        cores: how many of each kind it may use: `{"cube": 7, "vector": 14}`, `{"sm": 39}`, `{"cpu": 2}`.
        total: how many the device has, by kind; empty where that cannot be asked under a limit.
        core_ids: on CPU, which ones.
        enforced: whether anything holds the worker to them.
    """

    rank: int
    share: float
    cores: Mapping[str, int]
    total: Mapping[str, int] = field(default_factory=dict)
    core_ids: tuple[int, ...] = ()
    enforced: bool = True

    def summary(self) -> str:
        """`7 of 24 cube, 14 of 48 vector`, `cores 0-3`, `not enforced`."""
        if not self.enforced:
            return "not enforced"
        if self.core_ids:
            return f"core{'s' if len(self.core_ids) > 1 else ''} {_runs(self.core_ids)}"
        return ", ".join(
            f"{count} of {self.total[kind]} {kind}" if kind in self.total else f"{count} {kind}"
            for kind, count in self.cores.items()
        )


def write_grant(template: str, grant: CoreGrant) -> None:
    """Complete from the moment it has its name. Raises OSError."""
    path = Path(template.format(rank=grant.rank))
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    unnamed.write_text(json.dumps(asdict(grant)), encoding="ascii")
    unnamed.replace(path)


def read_grants(template: str, ranks: int) -> tuple[CoreGrant, ...]:
    """Of a stage's workers, by rank; one that has written nothing, or nothing that is one, is left out."""
    grants = []
    for rank in range(ranks):
        try:
            raw = json.loads(Path(template.format(rank=rank)).read_text(encoding="ascii"))
            grants.append(CoreGrant(**{**raw, "core_ids": tuple(raw["core_ids"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return tuple(grants)


def _runs(ids: tuple[int, ...]) -> str:
    """`0-3,8`."""
    runs: list[list[int]] = []
    for one in sorted(ids):
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
