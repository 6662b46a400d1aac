"""The port at which torch's ranks meet answers at the stage's address only. torch is real, vLLM's worker a stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.host.ports import free_ports

ROOT = Path(__file__).parents[3]

WORKER = """
import socket, sys, types
from pathlib import Path
import torch.distributed

class WorkerWrapperBase:
    rpc_rank = 0
    def init_device(self):
        torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)

sys.modules["vllm.v1.worker.worker_base"] = types.SimpleNamespace(WorkerWrapperBase=WorkerWrapperBase)
from epd_serve.engine.worker_start import narrow_rendezvous
narrow_rendezvous()
narrow_rendezvous()
WorkerWrapperBase().init_device()
for address in sys.argv[3:]:
    with socket.socket() as client:
        client.settimeout(0.5)
        print(client.connect_ex((address, int(sys.argv[2]))) == 0)
store = torch.distributed.distributed_c10d._get_default_store()
store.clone().set("key", "value")
print(store.get("key").decode())
"""


def worker(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_the_ranks_port_answers_at_its_own_address_only_and_goes_on_working() -> None:
    (port,) = free_ports(1)
    assert worker(f"tcp://127.0.0.1:{port}", str(port), "127.0.0.1", "127.0.0.2") == [
        "True",
        "False",
        "value",
    ]


def test_ranks_that_meet_in_a_file_are_left_alone(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    assert worker(f"file://{tmp_path}/meet", str(port), "127.0.0.1") == ["False", "value"]
