"""A P and a D on fake devices, whole but for vLLM: schedulers and workers, over real sockets. For the tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_serve.engine import compat, vital_thread
from epd_serve.engine.kv import worker as worker_module
from epd_serve.engine.kv.decode_scheduler import DecodeScheduler
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.prefill_scheduler import PrefillScheduler
from epd_serve.engine.kv.worker import DecodeWorker, KVCache, PrefillWorker
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from tests.epd_serve.engine.kv.fakes import request, scheduled
from tests.epd_serve.engine.kv.slow_devices import BLOCK_SIZE, BLOCKS, LAYERS, Caches, ascend_caches
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork
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
        self.p_caches, self.d_caches = ascend_caches(self.p_device), ascend_caches(self.d_device)
        for cache in self.caches(self.p_caches):
            cache.random_()
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
        self.d_worker = self._worker(DecodeWorker, self._d_wiring, self.d_device, self.d_caches)
        self.d = DecodeScheduler(self._d_wiring, BLOCK_SIZE, 1, lambda endpoint: SILENCE_S)
        self.p = PrefillScheduler(self._p_wiring, BLOCK_SIZE, 1)

    def start_p(self) -> None:
        self.p_worker = self._worker(PrefillWorker, self._p_wiring, self.p_device, self.p_caches)

    def wait_up(self) -> None:
        wait_for(lambda: [link.state for link in self.p_worker._report().links] == ["up"], "the link", 20)

    def send(self, name: str, block: int, *, step_d: bool = True) -> None:
        """A request comes to both; P computes its prompt, vLLM finishes it there, and its KV is on its way.

        Args:
            step_d: D's worker hears of the request before P has computed it; else `step_d` has it do so.
        """
        peer = {"instance": "P0", "incarnation": "p1", "endpoint": self._p_wiring.kv_endpoint}
        at_d = request(name, PROMPT, {"transfer_id": name, "peer": peer}, suffix="ffffffff")
        at_p = request(name, PROMPT, {"transfer_id": name, "incarnation": "p1"})
        table = list(range(block, block + 3))
        self._asked[name] = at_p, at_d
        self.d.queued(at_d)
        self.d.reserve(at_d, SimpleNamespace(get_block_ids=lambda: (table,)), self.d.tokens_to_load(at_d, 0))
        if step_d:
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

    def same(self, blocks: range) -> bool:
        """Whether these blocks of D's hold what P's of the same numbers do."""
        both = zip(self.caches(self.p_caches), self.caches(self.d_caches), strict=True)
        return all(
            torch.equal(mine[blocks.start : blocks.stop], theirs[blocks.start : blocks.stop]) for mine, theirs in both
        )

    @staticmethod
    def caches(of: Caches) -> list[torch.Tensor]:
        return [region for layer in of.values() for region in layer]

    def close(self) -> None:
        self.p_device.release()
        self.p_worker.close()
        for part in (self.p, self.d, self.d_worker):
            part.close()

    def _end_p(self, reason: str) -> None:
        """All of P's memory is its process's, and its scheduler says nothing any more."""
        self.ended.append(reason)
        self.p.close()

    def _endpoint(self, regions: Any, host: str, protocol: str, device: FakeDevice, scratch: Any) -> MooncakeEndpoint:
        engine = partial(FakeTransferEngine, self._network, device)
        return MooncakeEndpoint(regions, host, "ascend", device, scratch, engine)

    def _worker(self, kind: Any, wiring: StageWiring, device: FakeDevice, caches: Caches) -> Any:
        self._patch.setattr(worker_module, "memory_here", lambda kind: device)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        worker = kind(wiring)
        worker.register(KVCache(wiring, config, BLOCKS, dict(caches)))
        return worker
