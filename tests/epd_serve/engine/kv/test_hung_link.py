"""A link's thread that hangs for ever: both ends get their blocks back. P and D but for vLLM, on fake devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine import compat, vital_thread
from epd_serve.engine.kv import worker as worker_module
from epd_serve.engine.kv.decode_scheduler import DecodeScheduler
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.prefill_scheduler import PrefillScheduler
from epd_serve.engine.kv.worker import DecodeWorker, KVCache, PrefillWorker
from epd_serve.kv.ways import MOONCAKE, SHM
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops import fences
from npu_ops.fake.device import FakeDevice
from npu_ops.fake.engine import FakeTransferEngine
from npu_ops.fake.network import FakeNetwork
from tests.epd_serve.engine.kv.fakes import request, scheduled
from tests.epd_serve.engine.kv.slow_devices import BLOCK_SIZE, BLOCKS, LAYERS, ascend_caches
from tests.waiting import wait_for

PROMPT = 3 * BLOCK_SIZE
SILENCE_S = 0.5
HUNG_S = 1.5  # longer than the second that a link's thread sleeps


class Stages:
    """One P and one D. The calling thread is that of both models. `over`: requests whose blocks vLLM has back."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
        self.p_device, self.d_device = FakeDevice("host0/npu0"), FakeDevice("host0/npu1")
        self.ended: list[str] = []  # why P's process has, as often as it should have
        self.over: set[str] = set()
        self._network, self._patch = FakeNetwork(), monkeypatch
        self._asked: dict[str, tuple[Any, Any]] = {}
        for device in (self.p_device, self.d_device):
            device.enter_thread()
        facts = {"platform_fingerprint": "x", "total_kv_heads": 1, "kv_cache_layout": "", "tp_rank": 0}
        for name, value in facts.items():
            monkeypatch.setattr(compat, name, lambda *_, value=value: value)
        monkeypatch.setattr(worker_module, "MooncakeEndpoint", self._endpoint)
        monkeypatch.setattr(vital_thread, "end_stage", self._end_p)
        write_peers(folder / "peers.json", [Peer("D0", Role.D, kv_workers=(f"ipc://{folder}/D0.kvw0",))])
        self._p_wiring = StageWiring(
            "P0",
            Role.P,
            "p1",
            kv_endpoint=f"ipc://{folder}/P0.kv",
            kv_staging=str(folder / "staging"),
            kv_transport=transport,
            kv_peer_timeout_s=2 * HUNG_S,
            peers=str(folder / "peers.json"),
        )
        self._d_wiring = StageWiring(
            "D0",
            Role.D,
            "d1",
            kv_worker_endpoint=f"ipc://{folder}/D0.kvw{{rank}}",
            kv_transport=transport,
            kv_peer_timeout_s=SILENCE_S,
        )
        self.d_worker = self._worker(DecodeWorker, self._d_wiring, self.d_device)
        self.d = DecodeScheduler(self._d_wiring, BLOCK_SIZE, 1, lambda endpoint: SILENCE_S)
        self.p = PrefillScheduler(self._p_wiring, BLOCK_SIZE, 1)

    def start_p(self) -> None:
        self.p_worker = self._worker(PrefillWorker, self._p_wiring, self.p_device)

    def wait_up(self) -> None:
        wait_for(lambda: [link.state for link in self.p_worker._report().links] == ["up"], "the link", 20)

    def send(self, name: str, block: int) -> None:
        """A request comes to both; P computes its prompt, vLLM finishes it there, and its KV is on its way."""
        peer = {"instance": "P0", "incarnation": "p1", "endpoint": self._p_wiring.kv_endpoint}
        at_d = request(name, PROMPT, {"transfer_id": name, "peer": peer}, suffix="ffffffff")
        at_p = request(name, PROMPT, {"transfer_id": name, "incarnation": "p1"})
        table = list(range(block, block + 3))
        self._asked[name] = at_p, at_d
        self.d.queued(at_d)
        self.d.reserve(at_d, SimpleNamespace(get_block_ids=lambda: (table,)), self.d.tokens_to_load(at_d, 0))
        self.step_d()
        wait_for(lambda: self.p.may_run(at_p), "D's offer", 20)
        self.p_worker.begin_step(self.p.step(scheduled(new=[(at_p.request_id, table, 0, PROMPT)])))
        for layer in range(LAYERS):
            self.p_worker.layer_saved(f"model.layers.{layer}.attn")
        self.p_worker.end_step()
        keep, _ = self.p.finished(at_p)
        assert keep, "P keeps the blocks until its worker is through with them"

    def leave(self, name: str) -> None:
        """The client of this request leaves; vLLM keeps D's blocks until the worker reports them."""
        self.d.finished(self._asked[name][1])

    def step_d(self) -> bool:
        """Whether D has all blocks back, after a step that computes nothing."""
        self.d_worker.begin_step(self.d.step(scheduled()))
        finished = self.d_worker.take_finished()
        self.d.received(finished)
        self.over |= finished
        return {at_d.request_id for _, at_d in self._asked.values()} <= self.over

    def close(self) -> None:
        self.p_device.release()
        self.p_worker.close()
        for part in (self.p, self.d, self.d_worker):
            part.close()

    def _end_p(self, reason: str) -> None:
        """All of P's memory is its process's, and its scheduler says nothing any more."""
        self.ended.append(reason)
        self.p.close()

    def _endpoint(self, layers: Any, host: str, protocol: str, device: FakeDevice, scratch: Any) -> MooncakeEndpoint:
        engine = partial(FakeTransferEngine, self._network, device)
        return MooncakeEndpoint(layers, host, "ascend", device, scratch, engine)

    def _worker(self, kind: Any, wiring: StageWiring, device: FakeDevice) -> Any:
        self._patch.setattr(worker_module, "memory_here", lambda kind: device)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        worker = kind(wiring)
        worker.register(KVCache(wiring, config, BLOCKS, ascend_caches(device)))
        return worker


@pytest.fixture
def transport() -> str:
    return SHM


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> Iterator[Stages]:
    monkeypatch.setattr(vital_thread, "HUNG_S", HUNG_S)
    made = Stages(tmp_path, monkeypatch, transport)
    yield made
    made.close()


def assert_both_are_free(stages: Stages, reason: str) -> None:
    """Of two requests on the link, one of which its client left meanwhile."""
    stages.leave("left")
    wait_for(lambda: stages.ended, "P to end", 20)
    assert reason in stages.ended[0]
    wait_for(stages.step_d, "D's blocks", 20)
    assert not stages.d_device.broken


def send_two(stages: Stages) -> None:
    stages.send("stays", 0)
    stages.send("left", 3)


def test_a_fence_that_is_never_reached(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    stages.start_p()
    stages.wait_up()
    gate = threading.Event()
    monkeypatch.setattr(fences, "DEADLINE_S", HUNG_S)
    stages.p_device.run(gate.wait)
    send_two(stages)
    assert_both_are_free(stages, "DeviceHungError")
    gate.set()


@pytest.mark.parametrize(
    ("transport", "call"),
    [(SHM, "wait"), (SHM, "gather"), (MOONCAKE, "wait"), (MOONCAKE, "write"), (MOONCAKE, "check a write")],
)
def test_a_call_that_does_not_return(stages: Stages, call: str) -> None:
    """Of the device, or of Mooncake."""
    stages.start_p()
    stages.wait_up()
    stages.p_device.hang(call)
    send_two(stages)
    assert_both_are_free(stages, "has hung for")


def test_a_device_that_never_lets_the_thread_in(stages: Stages) -> None:
    stages.p_device.hang("enter_thread")
    stages.start_p()
    send_two(stages)
    assert_both_are_free(stages, "has hung for")


def test_a_device_that_refuses_the_thread(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.p_device, "enter_thread", lambda: stages.p_device.allocate(1))
    stages.start_p()
    wait_for(lambda: stages.ended, "P to end", 20)
    assert "which has not set the device" in stages.ended[0]


def test_a_link_that_waits_for_its_peer_does_not_hang(stages: Stages) -> None:
    stages.d_worker.close()
    stages.start_p()
    wait_for(lambda: stages.p_worker._report().links[0].reason, "an attempt that fails later than it would hang", 20)
    assert not stages.ended
