"""The workers under vLLM put together, on real sockets: what vLLM gives them in, KV at D and reports out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from epd_serve import wire
from epd_serve.engine import compat
from epd_serve.engine.kv import worker as worker_module
from epd_serve.engine.kv.decode_scheduler import DecodeStep
from epd_serve.engine.kv.prefill_scheduler import PrefillStep
from epd_serve.engine.kv.receiver import Expected
from epd_serve.engine.kv.sender import ChunkJob
from epd_serve.engine.kv.worker import DecodeWorker, KVCache, PrefillWorker
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.kv.transport_selection import MOONCAKE, SHM
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wire import TransferKey
from epd_serve.wiring import StageWiring
from tests.fake_npu.device import FakeDevice
from tests.waiting import PATIENCE_S, wait_for

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, WIDTH = 3, 8, 4, 16, 8
KEY = TransferKey("t", "r")


class Cluster:
    """A P and a D of any tensor-parallel sizes; workers of P write, workers of D are empty. No heads: as of MLA."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, p_tp: int, d_tp: int, heads: int = HEADS) -> None:
        self.has_heads = heads > 0
        self.kv = torch.randn(LAYERS, BLOCKS, *((heads,) if heads else ()), BLOCK_SIZE, WIDTH)
        self.p_tp, self.d_tp = p_tp, d_tp
        self.endpoints = tuple(f"ipc://{folder}/D0.kvw{rank}" for rank in range(d_tp))
        self.news = f"ipc://{folder}/P0.news"
        self.peers = folder / "peers.json"
        self.tell(Peer("D0", Role.D, kv_workers=self.endpoints))
        common = {"kv_staging_bytes": 1 << 20, "kv_peer_timeout_s": PATIENCE_S}
        sending = StageWiring(
            "P0",
            Role.P,
            "p1",
            peers=str(self.peers),
            kv_staging=str(folder / "staging"),
            kv_publish=f"{self.news}{{rank}}",
            traffic=str(folder / "P0.traffic"),
            kv_packet_floor_bytes=1,
            **common,
        )
        taking = StageWiring("D0", Role.D, "d1", kv_worker_endpoint=f"ipc://{folder}/D0.kvw{{rank}}", **common)
        self.d = [self._worker(monkeypatch, DecodeWorker, taking, d_tp, rank) for rank in range(d_tp)]
        self.p = [self._worker(monkeypatch, PrefillWorker, sending, p_tp, rank) for rank in range(p_tp)]

    def _worker(self, monkeypatch: pytest.MonkeyPatch, kind: Any, wiring: StageWiring, tp: int, rank: int) -> Any:
        monkeypatch.setattr(compat, "tp_rank", lambda: rank)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        )
        worker = kind(wiring)
        worker.register(KVCache(wiring, config, BLOCKS, self.caches(tp, rank, empty=kind is DecodeWorker)))
        return worker

    def tell(self, *others: Peer) -> None:
        """Who is there besides P."""
        write_peers(self.peers, others)

    def links(self) -> dict[str, str]:
        """State of P's links by the instance or address at their other end."""
        return {link.peer: link.state for worker in self.p for link in worker._report().links}

    def heads(self, tp: int, rank: int) -> slice:
        return slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)

    def caches(self, tp: int, rank: int, *, empty: bool) -> dict[str, torch.Tensor]:
        mine = [layer[:, self.heads(tp, rank)].contiguous() if self.has_heads else layer.clone() for layer in self.kv]
        made = {str(index): torch.zeros_like(layer) if empty else layer for index, layer in enumerate(mine)}
        if empty:
            self.at_d = getattr(self, "at_d", [])
            self.at_d.append(made)
        return made

    def prefill(self, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
        """One step computes the whole prompt, and vLLM finishes the request."""
        for worker in self.p:
            job = ChunkJob(KEY, "at-p", "D0:d1", self.endpoints, src, dst, 0)
            worker.begin_step(PrefillStep(chunks=[job], tokens=BLOCK_SIZE * len(src)))
            for layer in range(LAYERS):
                worker.layer_saved(str(layer))
            worker.end_step()

    def close(self) -> None:
        for worker in (*self.p, *self.d):
            worker.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    _, _, heads = (*request.param, HEADS)[:3]
    for name, value in {"platform_fingerprint": "test", "total_kv_heads": heads, "kv_cache_layout": "LBHNC"}.items():
        monkeypatch.setattr(compat, name, lambda *_, value=value: value)
    made = Cluster(tmp_path, monkeypatch, *request.param)
    yield made
    made.close()
    assert not list(tmp_path.glob("staging*")), "staging memory remains"


def sizes(*pairs: tuple[int, int]) -> Any:
    return pytest.mark.parametrize("cluster", pairs, indirect=True, ids=[f"tp{p} to tp{d}" for p, d in pairs])


@sizes((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
def test_kv_arrives_at_the_ranks_whose_heads_it_is(cluster: Cluster) -> None:
    src, dst = (2, 3, 5), (6, 1, 2)
    for worker in cluster.d:
        worker.begin_step(DecodeStep(expected=[Expected(KEY, "at-d", dst)]))
    cluster.prefill(src, dst)
    for worker in cluster.d:
        assert wait_for(worker.take_finished) == {"at-d"}
        assert worker.take_bad_blocks() == set()
    for rank, caches in enumerate(cluster.at_d):
        heads = cluster.heads(cluster.d_tp, rank)
        for index, cache in enumerate(caches.values()):
            assert torch.equal(cache[list(dst)], cluster.kv[index][list(src), heads])
            untouched = [block for block in range(BLOCKS) if block not in dst]
            assert not cache[untouched].any()
    for worker in cluster.p:
        assert wait_for(lambda worker=worker: worker.take_over({"at-p"})) == {"at-p"}
        assert worker.take_over(set()) == set()


@pytest.mark.parametrize("cluster", [(1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 0)], indirect=True)
def test_a_cache_without_heads_arrives_whole_at_every_rank(cluster: Cluster) -> None:
    src, dst = (2, 3, 5), (6, 1, 2)
    for worker in cluster.d:
        worker.begin_step(DecodeStep(expected=[Expected(KEY, "at-d", dst)]))
    cluster.prefill(src, dst)
    for worker, caches in zip(cluster.d, cluster.at_d, strict=True):
        assert wait_for(worker.take_finished) == {"at-d"}
        for index, cache in enumerate(caches.values()):
            assert torch.equal(cache[list(dst)], cluster.kv[index][list(src)])
    for worker in cluster.p:
        assert wait_for(lambda worker=worker: worker.take_over({"at-p"})) == {"at-p"}


@sizes((1, 1))
def test_what_the_scheduler_gave_up_is_reported_with_its_blocks_in_one_pass(cluster: Cluster) -> None:
    (worker,) = cluster.d
    worker.begin_step(DecodeStep(expected=[Expected(KEY, "at-d", (6, 1))]))
    assert worker.take_finished() == set()
    worker.begin_step(DecodeStep(failed=[KEY]))
    assert worker.take_finished() == {"at-d"}
    assert worker.take_bad_blocks() == {6, 1}
    assert worker.take_bad_blocks() == set()


@sizes((1, 2))
def test_links_are_open_and_reported_before_any_request(cluster: Cluster) -> None:
    ear = zmq.Context.instance().socket(zmq.SUB)
    ear.setsockopt(zmq.SUBSCRIBE, b"")
    ear.connect(f"{cluster.news}0")
    try:

        def up() -> wire.KvReport | None:
            while ear.poll(50):
                report = wire.announcements.decode(ear.recv())
                assert isinstance(report, wire.KvReport)
                if len(report.links) == 2 and all(link.state == "up" for link in report.links):
                    return report
            return None

        report = wait_for(up)
    finally:
        ear.close(linger=0)
    assert (report.instance, report.incarnation, report.rank, report.grouping) == ("P0", "p1", 0, "adaptive")
    assert {(link.rank, link.transport) for link in report.links} == {(0, "shm"), (1, "shm")}


@sizes((1, 1))
def test_a_running_p_opens_links_to_who_comes_and_closes_those_to_whoever_has_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    wait_for(lambda: cluster.links() == {"D0": "up"})
    (staging,) = tmp_path.glob("staging*")
    later = tuple(f"{endpoint}-later" for endpoint in cluster.endpoints)
    cluster.tell(Peer("D1", Role.D, kv_workers=later))
    wait_for(lambda: cluster.links() == {later[0]: "opening"})
    wait_for(lambda: not staging.exists(), "the staging memory of the link to D0 to be free")


@sizes((1, 1))
def test_what_has_yet_to_leave_is_open_although_its_transfer_has_not_begun(cluster: Cluster) -> None:
    (worker,) = cluster.p
    told = [worker._report().open]
    for kept in (1, 0):
        worker.begin_step(PrefillStep(kept=kept))
        told.append(worker._report().open)
    assert told == [0, 1, 0]


@sizes((1, 1))
def test_a_peer_that_takes_the_other_part_now_keeps_its_link(cluster: Cluster) -> None:
    wait_for(lambda: cluster.links() == {"D0": "up"})
    cluster.tell(Peer("D0", Role.P, kv_workers=cluster.endpoints), Peer("D1", Role.D, kv_workers=("ipc:///nobody",)))
    wait_for(lambda: cluster.links() == {"D0": "up", "ipc:///nobody": "opening"})


@pytest.mark.parametrize(("kind", "role"), [(PrefillWorker, Role.P), (DecodeWorker, Role.D)])
@pytest.mark.parametrize("host_visible", [False, True])
def test_a_workers_memory_is_taken_when_it_registers_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, role: Role, host_visible: bool
) -> None:
    """Not when a link opens: a device that serves has none to spare. P stages none where the CPU reads the cache."""
    device = FakeDevice()
    monkeypatch.setattr(device, "host_visible", host_visible)
    device.enter_thread()
    monkeypatch.setattr(worker_module, "memory_here", lambda kind: device)
    monkeypatch.setattr(worker_module, "offered", lambda *arguments, **more: (MOONCAKE, SHM))
    monkeypatch.setattr(compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(compat, "total_kv_heads", lambda config: 1)
    monkeypatch.setattr(compat, "kv_cache_layout", lambda config: "")
    monkeypatch.setattr(compat, "platform_fingerprint", lambda: "test")
    wiring = StageWiring("X0", role, "x1", kv_worker_endpoint=f"ipc://{tmp_path}/X0.kvw{{rank}}")
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    worker = kind(wiring)
    cache = device.allocate(BLOCKS * 64).data.view(BLOCKS, 64)
    before = device.allocated_bytes
    try:
        worker.register(KVCache(wiring, config, BLOCKS, {"layer.0": cache}))
        staging_bytes = 0 if role is Role.P and host_visible else SLICE_BYTES
        assert device.allocated_bytes - before == staging_bytes + LARGEST_PROBE_BYTES
    finally:
        worker.close()
