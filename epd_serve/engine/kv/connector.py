"""vLLM's KV connector for P→D: the shell that maps vLLM's hooks to our two schedulers and two workers.

An instance has P's half, D's, or both. With both, which one a request concerns follows from its parameters: whoever is
to get KV is told from where.

A request's KV, in the order things happen:

    D scheduler   get_num_new_matched_tokens → (prompt tokens missing, True); update_state_after_alloc sends READY, once
                  D's workers have answered that they expect the transfer
    P scheduler   get_num_new_matched_tokens → (None, False) until READY came, but for one request at a time, which
                  update_state_after_alloc lets go ahead; build_connector_meta names the blocks
    P worker      handle_preemptions stops what is being sent from blocks that this step hands to others
    P worker      save_kv_layer packs groups of layers; wait_for_save sweeps the rest and closes complete transfers
    D worker      get_finished reports what arrived; get_block_ids_with_load_errors what did not
    P scheduler   request_finished keeps the blocks; get_finished of the worker releases them

Every hook here is one of vLLM 0.23's base class, with the same meaning in 0.32 (read in 0.23.0, vllm-ascend 0.23.0 and
0.32.0). Where the generations differ:

    handle_preemptions   at the top of the step; 0.32's newer model runner (CUDA) calls it just before the forward pass,
                         after new blocks were zeroed, which the cache of one kind of attention layer does not need.
                         `bind_connector_metadata`, which also comes before the forward pass, fences too
    start_load_kv        0.32 calls it after the forward pass: per-step state is set in `bind_connector_metadata`
    wait_for_save        0.23 skips it in a step without tokens: such a step has nothing to save
    get_finished         0.32 asks `get_transfer_results`, whose default asks `get_finished`
    freed blocks         under async scheduling 0.32 keeps those of a consumer until the step in flight has ended, 0.23
                         does not: there READY waits for that step (`compat.steps_in_flight_at_reuse`)
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from epd_serve.engine import compat
from epd_serve.engine.kv.decode_scheduler import DecodeScheduler, DecodeStep
from epd_serve.engine.kv.prefill_scheduler import PrefillScheduler, PrefillStep
from epd_serve.engine.kv.transports import quarantine_of_peers
from epd_serve.engine.kv.worker import DecodeWorker, KVCache, PrefillWorker
from epd_serve.engine.support import check_kv_groups
from epd_serve.kv.params import receive_params
from epd_serve.wake import idle_waiter
from epd_serve.wiring import StageWiring

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class TransferMetadata(KVConnectorMetadata):
    """Scheduler → worker, per step: of each half that the instance has."""

    prefill: PrefillStep | None = None
    decode: DecodeStep | None = None


class GroupedKVConnector(KVConnectorBase_V1):
    """P→D KV in packets of adjacent layers (EPD-Serve §3.3). See the module docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_kv_groups(kv_cache_config)
        config = vllm_config.kv_transfer_config
        wiring = StageWiring.from_json(config.kv_connector_extra_config["epd"])
        if not compat.worker_in_engine(vllm_config):  # workers wake the scheduler
            idle_waiter.share(Path(tempfile.gettempdir()) / f"idle-{wiring.incarnation}")
        block_size = vllm_config.cache_config.block_size
        tp = vllm_config.parallel_config.tensor_parallel_size
        self.prefill_scheduler: PrefillScheduler | None = None
        self._decode_scheduler: DecodeScheduler | None = None
        self._prefill_worker: PrefillWorker | None = None
        self._decode_worker: DecodeWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            if wiring.sends_kv:
                self.prefill_scheduler = PrefillScheduler(wiring, block_size, compat.total_kv_heads(vllm_config))
            if wiring.takes_kv:
                self._decode_scheduler = DecodeScheduler(
                    wiring,
                    block_size,
                    tp,
                    quarantine_of_peers(wiring, compat.device_kind()),
                    steps_in_flight=compat.steps_in_flight_at_reuse(vllm_config),
                )
            return
        self._open_cache = partial(KVCache, wiring, vllm_config, kv_cache_config.num_blocks)
        if wiring.sends_kv:
            self._prefill_worker = PrefillWorker(wiring)
        if wiring.takes_kv:
            self._decode_worker = DecodeWorker(wiring)

    # --- scheduler side -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self._decode_scheduler is not None:
            self._decode_scheduler.queued(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.prefill_scheduler is not None and not self._is_received(request):
            return (0, False) if self.prefill_scheduler.may_run(request) else (None, False)
        assert self._decode_scheduler is not None
        tokens = self._decode_scheduler.tokens_to_load(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._decode_scheduler is not None:
            self._decode_scheduler.reserve(request, blocks, num_external_tokens)
        if self.prefill_scheduler is not None and not self._is_received(request):
            self.prefill_scheduler.begun(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TransferMetadata:
        prefill, decode = self.prefill_scheduler, self._decode_scheduler
        return TransferMetadata(
            prefill=prefill.step(scheduler_output) if prefill is not None else None,
            decode=decode.step(scheduler_output) if decode is not None else None,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._decode_scheduler is not None:
            self._decode_scheduler.received(connector_output.finished_recving or set())
        if self.prefill_scheduler is not None:
            self.prefill_scheduler.sent(connector_output.finished_sending or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self.prefill_scheduler is not None and not self._is_received(request):
            return self.prefill_scheduler.finished(request)
        assert self._decode_scheduler is not None
        self._decode_scheduler.finished(request)
        return False, None

    def _is_received(self, request: Request) -> bool:
        """Whether this instance is to decode it with KV from elsewhere."""
        return receive_params(request.kv_transfer_params, request.request_id) is not None

    # --- worker side ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = self._open_cache(kv_caches)
        for worker in (self._prefill_worker, self._decode_worker):
            if worker is not None:
                worker.register(cache)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """On return nothing that reads blocks of preempted requests counts any more: this step may write to them.

        At D nothing is under way: a request is preempted when it runs, and it runs when its KV is here.
        """
        assert isinstance(kv_connector_metadata, TransferMetadata)
        if self._prefill_worker is not None and kv_connector_metadata.prefill is not None:
            self._prefill_worker.fence(kv_connector_metadata.prefill)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, TransferMetadata)
        if self._prefill_worker is not None and connector_metadata.prefill is not None:
            self._prefill_worker.begin_step(connector_metadata.prefill)
        if self._decode_worker is not None and connector_metadata.decode is not None:
            self._decode_worker.begin_step(connector_metadata.decode)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """D's loads are asynchronous and driven by P; nothing starts here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._prefill_worker is not None:
            self._prefill_worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        if self._prefill_worker is not None:
            self._prefill_worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        prefill, decode = self._prefill_worker, self._decode_worker
        return (
            prefill.take_over(finished_req_ids) if prefill is not None else None,
            decode.take_finished() if decode is not None else None,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._decode_worker.take_bad_blocks() if self._decode_worker is not None else set()

    def shutdown(self) -> None:
        for part in (self.prefill_scheduler, self._decode_scheduler, self._prefill_worker, self._decode_worker):
            if part is not None:
                part.close()
