"""Who else is there: one file on each node, written by whoever starts its stages and read by the stages that need it.

A file and no messages: whoever comes late finds the newest state, and it outlives its writer. It is written before an
instance starts, after a role has changed and after an instance has left for good; one that is down between two lives
stays in it. Readers look once a second, much more often than instances come and go. Nothing correct depends on the
delay: events are hints, and a KV link opens at the latest when a transfer needs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class Peer(msgspec.Struct, frozen=True):
    """One instance as the others see it.

    Attributes:
        role: the part it takes now.
        node: where its devices are.
        devices: their ids there.
        events: ZMQ address on which it announces, or "".
        kv_endpoint: where its scheduler takes READY, or "".
        kv_workers: where its workers take KV, by rank.
        load: where its scheduler reports its load, or "".
        cores: on CPU, those that it is to compute on, where it has a share of its device's; they may change while it
            runs. core_share: that share.
    """

    instance: str
    role: Role
    node: str = "local"
    devices: tuple[int, ...] = ()
    events: str = ""
    kv_endpoint: str = ""
    kv_workers: tuple[str, ...] = ()
    load: str = ""
    cores: tuple[int, ...] = ()
    core_share: float = 0.0

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.kv_endpoint, *self.kv_workers)


def peer_of(instance: Instance, role: Role | None = None) -> Peer:
    """The line of an instance. `role`: the part it takes now, where that is not the one it was started in."""
    return Peer(
        instance.id,
        role or instance.role,
        instance.node,
        instance.devices,
        instance.events or "",
        instance.kv_endpoint or "",
        instance.kv_workers,
        instance.load_news or "",
        instance.cpu_cores if instance.core_share is not None else (),
        instance.core_share or 0.0,
    )


def write_peers(path: Path, peers: Iterable[Peer]) -> None:
    """Replace the file: readers see the former one or this one."""
    written = path.with_name(f"{path.name}.new")
    written.write_bytes(msgspec.json.encode(list(peers)))
    written.replace(path)


class Peers:
    """The file as one stage sees it. Belongs to one thread; nobody is there before the first `changed`.

    Args:
        wiring: says where the file is, and who asks. Without a file there is nobody.
        every_s: how often it is read at most.
    """

    def __init__(self, wiring: StageWiring, *, every_s: float = LOOK_S) -> None:
        self._path = Path(wiring.peers) if wiring.peers else None
        self._me, self._every_s = Peer(wiring.instance, wiring.role, wiring.node), every_s
        self._spans_nodes = wiring.spans_nodes
        self._others: tuple[Peer, ...] = ()
        self._read: bytes | None = None
        self._next_look = 0.0
        self._fresh = True  # nobody has asked yet

    def changed(self) -> bool:
        """Whether there is something new since the last call; true at the first. Looks, if it is time to."""
        now = time.monotonic()
        fresh, self._fresh = self._fresh, False
        if self._path is None or now < self._next_look:
            return fresh
        self._next_look = now + self._every_s
        return self._look(self._path) or fresh

    @property
    def me(self) -> Peer:
        """The asking instance as it is to be now."""
        return self._me

    @property
    def role(self) -> Role:
        """The part that the asking instance takes now."""
        return self._me.role

    def encoders(self) -> frozenset[str]:
        """Addresses on which features are announced."""
        return frozenset(peer.events for peer in self._others if peer.events and peer.role.sends_features)

    def encoders_by_name(self) -> dict[str, bool]:
        """Instances that announce features; of each, whether it shares a device with the asking one."""
        encoders = (peer for peer in self._others if peer.events and peer.role.sends_features)
        return {peer.instance: self._shares_device(peer) for peer in encoders}

    def takers_of_kv(self) -> list[tuple[str, ...]]:
        """Of each instance that the asking one sends KV to now, the addresses of its workers, by rank."""
        if not self.role.sends_kv:
            return []
        return [peer.kv_workers for peer in self._others if peer.kv_workers and peer.role.takes_kv]

    def may_be_at(self, address: str) -> bool:
        """Whether somebody takes KV there, did, or may: whatever part it takes now."""
        return any(address in peer.kv_workers for peer in self._others)

    def beside(self, address: str) -> bool:
        """Whether the instance with this KV address shares a device with the asking one."""
        owner = self._owner(address)
        return owner is not None and self._shares_device(owner)

    def decoders_beside(self) -> Mapping[str, str]:
        """Addresses on which those report their load who decode on a device of the asking one, by instance."""
        beside = (peer for peer in self._others if peer.load and peer.role.decodes and self._shares_device(peer))
        return {peer.instance: peer.load for peer in beside}

    def _shares_device(self, peer: Peer) -> bool:
        return peer.node == self._me.node and bool(set(peer.devices) & set(self._me.devices))

    def together(self, address: str) -> bool | None:
        """Whether the instance with this KV address is on the node of the asking one. None: nobody has it (yet)."""
        if not self._spans_nodes:
            return True
        owner = self._owner(address)
        return None if owner is None else owner.node == self._me.node

    def _owner(self, address: str) -> Peer | None:
        return next((peer for peer in self._others if address in peer.addresses), None)

    def _look(self, path: Path) -> bool:
        try:
            found = path.read_bytes()
            if found == self._read:
                return False
            peers = msgspec.json.decode(found, type=list[Peer])
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read, the former peers stay: %s", path, error)
            return False
        self._read = found
        self._others = tuple(peer for peer in peers if peer.instance != self._me.instance)
        self._me = next((peer for peer in peers if peer.instance == self._me.instance), self._me)
        return True
