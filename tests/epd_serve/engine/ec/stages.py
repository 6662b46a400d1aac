"""What the feature tests share: an arena, E workers and P schedulers on real sockets, a second tier in memory."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.features import State
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureStep, NeededItem
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.memory import DeviceMemory
from store.arena import Arena, Lease
from store.errors import StoreError
from store.feature_pool import FeaturePool
from tests.waiting import PATIENCE_S, wait_for

CAPACITY = 64 << 10


def make_arena(name: str = "") -> Arena:
    return Arena.create(Path(f"/dev/shm/epd-test-{os.getpid()}-{uuid.uuid4().hex}{name}"), CAPACITY, slots=32)


def feature(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 16).to(torch.bfloat16)


def needed(*keys: str, again: bool = False, held: bool = True, **metadata: Any) -> FeatureStep:
    """A step of an encoder in which a request for `keys` arrives."""
    items = [NeededItem(key, metadata, again) for key in keys]
    return FeatureStep(needed=items, held=list(keys) if held else [])


class Speechless(FeatureProducer):
    """An encoder's worker that tells a test, not consumers, what becomes of its features."""

    def __init__(
        self, pool: FeaturePool, tell: Callable[..., None], *, memory: DeviceMemory | None = None,
        bound_bytes: int = 1 << 20, **more: float,
    ) -> None:  # fmt: skip
        self._words = tell
        wiring = StageWiring("E0", Role.E, "i", feature_queue_bytes=bound_bytes)
        super().__init__(wiring, memory, pool, **more)

    def put(self, key: str, encoded: torch.Tensor) -> None:
        self.save({key: encoded}, key)
        self._cache = {}

    def _tell(self, key: str, event: str, nbytes: int = 0, *, pooled: bool = False, reason: str = "") -> None:
        if event != "encoded":
            self._words(key, event, nbytes, pooled=pooled, reason=reason)


class Stages:
    """E workers and P schedulers of one launch; `hears=False` keeps a P from hearing E."""

    def __init__(self, arena: Arena, folder: Path) -> None:
        self.arena, self.folder = arena, folder
        self.parts: list[Any] = []

    def wiring(self, instance: str, role: Role, hears: dict[str, str], **more: Any) -> StageWiring:
        """`hears`: addresses by instance, whose names begin with their role."""
        peers = self.folder / f"{instance}.peers.json"
        write_peers(peers, [Peer(name, Role(name[0]), events=address) for name, address in hears.items()])
        fields = {"arena": str(self.arena.path), "arena_id": "here", "peers": str(peers), "feature_wait_s": PATIENCE_S}
        return StageWiring(instance, role, "i", **{**fields, **more})

    def events(self, instance: str) -> str:
        return f"ipc://{self.folder}/{instance}.events"

    def producer(self, *, pool: Any = None, hears: dict[str, str] | None = None, **more: Any) -> FeatureProducer:
        wiring = self.wiring("E0", Role.E, hears or {}, **{"publish": self.events("E0"), **more})
        self.parts.append(FeatureProducer(wiring, pool=pool))
        return self.parts[-1]

    def consumer(
        self, *, hears: bool = True, pool: Any = None, role: Role = Role.P, ranks: int = 1, **more: Any
    ) -> FeatureConsumer:
        events = {"E0": self.events("E0")} if hears else {}
        self.parts.append(FeatureConsumer(self.wiring("P0", role, events, **more), pool, ranks=ranks))
        return self.parts[-1]

    def heard(self, e: FeatureProducer, p: FeatureConsumer) -> None:
        """Waits until P's subscription has reached E: events before it are lost."""
        cache = {"hello": torch.ones(1)}

        def heard() -> bool:
            e.save(cache, "hello")
            return p.features.counters["events"] > 0

        wait_for(heard)

    def ear(self, instance: str = "E0") -> Ear:
        self.parts.append(Ear(self.events(instance)))
        return self.parts[-1]

    def close(self) -> None:
        close_all(self.parts)
        self.parts.clear()


def close_all(parts: Sequence[Any]) -> None:
    """Side by side: to leave a Mooncake Store takes two seconds, for each."""
    with ThreadPoolExecutor(max(1, len(parts))) as threads:
        for closed in [threads.submit(part.close) for part in parts]:
            closed.result(PATIENCE_S)


class Ear:
    """Hears what one stage announces."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.heard: list[wire.Announcement] = []

    def listen(self) -> list[wire.Announcement]:
        while self._socket.poll(0):
            self.heard.append(wire.announcements.decode(self._socket.recv()))
        return self.heard

    def of(self, kind: type, **fields: Any) -> list[Any]:
        """Announcements of this kind so far, with these fields."""
        found = [event for event in self.listen() if isinstance(event, kind)]
        return [event for event in found if all(getattr(event, name) == value for name, value in fields.items())]

    def close(self) -> None:
        self._socket.close(linger=0)


class Mouth:
    """Announces as an encoder does, whatever a test wants."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(endpoint)

    def say(self, *messages: wire.Announcement) -> None:
        for message in messages:
            self._socket.send(wire.encode(message))

    def say_until(self, condition: Callable[[], Any], *messages: wire.Announcement) -> None:
        """Subscriptions take a moment: said again until it has the effect."""

        def said() -> Any:
            self.say(*messages)
            return condition()

        wait_for(said)

    def close(self) -> None:
        self._socket.close(linger=0)


class Remote:
    """A second tier in memory, with the faults of a real one. `gate` holds fetches up, `trouble` is raised."""

    def __init__(self) -> None:
        self.features: dict[str, tuple[bytes, tuple[int, ...], str]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.trouble: StoreError | None = None
        self.state = "up"
        self.fetches: list[str] = []

    def ask(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class TwoTiers(FeaturePool):
    """The pool of one host whose second tier is a `Remote`."""

    def __init__(self, arena: Arena, remote: Remote) -> None:
        super().__init__(Arena.attach(arena.path))
        self.remote = remote

    @property
    def state(self) -> Any:
        return self.remote.state

    def publish(self, key: str) -> bool:
        self.remote.ask()
        lease = self.arena.lease(key)
        if lease is None:
            return False
        with lease:
            self.remote.features[key] = (bytes(lease.view()), lease.meta.shape, lease.meta.dtype)
        return True

    def fetch(self, key: str) -> Lease | None:
        self.remote.fetches.append(key)
        assert self.remote.gate.wait(PATIENCE_S)
        self.remote.ask()
        if key not in self.remote.features:
            return None
        data, shape, dtype = self.remote.features[key]
        self.arena.put(key, data, shape=shape, dtype=dtype)
        return self.arena.lease(key)


def is_ready(p: FeatureConsumer, key: str) -> bool:
    """Whether it was seen here, whole."""
    with p.features.lock:
        return key in p.features._rows and p.features._rows[key].state is State.READY


def settled(p: FeatureConsumer, *keys: str, request: str = "r", within_s: float = PATIENCE_S) -> None:
    wait_for(lambda: p.settled(request, keys), f"{request} to be settled", within_s)
