"""The device path for real: two processes, host memory as device memory, Mooncake Store over TCP between them."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import torch

from epd_serve.engine.ec.device_features import DeviceFeatures
from epd_serve.engine.ec.device_fetch import FeatureAgent
from epd_serve.engine.ec.device_ledger import DevicePin
from epd_serve.engine.ec.device_outbox import DeviceOutbox
from epd_serve.engine.ec.device_probe import Path as FeaturePath
from epd_serve.engine.ec.device_tier import MooncakeTier
from epd_serve.engine.ec.device_trailer import FeatureShape
from npu_ops.torch_memory import HostMemory
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore
from tests.waiting import wait_for

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

ROWS = [16, 1196, 2691]  # up to 1080p of Qwen2.5-VL-7B
HIDDEN = 3584


def feature(seed: int) -> torch.Tensor:
    return torch.randn(ROWS[seed], HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def encoder_process(master: str, ready: Any, done: Any) -> None:
    """E: puts from its slab, then stays, because the features lie in its segment."""
    memory = HostMemory()
    store = MooncakeStore.connect(
        MooncakeConfig(master=master, segment_bytes=128 << 20), begin_thread=memory.enter_thread
    )
    outbox = DeviceOutbox(memory, MooncakeTier(store), slab_bytes=64 << 20, incarnation="e1")
    outbox.offer_probe()
    for seed in range(len(ROWS)):
        made = feature(seed)
        outbox.put(f"k{seed}", made, memory.fence())
        assert outbox.waiting_bytes() == 0
    ready.set()
    done.wait(60)
    store.close()


def test_features_go_from_the_slab_of_one_process_into_the_slabs_of_another(master: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Event(), spawn.Event()
    encoder = spawn.Process(target=encoder_process, args=(master, ready, done))
    encoder.start()
    memory = HostMemory()
    store = MooncakeStore.connect(MooncakeConfig(master=master), begin_thread=memory.enter_thread)
    endpoints = [f"inproc://mooncake-agent-{rank}" for rank in range(2)]
    agents = [
        FeatureAgent(
            memory, lambda: MooncakeTier(store), endpoint=address, rank=rank, incarnation="p1", slab_bytes=64 << 20
        )
        for rank, address in enumerate(endpoints)
    ]
    pins: dict[str, DevicePin] = {}
    failures: list[tuple[str, str, str]] = []
    paths: dict[str, FeaturePath] = {}
    heard = threading.Lock()

    def on_path(encoder: str, path: FeaturePath, reason: str) -> None:
        with heard:
            paths[encoder] = path

    source = DeviceFeatures(
        endpoints,
        incarnation="p1",
        wait_s=10.0,
        on_pinned=lambda pin: pins.update({pin.key: pin}),
        on_failed=lambda key, cause, reason: failures.append((key, cause, reason)),
        on_path=on_path,
    )
    try:
        assert ready.wait(60)
        source.meet("e1")
        assert wait_for(lambda: paths.get("e1")) is FeaturePath.DEVICE
        for seed in range(len(ROWS)):
            expected = feature(seed)
            source.fetch(f"k{seed}", expected.nbytes if seed != 1 else 0)  # of one nobody announced the size
        source.fetch("never")
        wait_for(lambda: len(pins) == len(ROWS) and failures)
        assert [(key, cause) for key, cause, _ in failures] == [("never", "missing")]
        for seed in range(len(ROWS)):
            pin = pins[f"k{seed}"]
            for agent in agents:
                loaded = agent.load(pin.offset, pin.nbytes, FeatureShape(pin.shape, pin.dtype))
                assert torch.equal(loaded, feature(seed))
            pin.release()
        assert source.pinned_bytes() == 0
    finally:
        source.close()
        for agent in agents:
            agent.close()
        done.set()
        encoder.join(20)
        store.close()
    assert encoder.exitcode == 0
