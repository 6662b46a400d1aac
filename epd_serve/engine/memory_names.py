"""Names shared memory of a stage after its launch and instance, so that whoever survives it knows what to remove.

Python's blocks (`psm_*`, vLLM's queues between processes) and semaphores (`sem.mp-*`), vLLM's cache of processed media
and the memory through which its CPU ranks reduce have names of chance, by which nobody could tell whose they are once
all that knew them were killed. Every process of a stage does this before it makes any. Semaphores' names are handed
on to children by multiprocessing itself; there is no public way to the other three.
"""

from __future__ import annotations

import os
from multiprocessing import process, shared_memory

from epd_serve.engine.worker_start import around_init_device
from epd_serve.stage_plan import MEMORY_NAMES_ENV

_CHANCE = 12  # hexadecimal digits
_MEDIA_CACHE_ENV = "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"


def name_memory() -> None:
    """What Python and vLLM make in this process from now on. Nothing where no launch has given a name."""
    if (start := os.environ.get(MEMORY_NAMES_ENV)) is None:
        return
    prefix = f"/{start}psm_"
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + _CHANCE  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{start}mp"  # type: ignore[attr-defined]
    os.environ[_MEDIA_CACHE_ENV] = f"{start}media"


def name_rank_memory() -> None:
    """Install it in a process that may become a worker of a CPU stage."""
    if MEMORY_NAMES_ENV in os.environ:
        around_init_device("rank memory", before=_name_rank_memory)


def _name_rank_memory(rank: int) -> None:
    """All ranks of a group name its memory alike (`cpu_communicator.py`), by a port or a file of this start."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    vllm_s_own = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{os.environ[MEMORY_NAMES_ENV]}{vllm_s_own(communicator)}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
