"""Which way KV goes between the instances of one launch, and why: decided per pair, before the start. Pure.

A pair on one NPU never depends on a connection of that NPU with itself: its KV goes through shared memory. What is
decided here is probed when the stages start (`link_connection.py`); `GET /instances` shows what each link came to.
Device IPC is not built (docs/guides/kv-links.md, "Pairs on one device").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.options.config import DeployConfig
from epd_serve.errors import ConfigError
from epd_serve.kv.transport_selection import MOONCAKE, SHM, transports_between
from epd_serve.placement import InstancePlan

SAME_NPU_FROM = (9, 1)
"""CANN whose HIXL connects two processes on one NPU (Mooncake #3453). Never run by us, so only on request."""

_SHOWN = 4


@dataclass(frozen=True)
class KvWay:
    """One pair. `transports`: in order of preference. `beside`: it shares a device. `apart`: it is on two nodes."""

    sender: str
    taker: str
    transports: tuple[str, ...]
    beside: bool
    apart: bool = False


@dataclass(frozen=True)
class Ways:
    """Of one launch. `kv`: every pair of instances that exchange KV."""

    kv: tuple[KvWay, ...] = ()

    @property
    def apart(self) -> list[str]:
        """Pairs that exchange KV between two nodes."""
        return [f"{one.sender}→{one.taker}" for one in self.kv if one.apart]

    def lines(self) -> list[str]:
        """For people: one line per way, with the pairs that go it."""
        lines = []
        for way in dict.fromkeys((one.transports, one.beside, one.apart) for one in self.kv):
            pairs = [f"{one.sender}→{one.taker}" for one in self.kv if (one.transports, one.beside, one.apart) == way]
            where = " (one device)" if way[1] else " (two nodes)" if way[2] else ""
            lines.append(f"KV {_few(pairs)}: {_NAMES[way[0]]}{where}")
        return lines


_NAMES = {
    (SHM,): "shared memory",
    (MOONCAKE,): "Mooncake",
    (MOONCAKE, SHM): "Mooncake, and shared memory where a probe fails",
}


def draw_ways(
    config: DeployConfig,
    device: str,
    plans: Sequence[InstancePlan],
    *,
    cann: tuple[int, ...] = (),
    node_of: Callable[[InstancePlan], str] = lambda plan: "",
) -> Ways:
    """Decide all of it.

    Args:
        cann: numbers of the installed CANN's version; empty: none, or unknown.
        node_of: tells the node of an instance, "" while that is not known; all are on one if it is not given.

    Raises:
        ConfigError: a way is asked for that cannot be.
    """
    kv = tuple(_kv_ways(config, device, plans, node_of))
    if config.kv_transport == SHM and (pairs := [f"{way.sender}→{way.taker}" for way in kv if way.apart]):
        raise ConfigError(
            f"--kv-transport shm: {_few(pairs)} are on two nodes, where KV takes Mooncake; use --kv-transport auto",
            param="kv_transport",
        )
    if device == "npu" and config.kv_transport == MOONCAKE:
        _check_same_npu([way for way in kv if way.beside], cann)
    return Ways(kv)


def _kv_ways(
    config: DeployConfig, device: str, plans: Sequence[InstancePlan], node_of: Callable[[InstancePlan], str]
) -> list[KvWay]:
    ways = []
    for sender in plans:
        for taker in plans:
            if sender.sends_kv and taker.takes_kv and sender is not taker:
                nodes = {node_of(sender), node_of(taker)}
                apart = len(nodes) > 1 and "" not in nodes
                beside = device != "cpu" and bool(set(sender.devices) & set(taker.devices))
                names = (MOONCAKE,) if apart else transports_between(config.kv_transport, device, colocated=beside)
                ways.append(KvWay(sender.id, taker.id, names, beside, apart))
    return ways


def _check_same_npu(beside: Sequence[KvWay], cann: tuple[int, ...]) -> None:
    """Raises ConfigError where Mooncake alone is to join a pair that it cannot join."""
    if beside and cann < SAME_NPU_FROM:
        pairs = _few([f"{way.sender}→{way.taker}" for way in beside])
        found = f"CANN {'.'.join(map(str, cann))}" if cann else "an unknown CANN"
        raise ConfigError(
            f"--kv-transport mooncake: {pairs} share an NPU, which {found} cannot connect with itself (9.1 with HIXL "
            "can); use --kv-transport auto, where such pairs take shared memory and others Mooncake",
            param="kv_transport",
        )


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
