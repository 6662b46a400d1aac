"""How a worker starts: the one place where our plugin steps into it, from its device to its captured graphs.

Workers are those processes of a stage that call `WorkerWrapperBase.init_device` (vLLM 0.23 to 0.32, every platform). It
runs on the thread on which the model will run, sets the device, joins the ranks, and comes before a model is loaded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from epd_serve.engine.capture_gate import capture_gate

logger = logging.getLogger(__name__)

_STEPS = "epd_serve_steps"
_WARM_UP, _LOAD = "compile_or_warm_up_model", "load_model"


def _nothing(rank: int) -> None:
    return


def stepped_in(name: str) -> bool:
    """Whether `around_init_device` was called with this name. vLLM may load a plugin twice in a process."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return name in getattr(WorkerWrapperBase.init_device, _STEPS, ())


def around_init_device(
    name: str, before: Callable[[int], None] = _nothing, after: Callable[[int], None] = _nothing
) -> None:
    """Have each worker call these with its rank; once by that name."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if stepped_in(name):
        return
    real = WorkerWrapperBase.init_device

    @functools.wraps(real)
    def init_device(self: WorkerWrapperBase) -> None:
        before(self.rpc_rank)
        real(self)
        after(self.rpc_rank)

    setattr(init_device, _STEPS, (*getattr(real, _STEPS, ()), name))
    WorkerWrapperBase.init_device = init_device


def before_steps(call: Callable[[Any], None]) -> None:
    """Have each worker call this before each of its steps, on the thread on which the model runs, with vLLM's
    `SchedulerOutput`. Steps without tokens count."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    real = WorkerWrapperBase.execute_model

    @functools.wraps(real)
    def execute_model(self: WorkerWrapperBase, scheduler_output: Any, *args: Any, **more: Any) -> Any:
        call(scheduler_output)
        return real(self, scheduler_output, *args, **more)

    WorkerWrapperBase.execute_model = execute_model


def after_loading(call: Callable[[Any], None]) -> None:
    """Have each worker call this with vLLM's worker when its model is loaded, before vLLM measures what is left for
    KV, on the thread on which the model runs. To be called in the worker's process, once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def load_model(self: WorkerWrapperBase, *args: Any, **more: Any) -> Any:
        result = self.worker.load_model(*args, **more)
        call(self.worker)
        return result

    setattr(WorkerWrapperBase, _LOAD, load_model)  # else it asks its worker for it, by `__getattr__`


def keep_threads_off_captures() -> None:
    """Close each worker's `capture_gate` when it starts, and open it when vLLM has captured its graphs, or has failed.

    vLLM calls `compile_or_warm_up_model` of every worker through its wrapper, also of those that capture nothing: eager
    ones, encoders, the CPU's.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if stepped_in("captures"):
        return
    around_init_device("captures", before=lambda rank: capture_gate.close())

    def compile_or_warm_up_model(self: WorkerWrapperBase) -> object:
        try:
            return self.worker.compile_or_warm_up_model()
        finally:
            capture_gate.open()

    setattr(WorkerWrapperBase, _WARM_UP, compile_or_warm_up_model)  # else it asks its worker for it, by `__getattr__`


def narrow_rendezvous() -> None:
    """Keep the meeting point of a stage's workers reachable at the stage's own address only.

    Install it in a process that may become a worker.

    vLLM 0.23 has torch's ranks meet at a TCPStore (`tcp://HOST:PORT`, also with a single rank), which listens on every
    address of the machine, whatever HOST is, and asks nobody who they are. 0.32 uses a file, where there is nothing to
    do.
    """
    around_init_device("rendezvous", after=_narrow)


def _narrow(rank: int) -> None:
    """Called when the ranks have met. The process that opened the store's port closes it to other addresses."""
    import torch.distributed

    from store.addresses import narrow_port

    if not torch.distributed.is_initialized():
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.TCPStore) and narrow_port(store.host, store.port):
        logger.info("rank %d: port %d, where the ranks met, answers at %s only", rank, store.port, store.host)
