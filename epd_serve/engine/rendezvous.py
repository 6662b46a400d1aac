"""Keeps the meeting point of a stage's workers reachable at the stage's own address only.

vLLM 0.23 has torch's ranks meet at a TCPStore (`tcp://HOST:PORT`, also with a single rank), which listens on every
address of the machine, whatever HOST is, and asks nobody who they are. 0.32 uses a file, where there is nothing to do.
"""

from __future__ import annotations

import logging

from epd_serve.engine.worker_start import around_init_device

logger = logging.getLogger(__name__)


def narrow_rendezvous() -> None:
    """Install it in a process that may become a worker."""
    around_init_device("rendezvous", after=_narrow)


def _narrow(rank: int) -> None:
    """Called when the ranks have met. The process that opened the store's port closes it to other addresses."""
    import torch.distributed

    from store.port_filter import narrow_port

    if not torch.distributed.is_initialized():
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.TCPStore) and narrow_port(store.host, store.port):
        logger.info("rank %d: port %d, where the ranks met, answers at %s only", rank, store.port, store.host)
