"""Features from device to device on the fake device: right under its rules, wrong as soon as one is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from epd_serve.engine.ec import device_probe
from epd_serve.engine.ec.device_fetch import FeatureAgent
from epd_serve.engine.ec.device_probe import ArenaNeed, Path
from epd_serve.engine.ec.device_source import DeviceSource
from npu_ops.fake.device import FakeDevice
from npu_ops.fake.fabric import FakeFabric
from npu_ops.memory import DeviceMemoryError
from store.errors import CorruptFeatureError, StoreError, StoreFullError
from tests.epd_serve.engine.ec.device_stages import Consumer, Encoder, FabricTier
from tests.epd_serve.engine.kv.slow_devices import Turnstile
from tests.waiting import PATIENCE_S, wait_for

LATENCY_S, STEP_S = 0.003, 0.3
E_NPU, P_NPUS = "host0/npu0", ["host0/npu1", "host0/npu2"]


class Rig:
    """Stages of one test, closed after it."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.parts: list[Consumer] = []

    def encoder(self, device: FakeDevice | None = None, tier: type[FabricTier] = FabricTier, **more: Any) -> Encoder:
        device = device or FakeDevice(E_NPU, latency_s=LATENCY_S)
        return Encoder(device, tier(self.fabric, device), **more)

    def consumer(
        self, *devices: FakeDevice, places: list[str] = P_NPUS, tier: type[FabricTier] = FabricTier, **more: Any
    ) -> Consumer:
        mine = list(devices) or [FakeDevice(place, latency_s=LATENCY_S) for place in places]
        self.parts.append(Consumer(mine, [tier(self.fabric, device) for device in mine], **more))
        return self.parts[-1]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(device_probe, "_PAUSE_S", 0.01)  # what is not reached is tried again, later and later
    made = Rig()
    yield made
    made.fabric.gate.set()
    for part in made.parts:
        part.close()


def loaded(consumer: Consumer, key: str, expected: torch.Tensor) -> None:
    pin = consumer.fetch(key, expected.nbytes)
    assert pin is not None, consumer.failures
    for rank, device in enumerate(consumer.devices):
        feature = consumer.load(pin, rank)
        device.fence()()
        assert torch.equal(feature, expected)
    pin.release()


# --- what it does --------------------------------------------------------------------------------------------------


def test_a_feature_reaches_the_memory_of_every_rank_and_no_rule_is_broken(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer()
    assert consumer.meet("e1") == (Path.DEVICE, "")
    for seed in range(5):
        loaded(consumer, f"k{seed}", encoder.put(f"k{seed}", seed))
    assert not encoder.device.broken and not any(device.broken for device in consumer.devices)


def test_a_feature_that_is_here_is_pinned_without_asking_anybody(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer()
    loaded(consumer, "k", encoder.put("k"))
    fetches = len(consumer.tiers[0].fetches)
    pin = consumer.source.try_local("k")
    assert pin is not None and consumer.source.try_local("other") is None
    loaded(consumer, "k", encoder.encode(0)[2])
    assert len(consumer.tiers[0].fetches) == fetches
    pin.release()
    assert consumer.source.pinned_bytes() == 0


def test_a_feature_of_unknown_size_is_fetched_again_with_enough_room(rig: Rig, monkeypatch: Any) -> None:
    monkeypatch.setattr("epd_serve.engine.ec.device_ledger.GUESSED_BYTES", 4096)
    encoder, consumer = rig.encoder(), rig.consumer()
    expected = encoder.put("k", rows=64)
    pin = consumer.fetch("k")
    assert pin is not None and pin.nbytes == expected.nbytes and pin.shape == (64, 128)
    pin.release()
    wait_for(lambda: consumer.source.pinned_bytes() == 0)


def test_a_missing_feature_is_missing_and_a_corrupt_one_is_corrupt(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer()
    assert consumer.fetch("never", 4096) is None
    expected = encoder.put("k")
    rig.fabric.objects["k@device1"][0][777] ^= 4
    assert consumer.fetch("k", expected.nbytes) is None
    assert consumer.failures == [("never", "missing"), ("k", "corrupt")]
    wait_for(lambda: consumer.source.pinned_bytes() == 0)


def test_one_rank_that_fails_keeps_the_feature_from_all(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer()
    expected = encoder.put("k")
    consumer.tiers[1].late = True
    assert consumer.fetch("k", expected.nbytes) is None and consumer.failures == [("k", "unavailable")]
    assert consumer.source.try_local("k") is None
    loaded(consumer, "k", expected)


def test_a_place_that_a_late_transfer_may_still_write_is_not_used_again_before_it_has_ended(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer()
    expected = encoder.put("k")
    wait_for(consumer.source.capacity_bytes)
    rig.fabric.gate.clear()
    for tier in consumer.tiers:
        tier.late = True
    assert consumer.fetch("k", expected.nbytes) is None
    pause = threading.Event()
    pause.wait(0.1)
    assert consumer.source.pinned_bytes() > 0
    rig.fabric.gate.set()
    wait_for(lambda: consumer.source.pinned_bytes() == 0)


def test_a_fetch_past_its_deadline_fails_and_its_place_comes_back_when_the_owner_does(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer(wait_s=0.2)
    expected = encoder.put("k")
    wait_for(consumer.source.capacity_bytes)
    rig.fabric.gate.clear()
    assert consumer.fetch("k", expected.nbytes) is None and consumer.failures == [("k", "deadline")]
    assert consumer.source.pinned_bytes() > 0
    rig.fabric.gate.set()
    wait_for(lambda: consumer.source.pinned_bytes() == 0)
    consumer.source._ledger.wait_s = PATIENCE_S  # type: ignore[union-attr]
    loaded(consumer, "k", expected)


def test_a_full_slab_says_so_and_serves_on_when_pins_go(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer(slab_bytes=2 << 20)
    rows = (1 << 20) // 256  # 1 MiB each; with trailers only one fits
    first, second = encoder.put("a", 1, rows), encoder.put("b", 2, rows)
    pin = consumer.fetch("a", first.nbytes)
    assert pin is not None
    assert consumer.fetch("b", second.nbytes) is None and consumer.failures == [("b", "full")]
    pin.release()
    loaded(consumer, "b", second)


@pytest.mark.slow
def test_many_features_through_a_small_slab_are_all_right(rig: Rig) -> None:
    encoder, consumer = rig.encoder(), rig.consumer(slab_bytes=2 << 20)
    for seed in range(24):
        loaded(consumer, f"k{seed}", encoder.put(f"k{seed}", seed, rows=500 + 97 * seed))


def test_a_full_outbox_makes_the_writer_wait_and_then_refuses(rig: Rig) -> None:
    encoder = rig.encoder(slab_bytes=2 << 20, wait_s=0.05)
    rig.fabric.gate.clear()
    encoder.tier.late = True
    with pytest.raises(StoreError, match="no answer"):
        encoder.put("a", rows=(1 << 20) // 256)
    with pytest.raises(StoreFullError):
        encoder.put("b", rows=(1 << 20) // 256)
    rig.fabric.gate.set()
    assert encoder.outbox is not None
    wait_for(lambda: encoder.outbox is not None and encoder.outbox.waiting_bytes() == 0)
    encoder.put("c", rows=(1 << 20) // 256)


@pytest.fixture
def source(rig: Rig) -> Iterator[DeviceSource]:
    """Blocking manners, on two ranks."""
    devices = [FakeDevice(place) for place in P_NPUS]
    endpoints = [f"inproc://source-{id(device)}" for device in devices]
    agents = [
        FeatureAgent(
            device,
            lambda device=device: FabricTier(rig.fabric, device),  # type: ignore[misc]
            endpoint=endpoint,
            rank=rank,
            incarnation="p1",
            slab_bytes=2 << 20,
        )
        for rank, (device, endpoint) in enumerate(zip(devices, endpoints, strict=True))
    ]
    made = DeviceSource(endpoints, incarnation="p1", wait_s=PATIENCE_S, on_path=lambda encoder, path, reason: None)
    wait_for(made.features.capacity_bytes)
    yield made
    made.close()
    for agent in agents:
        agent.close()


def test_a_blocking_fetch_answers_as_the_pool_does(rig: Rig, source: DeviceSource) -> None:
    encoder = rig.encoder()
    expected = encoder.put("k")
    assert source.lease_local("k") is None and source.fetch("never") is None
    pin = source.fetch("k", expected.nbytes)
    assert pin is not None and pin.nbytes == expected.nbytes
    encoder.put("bad")
    rig.fabric.objects["bad@device1"][0][0] ^= 1
    with pytest.raises(CorruptFeatureError):
        source.fetch("bad", expected.nbytes)
    with pytest.raises(StoreFullError):
        source.fetch("large", 4 << 20)
    pin.release()
    wait_for(lambda: source.features.pinned_bytes() == 0)


def test_threads_that_want_the_same_feature_share_one_fetch_and_have_a_pin_each(rig: Rig, source: DeviceSource) -> None:
    expected = rig.encoder().put("k")
    with ThreadPoolExecutor(8) as threads:
        pins = list(threads.map(lambda _: source.fetch("k", expected.nbytes), range(8)))
    assert all(pin is not None for pin in pins)
    for pin in pins[1:]:
        assert pin is not None
        pin.release()
    assert source.features.pinned_bytes() > 0
    assert pins[0] is not None
    pins[0].release()
    assert source.features.pinned_bytes() == 0


# --- which way -----------------------------------------------------------------------------------------------------


def test_a_pair_on_one_npu_takes_the_arena_and_is_told_so_at_start(rig: Rig) -> None:
    rig.encoder()
    consumer = rig.consumer(places=[E_NPU])
    path, reason = consumer.meet("e1")
    assert path is Path.ARENA and "self device" in reason and consumer.source.path("e1") is Path.ARENA


def test_a_pair_on_one_npu_with_a_new_cann_needs_no_arena(rig: Rig) -> None:
    rig.fabric.connects_with_self = True
    rig.encoder()
    assert rig.consumer(places=[E_NPU]).meet("e1") == (Path.DEVICE, "")


def test_an_encoder_that_never_put_its_probe_is_reached_through_the_arena(rig: Rig) -> None:
    path, reason = rig.consumer().meet("e0")
    assert path is Path.ARENA and reason.startswith("missing")


def test_workers_that_cannot_register_their_slab_keep_the_instance_on_the_arena(rig: Rig) -> None:
    class Refuses(FabricTier):
        def register(self, address: int, nbytes: int) -> None:
            raise StoreError("registering failed")

    encoder, consumer = rig.encoder(), rig.consumer(tier=Refuses)
    path, reason = consumer.meet("e1")
    assert path is Path.ARENA and reason.endswith(": registering failed")
    encoder.put("k")
    consumer.source.fetch("k", 1)
    wait_for(lambda: consumer.failures == [("k", "unavailable")])


def test_the_arena_is_needed_until_every_consumer_reaches_the_encoder() -> None:
    need = ArenaNeed("e1")
    need.expect(["P0", "P1"])
    need.hear("P0", "e1", "device")
    need.hear("P1", "e0", "device")
    assert need.needed
    need.hear("P1", "e1", "device")
    assert not need.needed
    need.hear("P1", "e1", "arena")
    assert need.needed


def test_one_that_comes_later_needs_the_arena_until_it_has_said_and_one_that_left_does_not() -> None:
    need = ArenaNeed("e1")
    need.expect(["P0"])
    need.hear("P0", "e1", "device")
    assert not need.needed
    need.expect(["P0", "P1"])
    assert need.needed
    need.expect(["P0"])
    assert not need.needed


def test_where_nobody_says_who_listens_the_first_that_reaches_the_encoder_stands_for_all() -> None:
    need = ArenaNeed("e1")
    assert need.needed
    need.hear("P7", "e1", "device")
    assert not need.needed
    need.hear("P8", "e1", "arena")
    assert need.needed


# --- what each rule is for: leave one out and something breaks -------------------------------------------------------


def serves(rig: Rig, encoder: Callable[[], Encoder], consumer: Callable[[], Consumer]) -> list[str]:
    """Runs features through a small slab, loads late, and says all that went wrong."""
    wrong: list[str] = []
    devices: list[FakeDevice] = []
    try:
        e = encoder()
        devices.append(e.device)
        p = consumer()
        devices += p.devices
        if p.meet("e1")[0] is not Path.DEVICE:
            return [f"path: {p.paths['e1']}", *[rule for device in devices for rule in device.broken]]
        late: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        steps = [Turnstile() for _ in p.devices]
        for step in steps:
            step.close()

        def somebody_waits() -> None:
            for device, step in zip(p.devices, steps, strict=True):
                if step.holds and device.waited_for():
                    step.let_one()

        p.meanwhile = somebody_waits
        for seed in range(4):
            expected = e.put(f"k{seed}", seed, rows=3000)  # 768 KB: two fit, so places are soon used again
            pin = p.fetch(f"k{seed}", expected.nbytes)
            if pin is None:
                wrong.append(f"k{seed}: {p.failures[-1]}")
                continue
            for rank, device in enumerate(p.devices):
                device.enter_thread()
                device.run(steps[rank].hold)  # the model is at another step yet
                late.append((p.load(pin, rank), expected, f"k{seed} rank {rank}"))
            pin.release()  # the copy is only queued: the place is free, its bytes are still wanted
        for device, step in zip(p.devices, steps, strict=True):
            step.open()
            device.fence()()
        wrong += [name for feature, expected, name in late if not torch.equal(feature, expected)]
    except (StoreError, DeviceMemoryError) as error:
        wrong.append(str(error))
    return wrong + [rule for device in devices for rule in device.broken]


class NoWait(FakeDevice):
    """Whoever fences this device forgets to wait."""

    def fence(self) -> Callable[[], None]:
        super().fence()
        return lambda: None


class NoAlignment(FakeDevice):
    alignment = 512


class NoSetDevice(FakeDevice):
    """Threads of this name forget to set it."""

    forgetful = ""

    def enter_thread(self) -> None:
        if not threading.current_thread().name.startswith(self.forgetful):
            super().enter_thread()


class ForgetfulWriter(NoSetDevice):
    forgetful = "writer"


class ForgetfulAgent(NoSetDevice):
    forgetful = "epd-feature-agent"


class ForgetfulFetcher(NoSetDevice):
    forgetful = "epd-feature-fetch"


class NoRegistration(FabricTier):
    def register(self, address: int, nbytes: int) -> None:
        """Forgotten."""


class EncoderWithoutFeatureWait(Encoder):
    """Its writer does not wait until the step has written the feature."""

    def encode(self, seed: int, rows: int = 64) -> tuple[torch.Tensor, Callable[[], None], torch.Tensor]:
        feature, _, expected = super().encode(seed, rows)
        return feature, lambda: None, expected


def test_with_every_rule_kept_nothing_goes_wrong(rig: Rig) -> None:
    assert serves(rig, rig.encoder, lambda: rig.consumer(slab_bytes=2 << 20)) == []


def _encoder_without_feature_wait(rig: Rig) -> Encoder:
    device = FakeDevice(E_NPU, latency_s=LATENCY_S)
    return EncoderWithoutFeatureWait(device, FabricTier(rig.fabric, device))


ENCODERS: dict[str, Callable[[Rig], Encoder]] = {
    "E does not wait for the step that writes the feature": _encoder_without_feature_wait,
    "E does not wait for its copy before the put": lambda rig: rig.encoder(NoWait(E_NPU, latency_s=LATENCY_S)),
    "E's slab is not aligned": lambda rig: rig.encoder(NoAlignment(E_NPU)),
    "E's writer does not set the device": lambda rig: rig.encoder(ForgetfulWriter(E_NPU)),
    "E's slab is not registered": lambda rig: rig.encoder(tier=NoRegistration),
}
CONSUMERS: dict[str, Callable[[Rig], Consumer]] = {
    "P does not wait for loads before their place is written": lambda rig: rig.consumer(
        _no_load_wait(), slab_bytes=2 << 20
    ),
    "P's slab is not aligned": lambda rig: rig.consumer(NoAlignment(P_NPUS[0])),
    "P's agent does not set the device": lambda rig: rig.consumer(ForgetfulAgent(P_NPUS[0]), wait_s=0.5),
    "P's fetcher does not set the device": lambda rig: rig.consumer(ForgetfulFetcher(P_NPUS[0]), wait_s=0.5),
    "P's slab is not registered": lambda rig: rig.consumer(tier=NoRegistration, places=P_NPUS[:1], wait_s=0.5),
}


def _no_load_wait() -> FakeDevice:
    class Forgets(FakeDevice):
        def fence(self) -> Callable[[], None]:
            real = super().fence()
            fetcher = "epd-feature-fetch"
            return lambda: None if threading.current_thread().name.startswith(fetcher) else real()

    return Forgets(P_NPUS[0], latency_s=LATENCY_S)


@pytest.mark.parametrize("mistake", ENCODERS)
def test_a_rule_that_the_encoder_breaks_is_noticed(rig: Rig, mistake: str) -> None:
    assert serves(rig, lambda: ENCODERS[mistake](rig), lambda: rig.consumer(places=P_NPUS[:1])), mistake


@pytest.mark.parametrize("mistake", CONSUMERS)
def test_a_rule_that_the_consumer_breaks_is_noticed(rig: Rig, mistake: str) -> None:
    assert serves(rig, rig.encoder, lambda: CONSUMERS[mistake](rig)), mistake
