"""Device operations as transfers ask for them, held against the CPU's: the protocol of `npu_ops/memory.py` on a card.

In this order: memory and copies, fences and streams, page-locked host memory, gather and scatter, the proofs that
`npu_ops` makes before it trusts a kernel. Rates are of the device's own events where it has them.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from npu_ops.blocks import BlockRun, Blocks, gather_by_copies, proves_blocks, scatter_by_copies
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import open_memory
from store.arena import Arena
from tests.npu.rig import Rig

MIB = 1 << 20
COPIES = 8
FENCE_S = 10.0
FENCES = 200
CASES = 60
ROUNDS = 20
LAYERS, BLOCKS, BLOCK_BYTES = 16, 512, 16 << 10
"""A packet of 16 rows of 32 blocks that a free list has handed out: 8 MiB, never two adjacent ones."""
RUNS = [BlockRun(first, 1) for first in range(BLOCKS - 2, BLOCKS - 2 - 64, -2)]


def run(rig: Rig) -> None:
    memory = open_memory(rig.card.kind)
    memory.enter_thread()
    for what in (
        _addresses,
        _round_trip,
        _strided,
        _fence_between_threads,
        _fence_times,
        _streams_overlap,
        _page_locked,
        _registered_arena,
        _proofs,
        _gather_and_scatter,
        _packet_rates,
        _copy_rates,
    ):
        try:
            what(rig, memory)
        except Exception as error:  # noqa: BLE001  (what one operation cannot do says nothing of the next)
            rig.check(False, what.__name__.strip("_"), repr(error))


def _pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _addresses(rig: Rig, memory: DeviceMemory) -> None:
    for nbytes in (1, 4096, 3 * MIB + 5):
        block = memory.allocate(nbytes)
        aligned = block.address == block.data.data_ptr() and block.address % memory.alignment == 0
        rig.check(aligned and block.data.numel() == nbytes, f"{nbytes} bytes start where transports want it")


def _round_trip(rig: Rig, memory: DeviceMemory) -> None:
    sent = _pattern(3 * MIB + 5)
    block = memory.allocate(sent.numel())
    memory.upload(block.data, sent)
    memory.fence()()
    received = torch.empty_like(sent)
    memory.download(received, block.data)
    same = torch.equal(memory.to_host(block.data), sent) and torch.equal(received, sent)
    rig.check(same, "bytes come back as they went")
    last = block
    for _ in range(COPIES):
        following = memory.allocate(sent.numel())
        memory.copy(following.data, last.data)
        last = following
    memory.fence()()
    same = torch.equal(memory.to_host(last.data), sent)
    rig.check(same, "copies within the device are done at their fence")


def _strided(rig: Rig, memory: DeviceMemory) -> None:
    """As packets do: some blocks of a KV region, not all."""
    block = memory.allocate(64 * 4096)
    rows = block.data.view(64, 4096)
    memory.upload(block.data, torch.zeros(64 * 4096, dtype=torch.uint8))
    sent = _pattern(16 * 4096).view(16, 4096)
    memory.upload(rows[8:40:2], sent)
    memory.fence()()
    received = torch.empty_like(sent)
    memory.download(received, rows[8:40:2])
    whole = memory.to_host(block.data).view(64, 4096)
    alone = not whole[:8].any() and not whole[9:40:2].any() and not whole[40:].any()
    rig.check(torch.equal(received, sent) and bool(alone), "strided copies touch only their rows")


def _fence_between_threads(rig: Rig, memory: DeviceMemory) -> None:
    block, sent, found = memory.allocate(16 * MIB), _pattern(16 * MIB, seed=1), list[torch.Tensor]()
    memory.upload(block.data, sent)
    wait = memory.fence()

    def read() -> None:
        memory.enter_thread()
        wait()
        found.append(memory.to_host(block.data))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(FENCE_S)
    why = "it hangs" if thread.is_alive() else "other bytes"
    rig.check(bool(found) and torch.equal(found[0], sent), "a fence of one thread is waited for by another", why)


def _fence_times(rig: Rig, memory: DeviceMemory) -> None:
    """What a layer that leaves costs the model's thread, and a reached fence whoever waits for it."""
    memory.fence()()
    begun = time.perf_counter()
    fences = [memory.timed_fence() for _ in range(FENCES)]
    made = time.perf_counter()
    fences[-1].wait()
    reached = time.perf_counter()
    for fence in fences:
        fence.wait()
    waited = time.perf_counter()
    rig.row("fence_record_us", round(1e6 * (made - begun) / FENCES, 2))
    rig.row("fence_wait_us", round(1e6 * (waited - reached) / FENCES, 2))


def _streams_overlap(rig: Rig, memory: DeviceMemory) -> None:
    """A thread of ours has a stream of its own: its copy must not queue behind what another thread's has queued."""
    if memory.host_visible:
        return
    width = 8192
    matrix, block, host = torch.ones(width, width, device=rig.card.kind), memory.allocate(MIB), torch.empty(MIB)
    host = host.to(torch.uint8)
    took: list[float] = []
    matrix @ matrix  # chooses kernels
    memory.fence()()

    def download() -> None:
        memory.enter_thread()
        begun = time.perf_counter()
        memory.download(host, block.data)
        took.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    for _ in range(COPIES):
        matrix = matrix @ matrix
    done = memory.fence()
    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    thread.join(FENCE_S)
    done()
    busy_s = time.perf_counter() - begun
    rig.row("download_beside_compute_ms", round(1e3 * took[0], 3) if took else None, compute_ms=round(1e3 * busy_s, 1))
    rig.check(bool(took) and took[0] < busy_s / 2, "a thread's copy does not wait for another thread's kernels")


def _page_locked(rig: Rig, memory: DeviceMemory) -> None:
    buffer = memory.host_buffer(3 * MIB + 5)
    rig.check(buffer.data_ptr() % 4096 == 0 and buffer.numel() == 3 * MIB + 5, "a host buffer starts a page")
    if not memory.host_visible:
        rig.check(buffer.is_pinned(), "a host buffer is page-locked")


def _registered_arena(rig: Rig, memory: DeviceMemory) -> None:
    """Shared memory of the MM Store and of KV's staging, page-locked where it lies: by what CUDA offers for it."""
    path = Path("/dev/shm") / f"epd-card-{time.monotonic_ns()}"
    with contextlib.closing(Arena.create(str(path), capacity_bytes=64 * MIB)):
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 64 * MIB)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        undo = memory.register_host(flat)
        try:
            if rig.card.kind == "cuda":
                rig.check(flat.is_pinned(), "shared memory is page-locked where it lies (cudaHostRegister)")
            block = memory.allocate(32 * MIB)
            for name, pair in (
                ("upload", (block.data, flat[: 32 * MIB])),
                ("download", (flat[: 32 * MIB], block.data)),
            ):
                copy = memory.upload if name == "upload" else memory.download
                _host_rate(rig, memory, f"shared_memory_{name}_gb_per_s", lambda c=copy, p=pair: c(*p), 32 * MIB)
        finally:
            undo()
            del flat
            path.unlink(missing_ok=True)


def _proofs(rig: Rig, memory: DeviceMemory) -> None:
    """Where one fails the slow way is taken: right all the same. This says why it failed."""
    if not memory.host_visible:
        why = proves_blocks(memory, memory.device)  # type: ignore[attr-defined]
        rig.check(why is None, "a card moves blocks by one kernel per row", str(why))


def _gather_and_scatter(rig: Rig, memory: DeviceMemory) -> None:
    """Random geometries against the same by plain copies on the host, which the unit tests hold against slicing."""
    chance, wrong = random.Random(0), list[str]()
    for seed in range(CASES):
        rows, flat, runs = _case(chance, seed)
        here = [_on(memory, row) for row in rows]
        packet, packet_here = flat.clone(), memory.allocate(flat.numel()).data
        gather_by_copies(_host_copy, packet, rows, runs)
        memory.gather(packet_here, here, runs)
        memory.fence()()
        if not torch.equal(memory.to_host(packet_here), packet):
            wrong.append(f"gather {seed}: {rows[0]}, {runs}")
        memory.copy(packet_here, flat)
        memory.scatter(here, runs, packet_here)
        scatter_by_copies(_host_copy, rows, runs, flat)
        memory.fence()()
        if not all(torch.equal(memory.to_host(a.data), b.data) for a, b in zip(here, rows, strict=True)):
            wrong.append(f"scatter {seed}: {rows[0]}, {runs}")
    rig.check(not wrong, f"{CASES} gathers and scatters are the host's", "\n".join(wrong[:10]))


def _case(chance: random.Random, seed: int) -> tuple[list[Blocks], torch.Tensor, list[BlockRun]]:
    blocks = chance.randint(1, 12)
    rows = []
    for number in range(chance.randint(1, 3)):
        word, count, gap = chance.choice([1, 2, 3, 4, 8, 12, 16]), chance.randint(1, 4), chance.randint(0, 3)
        row_bytes, offset = chance.randint(1, 4), chance.randint(0, 3)
        stride = row_bytes + gap
        size = (offset + (count - 1) * stride + row_bytes + chance.randint(0, 2)) * word
        data = _pattern(blocks * size, seed=100 * seed + number)
        rows.append(Blocks(data, size, offset * word, count, row_bytes * word, stride * word))
    ids = chance.sample(range(blocks), chance.randint(1, blocks))
    runs = [BlockRun(one, 1, chance.random() < 0.7) for one in ids]
    return rows, _pattern(len(ids) * sum(row.nbytes for row in rows), seed=seed), runs


def _on(memory: DeviceMemory, row: Blocks) -> Blocks:
    data = memory.allocate(row.data.numel()).data
    memory.copy(data, row.data)
    return Blocks(data, row.block_bytes, row.offset, row.rows, row.row_bytes, row.stride)


def _host_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.reshape(target.shape))


def _packet_rates(rig: Rig, memory: DeviceMemory) -> None:
    rows = [
        Blocks(memory.allocate(BLOCKS * BLOCK_BYTES).data, BLOCK_BYTES, 0, 1, BLOCK_BYTES, BLOCK_BYTES)
        for _ in range(LAYERS)
    ]
    packet = memory.allocate(LAYERS * len(RUNS) * BLOCK_BYTES).data
    for name, move in {
        "gather_us": lambda: memory.gather(packet, rows, RUNS),
        "scatter_us": lambda: memory.scatter(rows, RUNS, packet),
        "gather_by_copies_us": lambda: gather_by_copies(memory.copy, packet, rows, RUNS),
    }.items():
        took_s = _timed(memory, move, ROUNDS)
        rate = round(packet.numel() / took_s / 1e9, 2)
        rig.row(name, round(1e6 * took_s, 1), mib=packet.numel() >> 20, runs=LAYERS * len(RUNS), gb_per_s=rate)


def _copy_rates(rig: Rig, memory: DeviceMemory) -> None:
    block, other, host = memory.allocate(64 * MIB), memory.allocate(64 * MIB), _pattern(64 * MIB)
    took_s = _timed(memory, lambda: memory.copy(other.data, block.data), COPIES)
    rig.row("device_copy_gb_per_s", round(2 * 64 * MIB / took_s / 1e9, 1), counts="bytes read and written")
    locked = memory.host_buffer(64 * MIB)
    for kind, memory_of_host in (("pageable", host), ("page_locked", locked)):
        for name, copy in (
            ("upload", lambda m=memory_of_host: memory.upload(block.data, m)),
            ("download", lambda m=memory_of_host: memory.download(m, block.data)),
        ):
            _host_rate(rig, memory, f"{kind}_{name}_gb_per_s", copy, 64 * MIB)


def _timed(memory: DeviceMemory, move: Callable[[], None], rounds: int) -> float:
    """Seconds of one, by the device's events; the first one, which proves and warms, aside."""
    move()
    begun = memory.timed_fence()
    for _ in range(rounds):
        move()
    ended = memory.timed_fence()
    ended.wait()
    took_s = ended.seconds_since(begun)
    assert took_s is not None and took_s > 0, "the device's events tell no time"
    return took_s / rounds


def _host_rate(rig: Rig, memory: DeviceMemory, name: str, copy: Callable[[], None], nbytes: int) -> None:
    """Of the best of a few, by the host's clock, to its fence."""
    took = []
    for _ in range(COPIES):
        begun = time.perf_counter()
        copy()
        memory.fence()()
        took.append(time.perf_counter() - begun)
    rig.row(name, round(nbytes / min(took[1:]) / 1e9, 2))
