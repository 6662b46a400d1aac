"""Which way features and KV go between the instances of one launch, and why: decided per pair, before the start. Pure.

A pair on one NPU never depends on a connection of that NPU with itself: features go through the arena, KV through
shared memory. What is decided here is probed when the stages start (`link_connection.py`, `device_probe.py`); `GET
/instances` shows what each link came to. Device IPC is not built (docs/guides/kv-links.md, "Pairs on one device").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.options.config import DeployConfig
from epd_serve.errors import ConfigError
from epd_serve.kv.ways import MOONCAKE, SHM, transports_between
from epd_serve.placement import InstancePlan

SAME_NPU_FROM = (9, 1)
"""CANN whose HIXL connects two processes on one NPU (Mooncake #3453). Never run by us, so only on request."""

_DIRECT_KINDS = ("npu", "cpu")  # on CPU device memory is host memory: for tests of the path
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
    """Of one launch.

    Attributes:
        features: `host` (through the arena) or `device` (straight into device memory), by instance id. `host` where
            nothing is said.
        reasons: why an instance that takes features takes them through the host.
        kv: every pair of instances that exchange KV.
        encoders: ids of those that only encode.
    """

    features: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    kv: tuple[KvWay, ...] = ()
    encoders: frozenset[str] = frozenset()

    def feature_path(self, instance: str) -> str:
        return self.features.get(instance, "host")

    @property
    def widest_feature_path(self) -> str:
        """`device` where any instance keeps device memory for features."""
        return "device" if "device" in self.features.values() else "host"

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
        direct = [name for name, path in self.features.items() if path == "device" and name not in self.encoders]
        if direct:
            lines.append(f"features to {_few(direct)}: straight into device memory, once a probe came through")
        for reason in dict.fromkeys(self.reasons.values()):
            lines.append(f"features to {_few([name for name, why in self.reasons.items() if why == reason])}: {reason}")
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
    pooled: bool,
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
    features, reasons = _feature_ways(config, device, plans, pooled=pooled)
    return Ways(features, reasons, kv, frozenset(plan.id for plan in plans if plan.role.sends_features))


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
                names = (MOONCAKE,) if apart else transports_between(config.kv_transport, device, beside=beside)
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


def _feature_ways(
    config: DeployConfig, device: str, plans: Sequence[InstancePlan], *, pooled: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """By instance id: the paths, and why they go through the host where they do not have to.

    One path for all: an encoder beside one taker has to put every feature into the arena for it, and the other takers
    of this host find it there, before or after a second copy reaches their device memory. Writing both would cost the
    encoder and be used by chance.
    """
    senders = [plan for plan in plans if plan.role.sends_features]
    takers = [plan for plan in plans if plan.role.takes_features]
    asked = config.feature_path
    if asked == "device" and not pooled:
        raise ConfigError("feature_path device needs --mm-store mooncake", param="feature_path")
    if asked == "device" and device not in _DIRECT_KINDS:
        raise ConfigError(f"feature_path device is for NPUs, not for {device}", param="feature_path")
    if asked != "auto" or not pooled or device != "npu":
        return {plan.id: asked if asked == "device" else "host" for plan in (*senders, *takers)}, {}
    concerned = [plan.id for plan in (*senders, *takers)]
    encoding = {one for plan in senders for one in plan.devices}
    beside = [plan.id for plan in takers if encoding & set(plan.devices)]
    if beside:
        reason = f"the host's arena ({_few(beside)} {'share' if len(beside) > 1 else 'shares'} an NPU with an encoder)"
        return {}, dict.fromkeys([plan.id for plan in takers], reason)
    return dict.fromkeys(concerned, "device"), {}


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
