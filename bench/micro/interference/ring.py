"""Two ranks for an all-reduce: this process, and a peer that it starts, which joins in whatever this one begins.

On CPU both are on the same cores and talk over gloo, as two virtual devices on the same cores do; an accelerator's
peer has the next device, over NCCL or HCCL. With an accelerator this has never run.
"""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import torch
from torch import distributed

from bench.micro.interference.operators import element_bytes
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import open_memory

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
JOIN_S = 120.0
STOP_S = 10.0
_IDLE = datetime.timedelta(hours=12)  # the peer waits in a collective for as long as this process does other things


def dtype_of(kind: str) -> torch.dtype:
    """In which operators compute on such a device."""
    return torch.float32 if element_bytes(kind) == 4 else torch.bfloat16


class Ring:
    """Rank 0 of 2. `close` ends the peer; so does the end of this process.

    Raises:
        RuntimeError: the peer did not join in time.
    """

    def __init__(self, kind: str, index: int, reduce_bytes: int) -> None:
        self._device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "bench.micro.interference.ring",
            kind,
            str(index + 1),
            str(port),
            str(reduce_bytes),
        ]
        self._peer = subprocess.Popen(command, stdin=subprocess.PIPE)
        join(kind, port, rank=0)

    def call(self, reduce_bytes: int) -> Callable[[], object]:
        """Queues one all-reduce of so many bytes; they are what the peer was started with."""
        kind = self._device.type
        data = torch.zeros(reduce_bytes // element_bytes(kind), dtype=dtype_of(kind), device=self._device)
        return lambda: distributed.all_reduce(data)

    def close(self) -> None:
        """End the peer; it stands in a collective, so nobody says goodbye."""
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        try:
            self._peer.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._peer.kill()
            self._peer.wait()


def join(kind: str, port: int, rank: int) -> None:
    """Enter the group of two as `rank`."""
    store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0, datetime.timedelta(seconds=JOIN_S))
    distributed.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=2, timeout=_IDLE)


def _accompany(kind: str, index: int, port: int, reduce_bytes: int) -> None:
    """The peer: one all-reduce after the other, until its input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    torch.set_num_threads(1)
    memory: DeviceMemory = open_memory(kind, index)
    memory.enter_thread()
    join(kind, port, rank=1)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    data = torch.zeros(reduce_bytes // element_bytes(kind), dtype=dtype_of(kind), device=device)
    while True:
        distributed.all_reduce(data)
        memory.fence()()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _accompany(sys.argv[1], *map(int, sys.argv[2:5]))
