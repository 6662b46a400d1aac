"""Which way KV goes between the instances of one launch, and why: decided per pair, before the start. Pure.

A pair on one NPU never depends on a connection of that NPU with itself: its KV goes through shared memory. What is
decided here is probed when the stages start (`link_connection.py`); `GET /instances` shows what each link came to.
Device IPC is not built (docs/guides/kv-links.md, "Pairs on one device").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.options.config import DeployConfig
from deploy.options.versions import SAME_NPU_FROM, spelled
from epd_serve.errors import ConfigError
from epd_serve.kv.transport_selection import MOONCAKE, SHM, transports_between
from epd_serve.placement import InstancePlan

_SHOWN = 4


@dataclass(frozen=True)
class KvWay:
    """One pair. `transports`: in order of preference. `beside`: it shares a device. `apart`: it is on two nodes."""

    sender: str
    taker: str
    transports: tuple[str, ...]
    beside: bool
    apart: bool = False

    @property
    def pair(self) -> str:
        return f"{self.sender}→{self.taker}"

    def __str__(self) -> str:
        """How KV goes, for people."""
        return _NAMES[self.transports] + (" (one device)" if self.beside else " (two nodes)" if self.apart else "")


@dataclass(frozen=True)
class Ways:
    """Of one launch. `kv`: every pair of instances that exchange KV."""

    kv: tuple[KvWay, ...] = ()

    @property
    def apart(self) -> list[str]:
        """Pairs that exchange KV between two nodes."""
        return [one.pair for one in self.kv if one.apart]

    def lines(self) -> list[str]:
        """For people: one line per way, with the pairs that go it."""
        pairs: dict[str, list[str]] = {}
        for one in self.kv:
            pairs.setdefault(str(one), []).append(one.pair)
        return [f"KV {_few(some)}: {way}" for way, some in pairs.items()]


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
    ways = Ways(
        tuple(
            _way(config, device, sender, taker, {node_of(sender), node_of(taker)})
            for sender in plans
            for taker in plans
            if sender.sends_kv and taker.takes_kv and sender is not taker
        )
    )
    if config.kv_transport == SHM and ways.apart:
        raise ConfigError(
            f"--kv-transport shm: {_few(ways.apart)} are on two nodes, where KV takes Mooncake; use --kv-transport "
            "auto",
            param="kv_transport",
        )
    beside = [way.pair for way in ways.kv if way.beside]
    if beside and device == "npu" and config.kv_transport == MOONCAKE and cann < SAME_NPU_FROM:
        found = f"CANN {spelled(cann)}" if cann else "an unknown CANN"
        raise ConfigError(
            f"--kv-transport mooncake: {_few(beside)} share an NPU, which {found} cannot connect with itself (9.1 with "
            "HIXL can); use --kv-transport auto, where such pairs take shared memory and others Mooncake",
            param="kv_transport",
        )
    return ways


def _way(config: DeployConfig, device: str, sender: InstancePlan, taker: InstancePlan, nodes: set[str]) -> KvWay:
    apart = len(nodes) > 1 and "" not in nodes
    beside = device != "cpu" and bool(set(sender.devices) & set(taker.devices))
    transports = (MOONCAKE,) if apart else transports_between(config.kv_transport, device, colocated=beside)
    return KvWay(sender.id, taker.id, transports, beside, apart)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
