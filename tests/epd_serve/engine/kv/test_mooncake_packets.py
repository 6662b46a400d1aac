"""KV by the real Transfer Engine between two processes: every packet of 16 MiB is the same at both ends when DONE came.

The blocks of each transfer lie scattered at both ends, so a packet is up to 512 writes. D checks its blocks as soon as
its worker reports them, which is when vLLM would decode on them.
"""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_serve.engine.kv.checksum_audit import layer_checksums
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.regions import Layers, flat_regions, layers_of
from epd_serve.engine.kv.sender import ChunkJob
from tests.epd_serve.engine.kv.fakes import HOST, DecodeEnd, PrefillEnd, key_of
from tests.waiting import PATIENCE_S, wait_for

LAYERS, BLOCKS, BLOCK_BYTES, TAKEN = 8, 256, 32 << 10, 64
PACKET_BYTES = LAYERS * TAKEN * BLOCK_BYTES
MIB = 1 << 20


def caches() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8) for i in range(LAYERS)}


def engine(layers: Layers) -> Any:
    endpoint = MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "tcp", HOST, HOST.allocate(4 * MIB))
    return lambda: endpoint


def decode(folder: Path, pipe: Connection) -> None:
    """D's process: answers each (transfer, blocks) with the checksums of its layers, or with what went wrong."""
    kv = caches()
    end = DecodeEnd(folder, kv=kv, blocks=BLOCKS, sides=[MooncakeReceiveSide(engine(layers_of(kv, BLOCKS)))])
    pipe.send((end.endpoint, end.target))
    while (asked := pipe.recv()) is not None:
        name, blocks = asked
        end.expect(key_of(name), blocks)
        pipe.send("expected")
        end.wait_ended(1)
        pipe.send(layer_checksums(end.layers, blocks, HOST) if end.received else "the transfer failed")
        end.received, end.failed = [], []
    end.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.mooncake
@pytest.mark.parametrize("packets", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_packets_have_the_same_checksums_at_both_ends_and_leave_no_memory_taken(tmp_path: Path, packets: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()  # where D's process ends, reading from the pipe does too
    kv = caches()
    p = PrefillEnd(
        tmp_path,
        kv=kv,
        blocks=BLOCKS,
        grouping=LAYERS,
        sides=lambda layers, path: [MooncakeSendSide(layers, engine(layers), "tcp", timeout_s=PATIENCE_S)],
    )
    try:
        assert pipe.poll(PATIENCE_S)
        endpoint, target = pipe.recv()
        p.sender.meet([[endpoint]])
        wait_for(lambda: p.links[endpoint].snapshot().state == "up")
        chance, content = random.Random(5), torch.Generator().manual_seed(5)
        settled = 0
        for number in range(packets):
            src, dst = (tuple(chance.sample(range(BLOCKS), TAKEN)) for _ in range(2))
            for layer in kv.values():
                layer.view(torch.int64)[list(src)] = torch.randint(2**62, (TAKEN, BLOCK_BYTES // 8), generator=content)
            name = str(number)
            pipe.send((name, dst))
            assert pipe.poll(PATIENCE_S)
            pipe.recv()
            p.step([ChunkJob(key_of(name), name, target, (endpoint,), src, dst, 0)], finished=[name])
            sent = layer_checksums(p.layers, src, HOST)
            assert pipe.poll(PATIENCE_S)
            assert pipe.recv() == sent, f"packet {number}"
            p.wait_over({name})
            if number == packets // 10:
                settled = resident_bytes()
        link = p.links[endpoint].snapshot()
        assert (link.packets, link.bytes, link.failed, link.retries) == (packets, packets * PACKET_BYTES, 0, 0)
        grown = resident_bytes() - settled
        print(f"{packets} packets, {link.bytes / link.busy_s / 1e9:.2f} GB/s, memory {grown / MIB:+.1f} MiB")
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB more than after a tenth of the packets"
        pipe.send(None)
        process.join(PATIENCE_S)
    finally:
        p.close()
        process.kill()
