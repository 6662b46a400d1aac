"""Carries out the core order of a stage in its workers: where in vLLM's start that happens. How is `npu_ops`'s.

Our vLLM plugin calls `obey` in every process of a stage before a device is set. When a worker initialises its device,
one on CPU or CUDA reads back what it got, and one on an NPU makes sure that its limit was set on the way. On a CPU the
cores may become others while it runs: its line among the peers says so (`epd_serve/peers.py`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import replace

from epd_serve.engine.argv import CORE_SHARE_ENV, WIRING_ENV
from epd_serve.engine.worker_start import around_init_device, before_steps, stepped_in
from epd_serve.engine.worker_threads import ordered
from epd_serve.peers import LOOK_S, Peer, Peers
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import (
    CoreLimitError,
    cpu_grant,
    cuda_grant,
    limit_at_set_device,
    moved_cpu_grant,
    report,
)
from npu_ops.openmp import set_team_size

logger = logging.getLogger(__name__)

_NAME = "core share"


def obey() -> None:
    """Install what the order in the environment needs. Nothing without one."""
    text = os.environ.get(CORE_SHARE_ENV)
    if text is None or stepped_in(_NAME):
        return
    order = CoreOrder.from_json(text)
    if order.device == "npu":
        _obey_on_npu(order)
    elif order.device == "cuda":
        around_init_device(_NAME, after=lambda rank: _told(order, cuda_grant(rank, order)))
    else:
        cores = _CpuCores(order)
        # Before: initialising computes, and the threads of an OpenMP team are told from others when they come to be.
        around_init_device(_NAME, before=cores.begin)
        before_steps(cores.before_step)


class _CpuCores:
    """Those of one worker. A thread moves all that compute to others; how many these are, the model's own changes."""

    def __init__(self, order: CoreOrder) -> None:
        self._order = order
        self._threads = ordered()
        self._wanted = self._count = self._threads.count if self._threads is not None else 0

    def begin(self, rank: int) -> None:
        _told(self._order, cpu_grant(rank, self._order))
        threading.Thread(target=self._follow, args=(rank,), name="epd-cores", daemon=True).start()

    def before_step(self, scheduler_output: object) -> None:
        """On the model's thread."""
        if self._count != self._wanted:
            self._count = self._wanted
            set_team_size(self._count)

    def _follow(self, rank: int) -> None:
        peers = Peers(StageWiring.from_json(json.loads(os.environ[WIRING_ENV])))
        while True:
            if peers.changed() and peers.me.cores and peers.me.cores != self._order.cores:
                try:
                    self._move(rank, peers.me)
                except OSError as error:  # whoever asked for it hears of no grant, and takes it back
                    logger.warning("%s stays on its cores: %s", self._order.instance, error)
            time.sleep(LOOK_S)

    def _move(self, rank: int, me: Peer) -> None:
        before = self._order
        order = replace(before, shares={**before.shares, before.instance: me.core_share}, cores=me.cores)
        grant = moved_cpu_grant(rank, before, order)
        self._order = order
        if self._threads is not None:
            self._wanted = replace(self._threads, cores=me.cores).count
        _told(order, grant)


def _obey_on_npu(order: CoreOrder) -> None:
    grants: list[CoreGrant] = []

    def granted(grant: CoreGrant) -> None:
        grants.append(grant)
        _told(order, grant)

    def check(rank: int) -> None:
        if not grants:
            raise CoreLimitError(
                f"worker {rank} of {order.instance} initialised its NPU without torch.npu.set_device, so it has no "
                "core limit: this vllm-ascend works differently; remove --core-share"
            )

    limit_at_set_device(order, granted)
    around_init_device(_NAME, after=check)


def _told(order: CoreOrder, grant: CoreGrant) -> None:
    try:
        report(order, grant)
    except OSError as error:
        logger.warning("%s cannot say which cores it got: %s", order.instance, error)
    logger.info("core share %g of %s: %s", grant.share, order.instance, grant.summary())
