"""vLLM's EC connector for E→P: the shell that maps vLLM's hooks to our producer and consumer.

vLLM makes two objects, one in the scheduler process and one in each worker (one process or two, by executor). What
vLLM 0.23 does not call is marked *; `compat.py` says what this vLLM has, and without it E reports no metadata and
skips no encode, and P recomputes what is lost.

    E scheduler   ensure_cache_available notes which features the step's requests need; has_cache_item and
                  update_state_after_alloc pin what the store has; request_finished* reports keys and metadata
    E worker      start_save_caches* (else bind_connector_metadata) → loads, re-announcements; save_caches → put
    P scheduler   ensure_cache_available defers until pinned, or lost and a slot is free, or there is enough to begin
                  (`consumer.py`; our scheduler class asks it how far); has_cache_item promises only what is
                  pinned; take_unavailable_requests* fails who must not recompute; update_state_after_alloc /
                  build_connector_meta name the bytes to load; pins go when the request is among the finished
    D scheduler   the same for a request that was preempted; until then ensure_cache_available keeps what it would need,
                  and before that defers a new request whose features are still being made, so that it holds no blocks
    P worker      start_load_caches puts views of the slab (`slab_copier.py`) into vLLM's encoder cache, and copies from
                  the arena what is not in it; a step that frees some of them says so before it begins
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from epd_serve.activation_peak import feature_slab
from epd_serve.engine import compat
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.encoder_scheduler import EncoderScheduler
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.pusher import endpoint_of
from epd_serve.engine.ec.slab_copier import SlabCopier
from epd_serve.engine.ec.step import FeatureStep
from epd_serve.engine.ec.store_access import open_local_store
from epd_serve.engine.encoder_free import split_deepstack_rows
from epd_serve.engine.worker_start import after_loading, before_steps
from epd_serve.trace import DeviceTrace, Trace
from epd_serve.wake import idle_waiter
from epd_serve.wiring import DEVICE, StageWiring
from npu_ops.torch_memory import memory_here
from store.arena import Arena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FeatureMetadata(ECConnectorMetadata):
    """A `FeatureStep` as vLLM carries it."""

    def __init__(self, step: FeatureStep) -> None:
        self.step = step


class FeatureConnector(ECConnectorBase):
    """E→P features through the MM Store (EPD-Serve §3.2). See the module docstring."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        compat.check_item_names(vllm_config)
        wiring = StageWiring.from_json(vllm_config.ec_transfer_config.ec_connector_extra_config["epd"])
        # Under async scheduling the step before may still be loading when a request finishes: pins go one step later.
        self._late_release = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
        self._finished: set[str] = set()
        self.consumer: FeatureConsumer | None = None  # of a consumer's scheduler side
        self._scheduler: EncoderScheduler | FeatureConsumer
        self._producer: FeatureProducer | None = None
        self._copier: SlabCopier | None = None
        self._cache_is_handed_over = compat.hands_over_encoder_cache()
        self._opened: list[Any] = []
        if role is not ECConnectorRole.SCHEDULER:
            self._memory = memory_here(torch.device(vllm_config.device_config.device).type)
            if self.is_consumer:
                split_deepstack_rows(vllm_config)
                self._arena = Arena.attach(wiring.arena)
                self._loaded = DeviceTrace(Trace(wiring.trace_path, wiring.instance), self._memory)
                self._opened = [self._loaded, self._arena]
                if wiring.slab:
                    endpoint = endpoint_of(wiring, self._memory) if wiring.feature_transfer == DEVICE else None
                    self._copier = SlabCopier(
                        wiring.slab, compat.tp_rank(), self._memory, self._arena, endpoint=endpoint
                    )
                    self._opened.insert(0, self._copier)
                    self._slab_bytes = wiring.slab_bytes
                    after_loading(self._open_slab)
                    before_steps(self._begin_step)
            elif compat.tp_rank() == 0:  # every rank computes the whole feature; one of them stores it
                self._producer = FeatureProducer(wiring, self._memory)
                self._opened = [self._producer]
            return
        if self.is_consumer:
            can_fail, media_is_absent = compat.can_fail_requests(), compat.media_is_absent(vllm_config)
            self._scheduler = self.consumer = FeatureConsumer(
                wiring,
                ranks=vllm_config.parallel_config.tensor_parallel_size,
                can_fail=can_fail,
                media_is_absent=media_is_absent,
            )
        else:
            reports = compat.tells_finished_requests()
            collect = compat.item_metadata(vllm_config) if reports else compat.no_item_metadata
            self._scheduler = EncoderScheduler(open_local_store(wiring), collect, skips=self._cache_is_handed_over)
        self._opened = [self._scheduler]

    # --- scheduler side -------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False leaves the request waiting for this step; asked again every step."""
        return self._scheduler.may_run(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """A promise that kills the engine when broken: true only for what is verified and pinned."""
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.allocated(request, request.mm_features[index].identifier)

    def take_unavailable_requests(self) -> set[str]:
        """Requests that lack a feature and must not encode it here: vLLM fails them, which is safe to repeat."""
        return self.consumer.take_failed() if self.consumer is not None else set()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(False: nothing of vLLM's is kept, the response's `ec_transfer_params`)."""
        return False, self._scheduler.finished(request, served=not compat.was_aborted(request)) or None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FeatureMetadata:
        finished = set(scheduler_output.finished_req_ids)
        if self._late_release:
            finished, self._finished = self._finished, finished
        step = self._scheduler.step(finished, scheduler_output.free_encoder_mm_hashes)
        if self.consumer is not None and not scheduler_output.total_num_scheduled_tokens and self.consumer.waiting():
            idle_waiter.expect_wake()
        return FeatureMetadata(step)

    # --- worker side ----------------------------------------------------------------------------------------------

    def _open_slab(self, worker: Any) -> None:
        assert self._copier is not None
        wanted = self._slab_bytes or feature_slab(compat.encoder_cache_bytes(worker))
        compat.counts_as_loaded(worker, self._copier.open(wanted))

    def _begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Called before every step. vLLM drops what this one frees before it queues anything."""
        step: FeatureStep | None = getattr(scheduler_output.ec_connector_metadata, "step", None)
        if self._copier is not None and step is not None and step.freed_in:
            self._copier.begin_step(step.freed_in)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._producer is not None and not self._cache_is_handed_over:
            self._producer.step(self._bound_step())

    def start_save_caches(self, **kwargs: Any) -> None:
        if self._producer is not None:
            self._producer.step(self._bound_step(), kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Views of this step's features, or copies from the arena. The scheduler side keeps both, so they are there."""
        begun = time.monotonic()
        for load in self._bound_step().loads:
            if load.key not in encoder_cache:
                view = self._copier.view if self._copier is not None else None
                encoder_cache[load.key] = load.read(self._arena, self._memory, view)
                self._loaded.stamp(load.key, "feature_loaded", t0=begun)
                begun = time.monotonic()

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._producer is not None:
            self._producer.save(encoder_cache, mm_hash)

    def shutdown(self) -> None:
        for part in self._opened:
            part.close()

    def _bound_step(self) -> FeatureStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FeatureMetadata)
        return metadata.step
