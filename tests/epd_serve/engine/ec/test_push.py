"""Features that their encoder writes to the devices of two ranks: real sockets and threads, devices and writes that are
late, fail, or never end.

What a step reads is right whatever becomes of a write, nobody waits for one that does not come, and nothing is put
where one may land. They fail where a fence, a reservation or a quarantine is left out.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.ec import pusher as pusher_module
from epd_serve.engine.ec import slab as slab_module
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.pusher import FeaturePusher
from epd_serve.engine.ec.step import FeatureStep
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.transport import LinkError
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from npu_ops.memory import DeviceBlock, DeviceMemory
from tests.epd_serve.engine.ec.slab_world import NBYTES, ROWS, World, counted
from tests.epd_serve.engine.ec.stages import Stages, feature, is_ready
from tests.epd_serve.engine.ec.vllm_stub import request
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork, Fault
from tests.waiting import PATIENCE_S, wait_for

QUICK_S = 0.3


class Encoder:
    """The worker of an encoder on a device of its own: what it makes is there when its stream gets to it.

    Attributes:
        stores: cleared, nothing of it gets into the store.
    """

    def __init__(self, stages: Stages, endpoint: Callable[[FakeDevice, DeviceBlock], MooncakeEndpoint], **more: Any):
        self.device = FakeDevice("host0/npu9")
        self.device.enter_thread()
        wiring = stages.wiring(
            "E0", Role.E, {}, publish=stages.events("E0"), push=f"ipc://{stages.folder}/E0.push", **more
        )
        self.pusher = FeaturePusher(wiring, self.device, partial(endpoint, self.device), CaptureGate(), write_s=QUICK_S)
        self.worker = FeatureProducer(wiring, self.device, pusher=self.pusher)
        self.stores = threading.Event()
        self.stores.set()
        store = self.worker._store

        def held_up(job: Any, made: torch.Tensor) -> int:
            assert self.stores.wait(PATIENCE_S)
            return store(job, made)

        self.worker._store = held_up  # type: ignore[assignment, method-assign]
        self.cache: dict[str, torch.Tensor] = {}

    def make(self, world: World, *keys: str, rows: int = ROWS) -> None:
        """A step encodes these. vLLM's cache keeps them."""
        for key in keys:
            right = world.right.setdefault(key, feature(rows))
            flat = self.device.allocate(right.numel() * 2).data
            made = flat.view(torch.bfloat16).view(right.shape)
            self.device.run(lambda made=made, right=right: made.copy_(right))
            self.cache[key] = made
            self.worker._metadata[key] = {"image_grid_thw": [[1, 2, 2]]}  # else P would take it without a request
            self.worker.save(self.cache, key)

    def close(self) -> None:
        self.stores.set()
        self.worker.close()


class Card:
    """P, whose slab can be written to, and E. One network joins their engines."""

    def __init__(self, stages: Stages, folder: Path, protocol: str) -> None:
        self.stages, self.folder, self.protocol = stages, folder, protocol
        self.network = FakeNetwork()
        self.e = Encoder(stages, self.endpoint, mooncake_protocol=protocol)
        wait_for(lambda: self.e.pusher._endpoint is not None)
        self.parts: list[Any] = [self.e]

    def endpoint(self, device: FakeDevice, block: DeviceBlock) -> MooncakeEndpoint:
        def engine() -> FakeTransferEngine:
            return FakeTransferEngine(self.network, device)

        return MooncakeEndpoint([block.data], "127.0.0.1", self.protocol, device, engine_factory=engine)

    def world(self, features: float = 4, name: str = "P", **more: Any) -> World:
        folder = self.folder / name
        folder.mkdir()
        more = {"endpoint": self.endpoint, "hears": True, "mooncake_protocol": self.protocol, **more}
        made = World(self.stages, folder, round(features * NBYTES), **more).opened()
        self.parts[:0] = made.ranks
        wait_for(lambda: self.heard(made))
        return made

    def heard(self, world: World) -> bool:
        """Whether P's subscription has reached E."""
        before = counted(world, "events")
        self.e.worker._announcer.announce(wire.FeatureReady("hello", 1, "i", metadata={"of": "no request"}))
        return before > 0

    def make(self, world: World, *keys: str, rows: int = ROWS) -> None:
        """E makes these, and P, for which no request waits for them, has heard of it."""
        self.e.make(world, *keys, rows=rows)
        wait_for(lambda: all(key in world.slab._offers for key in keys))

    def pushes(self, world: World) -> dict[int, Any]:
        pushes: dict[int, Any] = world.slab._pushes
        return pushes

    def done(self, *worlds: World) -> None:
        for world in worlds:
            world.done()
        assert not self.e.device.broken


@pytest.fixture(params=["tcp", "ascend"])
def card(
    request: pytest.FixtureRequest, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Card]:
    monkeypatch.setattr(pusher_module, "PUSH_BYTES", NBYTES // 2)  # a feature takes two slices
    made = Card(stages, tmp_path, request.param)
    yield made
    stages.close()
    for part in made.parts:
        part.close()


@pytest.fixture
def short_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeReceiveSide, "quarantine_s", QUICK_S)
    monkeypatch.setattr(slab_module, "DOUBT_S", 0.0)


def fail(network: FakeNetwork, fault: Fault, times: int = 1) -> None:
    """The next descriptors end so."""
    left = [fault] * times

    def what(descriptor: tuple[int, int, int]) -> Fault:
        return left.pop() if left else Fault.NONE

    network.fault = what


def test_a_step_reads_what_its_encoder_has_written_and_the_store_need_not_have_it(card: Card) -> None:
    w = card.world()
    w.late()
    card.e.device.latency_s = card.network.latency_s = 0.01
    card.e.stores.clear()
    assert not w.may_run("r", "a", "b")
    card.e.make(w, "a", "b")
    step = w.serve("r", "a", "b")
    assert all(load.is_in_slab for load in step.loads)
    card.done(w)
    assert counted(w, "pushed") == 2 and not counted(w, "slab_copied") and not w.arena.contains("a")
    card.e.stores.set()
    wait_for(lambda: w.arena.contains("a") and w.arena.contains("b"), "the store to have them, too")


def test_what_was_made_before_its_request_came_is_written_all_the_same(card: Card) -> None:
    w = card.world()
    card.make(w, "a")
    wait_for(lambda: w.arena.contains("a") and w.slab._offers["a"].stored)
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 1


def test_an_encoder_is_told_where_to_write_when_no_rank_reads_what_lay_there(card: Card) -> None:
    w = card.world(features=1)
    card.make(w, "a", "b")
    w.serve("r", "a")
    gates = [threading.Event() for _ in w.ranks]
    for rank, gate in zip(w.ranks, gates, strict=True):
        rank.device.run(gate.wait)
        rank.step(FeatureStep(), (), ("a",))  # one more step, of a later chunk
    w.p.release(["r"])
    w.run("", freed=("a",))
    assert not w.may_run("s", "b")
    wait_for(lambda: all(rank.device.waited_for() for rank in w.ranks))
    (push,) = card.pushes(w).values()
    assert push.place.copying == {0, 1} and not w.may_run("s", "b")
    gates[0].set()
    wait_for(lambda: push.place.copying == {1})
    gates[1].set()
    assert w.serve("s", "b").loads[0].slots[0].slab_at == 0
    card.done(w)
    assert counted(w, "pushed") == 2


def test_no_request_is_let_through_before_the_last_rank_is_written_to(card: Card) -> None:
    w = card.world()
    card.network.gate.clear()
    card.e.stores.clear()
    card.e.make(w, "a")
    assert not w.may_run("r", "a")
    wait_for(lambda: card.pushes(w) and next(iter(card.pushes(w).values())).place.copying == {-1})
    assert not w.may_run("r", "a") and w.p.waiting()
    card.network.gate.set()
    w.serve("r", "a")
    card.done(w)


def test_an_encoder_writes_what_its_device_has_computed(card: Card) -> None:
    w, gate = card.world(), threading.Event()
    card.e.device.run(gate.wait)
    assert not w.may_run("r", "a")
    card.e.make(w, "a")

    def waiting() -> int:
        return sum(event.at_s is None for event in list(card.e.device.waits))

    wait_for(lambda: waiting() == 2, "the thread that stores, and the one that writes")
    assert not w.may_run("r", "a")
    gate.set()
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 1


def test_what_the_store_of_another_host_has_ends_no_wait_for_a_write(card: Card) -> None:
    """Without a second tier it would have to be computed here instead."""
    w = card.world()
    card.network.gate.clear()
    card.e.stores.clear()
    assert not w.may_run("r", "a")
    card.e.make(w, "a")
    wait_for(lambda: card.pushes(w) and next(iter(card.pushes(w).values())).place.copying == {-1})
    events = counted(w, "events")
    card.e.worker._announcer.announce(wire.FeatureReady("a", NBYTES, "i", "elsewhere", metadata={"not": "empty"}))
    wait_for(lambda: counted(w, "events") > events)
    (push,) = card.pushes(w).values()
    assert not w.may_run("r", "a") and push.due == math.inf and not w.p.features._rows["a"].last_look
    card.network.gate.set()
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 1


def test_a_request_that_comes_later_has_the_feature_of_another_host_written(card: Card) -> None:
    w = card.world()
    card.e.stores.clear()
    card.make(w, "a")
    events = counted(w, "events")
    card.e.worker._announcer.announce(wire.FeatureReady("a", NBYTES, "i", "elsewhere", metadata={"not": "empty"}))
    wait_for(lambda: counted(w, "events") > events)
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 1


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.FAILS_AND_LANDS])
@pytest.mark.usefixtures("short_quarantine")
def test_a_write_that_failed_costs_its_request_the_stores_way_and_lands_on_nobody(card: Card, fault: Fault) -> None:
    w = card.world(features=2)
    card.make(w, "a", "b")
    fail(card.network, fault)
    place = w.serve("r", "a").loads[0].slots[0].slab_at
    assert place != 0, "where it was to be written it may still land"
    assert w.serve("s", "b").loads[0].slots[0].slab_at is None, "there is no more room"
    engine: Any = card.e.device.engine
    engine.land()
    card.done(w)
    assert counted(w, "push_failed") == 1
    wait_for(lambda: not card.pushes(w), "the end of the quarantine")
    w.p.release(["r", "s"])
    card.make(w, "c")
    assert w.serve("t", "c").loads[0].slots[0].slab_at == 0
    card.done(w)
    assert counted(w, "pushed") >= 1


def test_an_encoder_whose_write_failed_is_not_asked_for_a_while(card: Card) -> None:
    w = card.world()
    fail(card.network, Fault.FAILS)
    card.make(w, "a", "b")
    w.serve("r", "a")
    w.serve("s", "b")
    card.done(w)
    assert counted(w, "pushed") == 0 and counted(w, "slab_copied") == 2


def test_a_late_write_is_not_waited_for_and_lands_where_nobody_reads(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "FIRST_S", 0.05)
    card.e.pusher._writes._timeout_s = PATIENCE_S
    w = card.world(features=2)
    card.network.gate.clear()
    card.make(w, "a", "b")
    place = w.serve("r", "a").loads[0].slots[0].slab_at
    assert place != 0 and counted(w, "push_late") == 1
    assert w.serve("s", "b").loads[0].slots[0].slab_at is None, "and its encoder, who owes an answer, is not asked"
    card.done(w)
    card.network.gate.set()
    wait_for(lambda: not card.pushes(w), "the answer")
    card.done(w)
    w.p.release(["r", "s"])
    card.make(w, "c")
    assert w.serve("t", "c").loads[0].slots[0].slab_at == 0
    card.done(w)
    assert counted(w, "pushed") == 1, "it is asked again"


@pytest.mark.usefixtures("short_quarantine")
def test_an_encoder_that_dies_while_it_writes_leaves_a_place_that_is_nobodys_for_a_while(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "DOUBT_S", PATIENCE_S)
    w = card.world(features=3)
    card.network.gate.clear()
    card.make(w, "a")
    assert not w.may_run("r", "a")
    wait_for(lambda: card.pushes(w) and next(iter(card.pushes(w).values())).place.copying == {-1})
    (push,) = card.pushes(w).values()
    card.e.worker._announcer.announce(wire.StoreReport("E0", "another life", 0, 0, 0))
    place = w.serve("r", "a").loads[0].slots[0].slab_at
    assert place != 0 and counted(w, "push_failed") == 1 and push.place.copying == {-1}
    card.e.pusher._made.keywords["incarnation"] = "another life"
    card.network.gate.set()
    card.make(w, "b")
    w.serve("s", "b")
    assert counted(w, "pushed") == 1, "it is asked at once"
    wait_for(lambda: not card.pushes(w) and not push.place.copying, "the end of the quarantine")
    card.done(w)


def test_a_stopped_encoder_may_go_on_much_later(card: Card) -> None:
    """It says nothing, and no other life of it does: it is stopped."""
    w = card.world()
    card.network.gate.clear()
    card.e.pusher._writes._timeout_s = PATIENCE_S
    card.make(w, "a")
    w.serve("r", "a")
    (push,) = card.pushes(w).values()
    assert push.lands_until > slab_module.SILENT_S / 2 and push.place.copying == {-1} and not push.place.key
    card.network.gate.set()
    wait_for(lambda: not card.pushes(w))
    card.done(w)


@pytest.mark.usefixtures("short_quarantine")
def test_an_encoder_that_has_left_is_forgotten(card: Card) -> None:
    w = card.world()
    card.network.gate.clear()
    card.make(w, "a")
    assert not w.may_run("r", "a")
    wait_for(lambda: card.pushes(w) and next(iter(card.pushes(w).values())).place.copying == {-1})
    write_peers(Path(w.p._wiring.peers), [Peer("E7", Role.E, events="ipc:///dev/null/nobody")])
    w.serve("r", "a")
    wait_for(lambda: not card.pushes(w) and not w.slab._encoders)
    card.network.gate.set()
    card.done(w)


def test_another_life_of_p_hears_nothing_of_what_the_former_asked_for(card: Card, stages: Stages) -> None:
    former = card.world(ranks=1)
    card.network.gate.clear()
    card.e.stores.clear()
    card.make(former, "a")
    assert not former.may_run("r", "a")
    wait_for(lambda: any(push.place.copying == {-1} for push in card.pushes(former).values()))
    stages.parts.remove(former.p)
    former.p.close()
    w = card.world(name="next life", ranks=1)
    w.right = former.right
    card.network.gate.set()
    card.make(w, "b")
    w.serve("s", "b")
    card.make(w, "a")
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 2


def test_two_who_prefill_are_each_written_to(card: Card) -> None:
    one, other = card.world(), card.world(name="P1", ranks=1)
    other.right = one.right
    card.e.stores.clear()
    assert not one.may_run("r", "a") and not other.may_run("r", "a")
    card.e.make(one, "a")
    for w in (one, other):
        w.serve("r", "a")
    card.done(one, other)
    assert counted(one, "pushed") == counted(other, "pushed") == 1


def test_what_has_no_room_in_the_slab_comes_from_the_store(card: Card) -> None:
    w = card.world(features=1)
    card.make(w, "a", "b")
    step = w.serve("r", "a", "b")
    assert sorted(load.is_in_slab for load in step.loads) == [False, True]
    card.done(w)
    assert counted(w, "pushed") == 1 and counted(w, "slab_full")


def test_what_the_encoder_has_no_more_comes_from_the_store_and_an_offer_keeps_nothing(card: Card) -> None:
    w = card.world()
    card.make(w, "a")
    wait_for(lambda: w.arena.contains("a") and not card.e.worker._queued)
    card.e.cache.clear()
    wait_for(lambda: card.e.pusher._offers["a"][0]() is None, "nobody to keep the tensor")
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "push_refused") == 1 and counted(w, "slab_copied") == 1


def test_an_order_that_is_old_is_not_carried_out(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gave it may be gone, and its addresses another's."""
    monkeypatch.setattr(pusher_module, "_OLD_S", -1.0)
    w = card.world()
    card.make(w, "a")
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "push_refused") == 1 and counted(w, "slab_copied") == 1


def test_a_corrupt_feature_of_the_store_concerns_nobody_who_was_written_to(card: Card) -> None:
    w = card.world()
    card.make(w, "a")
    wait_for(lambda: w.arena.contains("a"))
    with w.arena.lease("a") as lease:  # type: ignore[union-attr]
        w.arena.memory()[lease.offset] ^= 1
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == 1


def test_what_only_the_slab_has_stays_until_its_request_ends(card: Card) -> None:
    """vLLM may free it from its cache meanwhile, and, where the request is preempted, ask for it again."""
    w = card.world(features=1)
    card.e.stores.clear()
    card.make(w, "a")
    w.serve("r", "a")
    w.run("", freed=("a",))
    w.put("b")
    assert w.serve("s", "b").loads[0].slots[0].slab_at is None
    assert w.run("r", "a").loads[0].slots[0].slab_at == 0
    w.p.release(["r"])
    w.run("", freed=("a",))
    w.put("c")
    assert w.serve("t", "c").loads[0].slots[0].slab_at == 0
    card.done(w)


def test_a_prefix_of_what_only_the_slab_has_is_joined_with_what_the_store_has(card: Card) -> None:
    """Parts of one image, of which one has no room in the slab."""
    w = card.world(features=1)
    card.e.stores.clear()
    parts = ["k#0/2", "k#1/2"]
    card.e.make(w, parts[0])
    assert not w.may_run("x", parts[0])
    wait_for(lambda: is_ready(w.p, parts[0]))
    w.put(parts[1])
    w.serve("r", *parts)
    card.done(w)
    assert counted(w, "pushed") == 1


def test_a_rank_without_mooncake_has_all_features_come_from_the_store(card: Card) -> None:
    def refuses(device: FakeDevice, block: DeviceBlock) -> MooncakeEndpoint:
        if device.place.endswith("1"):
            raise LinkError("Mooncake is not installed")
        return card.endpoint(device, block)

    w = card.world(endpoint=refuses)
    card.make(w, "a")
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "slab_copied") == 1 and not card.pushes(w)


def test_over_ascend_nobody_writes_to_the_device_that_it_is_on(card: Card) -> None:
    w = card.world()
    beside = [Peer("E0", Role.E, devices=(0,), events=card.stages.events("E0")), Peer("P0", Role.P, devices=(0, 1))]
    write_peers(Path(w.p._wiring.peers), beside)
    wait_for(lambda: w.slab._unreachable if card.protocol == "ascend" else True)
    card.make(w, "a")
    w.serve("r", "a")
    card.done(w)
    assert counted(w, "pushed") == (card.protocol == "tcp")


def test_d_begins_when_a_feature_is_made_whether_the_store_has_it_or_not(card: Card) -> None:
    d = card.stages.consumer(role=Role.D, feature_wait_s=PATIENCE_S)
    w = card.world()

    def early() -> bool:
        with d.features.lock:
            d.features.made(["a"], 0.0)
            return d.features.early("r", "a", 0.0)

    wait_for(early)
    card.e.stores.clear()
    card.e.make(w, "a")
    wait_for(lambda: not d.features.early("r", "a", 0.0))


@pytest.mark.usefixtures("short_quarantine")
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_requests_and_faults_reads_right_bytes(card: Card, seed: int) -> None:
    chance, w = random.Random(seed), card.world(features=3)
    w.late(0.002)
    engine: Any = card.e.device.engine
    faults = [Fault.NONE] * 8 + [Fault.FAILS, Fault.FAILS_AND_LANDS, Fault.LATE, Fault.LOST]
    card.network.fault = lambda descriptor: chance.choice(faults)
    cached: list[str] = []
    for turn in range(30):
        keys = [f"{turn}-{index}" for index in range(chance.randint(1, 2))]
        freed = tuple(key for key in cached if chance.random() < 0.6)
        cached = [key for key in cached if key not in freed] + keys
        for key in keys:
            card.make(w, key, rows=chance.choice([ROWS // 4, ROWS // 2, ROWS]))
        w.serve(f"r{turn}", *keys, freed=freed)
        if chance.random() < 0.3:
            engine.land()
        for rank in w.ranks:
            rank.step(FeatureStep(), (), tuple(cached))
        w.p.release([f"r{turn}"])
        for key in keys:
            card.e.cache.pop(key)
    w.done()
    assert counted(w, "pushed") + counted(w, "slab_copied") > 15 and counted(w, "pushed")


@pytest.mark.mooncake
@pytest.mark.slow
def test_over_real_mooncake_features_go_from_memory_to_memory(stages: Stages, tmp_path: Path) -> None:
    from epd_serve.engine.ec.pusher import endpoint_of
    from epd_serve.engine.ec.slab_copier import SlabCopier
    from npu_ops.torch_memory import HostMemory

    memory: DeviceMemory = HostMemory()
    wiring = stages.wiring("E0", Role.E, {}, publish=stages.events("E0"), push=f"ipc://{tmp_path}/E0.push")
    pusher = FeaturePusher(wiring, memory, endpoint_of(wiring, memory), CaptureGate())
    e = FeatureProducer(wiring, memory, pusher=pusher)
    stages.parts.append(e)
    p = stages.consumer(role=Role.P, slab=f"ipc://{tmp_path}/slab")
    copier = SlabCopier(f"ipc://{tmp_path}/slab", 0, memory, stages.arena, CaptureGate(), endpoint_of(wiring, memory))
    copier.open(1 << 20)
    slab: Any = p._slab
    wait_for(lambda: slab._places is not None and pusher._endpoint is not None)
    stages.heard(e, p)
    made = {"a": feature(256)}
    e.save(made, "a")
    wait_for(lambda: p.may_run(request("r", "a"), 0))
    assert p.has("a")
    p.allocated(request("r", "a"), "a")
    (load,) = p.step(()).loads
    assert load.is_in_slab and p.features.counters["pushed"] >= 1
    assert torch.equal(load.read(stages.arena, memory, copier.view), made["a"])
    copier.close()
