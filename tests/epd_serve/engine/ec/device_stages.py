"""An encoder and a consumer of several ranks on fake devices, whole but for vLLM and Mooncake. For the tests here."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from epd_serve.engine.ec.device_features import DeviceFeatures
from epd_serve.engine.ec.device_fetch import FeatureAgent
from epd_serve.engine.ec.device_ledger import DevicePin
from epd_serve.engine.ec.device_outbox import DeviceOutbox
from epd_serve.engine.ec.device_probe import Path
from epd_serve.engine.ec.device_trailer import FeatureShape
from npu_ops.fake.device import FakeDevice
from npu_ops.fake.fabric import FakeFabric, FakePort, SameDeviceError
from store.errors import StoreError
from tests.waiting import PATIENCE_S, wait_for

SLAB = 4 << 20


class FabricTier:
    """A `DeviceTier` on the fake fabric. `late`: its next fetch or put is given up at once and goes on behind."""

    def __init__(self, fabric: FakeFabric, device: FakeDevice) -> None:
        self.device = device
        self.port = FakePort(fabric, device)
        self.fetches: list[str] = []
        self.late = False

    def register(self, address: int, nbytes: int) -> None:
        self.port.register(address, nbytes)

    def put_from(self, key: str, address: int, nbytes: int, settled: Callable[[], None]) -> bool:
        return self._call(lambda: self.port.put(key, address, nbytes), settled)

    def fetch_into(self, key: str, address: int, capacity: int, settled: Callable[[], None]) -> int | None:
        self.fetches.append(key)
        return self._call(lambda: self.port.fetch(key, address, capacity), settled)

    def _call(self, call: Callable[[], Any], settled: Callable[[], None]) -> Any:
        if self.late:
            self.late = False

            def go_on() -> None:
                self.device.enter_thread()
                call()
                settled()

            threading.Thread(target=go_on, daemon=True).start()
            raise StoreError("no answer in time")
        try:
            return call()
        except SameDeviceError as error:
            raise StoreError(str(error)) from error
        finally:
            settled()


@dataclass
class Consumer:
    """Scheduler side and `ranks` workers of one instance; what came of its fetches."""

    devices: list[FakeDevice]
    tiers: list[FabricTier]
    slab_bytes: int = SLAB
    wait_s: float = PATIENCE_S
    fetchers: int = 2
    pins: dict[str, list[DevicePin]] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    meanwhile: Callable[[], object] = lambda: None  # what else goes on while a fetch is waited for
    paths: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = uuid.uuid4().hex
        endpoints = [f"inproc://agent-{name}-{rank}" for rank in range(len(self.devices))]
        self.agents = [
            FeatureAgent(
                device,
                lambda tier=tier: tier,  # type: ignore[misc]
                endpoint=endpoint,
                rank=rank,
                incarnation="p1",
                slab_bytes=self.slab_bytes,
                fetchers=self.fetchers,
            )
            for rank, (device, tier, endpoint) in enumerate(zip(self.devices, self.tiers, endpoints, strict=True))
        ]
        self.source = DeviceFeatures(
            endpoints,
            incarnation="p1",
            wait_s=self.wait_s,
            on_pinned=lambda pin: self.pins.setdefault(pin.key, []).append(pin),
            on_failed=lambda key, cause, reason: self.failures.append((key, cause)),
            on_path=lambda encoder, path, reason: self.paths.update({encoder: (path, reason)}),
        )

    def meet(self, encoder: str) -> tuple[Path, str]:
        self.source.meet(encoder)
        verdict: tuple[Path, str] = wait_for(lambda: self.paths.get(encoder))
        return verdict

    def fetch(self, key: str, nbytes: int = 0) -> DevicePin | None:
        """A pin, or None and a new entry in `failures`."""
        wait_for(self.source.capacity_bytes)
        pins, failures = len(self.pins.get(key, [])), len(self.failures)
        self.source.fetch(key, nbytes)

        def ended() -> bool:
            self.meanwhile()
            return len(self.pins.get(key, [])) > pins or len(self.failures) > failures

        wait_for(ended)
        return self.pins[key][-1] if len(self.pins.get(key, [])) > pins else None

    def load(self, pin: DevicePin, rank: int) -> torch.Tensor:
        """As the model of a rank does it; the copy is queued, not done."""
        self.devices[rank].enter_thread()
        return self.agents[rank].load(pin.offset, pin.nbytes, FeatureShape(pin.shape, pin.dtype))

    def close(self) -> None:
        self.source.close()
        for agent in self.agents:
            agent.close()


class Encoder:
    """A model thread that computes features, each when somebody waits for it, and a writer thread that puts them."""

    def __init__(
        self, device: FakeDevice, tier: FabricTier, slab_bytes: int = SLAB, wait_s: float = PATIENCE_S
    ) -> None:
        self.device = device
        self.tier = tier
        self.outbox: DeviceOutbox | None = None
        self._args = {"slab_bytes": slab_bytes, "incarnation": "e1", "wait_s": wait_s}
        self.in_writer(self._open)

    def _open(self) -> None:
        self.outbox = DeviceOutbox(self.device, self.tier, **self._args)  # type: ignore[arg-type]
        self.outbox.offer_probe()

    def encode(self, seed: int, rows: int = 64) -> tuple[torch.Tensor, Callable[[], None], torch.Tensor]:
        """A feature that the device is still computing, the wait for it, and what it will be."""
        self.device.enter_thread()
        expected = torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        block = self.device.allocate(expected.nbytes)
        feature = block.data.view(torch.bfloat16).view(rows, 128)

        wanted = self._wanted = threading.Event()

        def compute() -> None:
            assert wanted.wait(PATIENCE_S)
            feature.copy_(expected)

        self.device.run(compute)
        fence = self.device.fence()

        def written() -> None:
            wanted.set()
            fence()

        return feature, written, expected

    def put(self, key: str, seed: int = 0, rows: int = 64) -> torch.Tensor:
        """Encodes and puts; what was put."""
        feature, written, expected = self.encode(seed, rows)
        assert self.outbox is not None
        outbox = self.outbox
        try:
            self.in_writer(lambda: outbox.put(key, feature, written))
        finally:
            self._wanted.set()  # where the writer did not wait for it
        return expected

    def in_writer(self, work: Callable[[], Any]) -> None:
        """On a thread that has no stream and no device yet; raises what it raised."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

        thread = threading.Thread(target=run, name="writer")
        thread.start()
        thread.join()
        if raised:
            raise raised[0]
