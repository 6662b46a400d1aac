"""vLLM's EC connector for E→P: the shell that maps vLLM's hooks to our producer and consumer.

vLLM makes two objects, one in the scheduler process and one in each worker (one process or two, by executor). What
vLLM 0.23 does not call is marked *; `compat.py` says what this vLLM has, and without it E reports no metadata and
skips no encode, and P recomputes what is lost.

    E scheduler   ensure_cache_available notes which features the step's requests need; has_cache_item and
                  update_state_after_alloc pin what the store has; request_finished* reports keys and metadata
    E worker      start_save_caches* (else bind_connector_metadata) → loads, re-announcements; save_caches → put
    P scheduler   ensure_cache_available defers until pinned, or lost and a slot is free, or there is enough to begin
                  (`feature_admission.py`; our scheduler class asks it how far); has_cache_item promises only what is
                  pinned; take_unavailable_requests* fails who must not recompute; update_state_after_alloc /
                  build_connector_meta name the bytes to load; pins go when the request is among the finished
    D scheduler   the same for a request that was preempted; until then ensure_cache_available keeps what it would need,
                  and before that defers a new request whose features are still being made, so that it holds no blocks
    P worker      start_load_caches copies from the arena into vLLM's encoder cache
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from epd_serve.engine import compat
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.encoder_scheduler import EncoderScheduler
from epd_serve.engine.ec.feature_admission import FeatureAdmission
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureSlot, FeatureStep
from epd_serve.engine.ec.store_access import ArenaReader, load, open_local_store, open_reader
from epd_serve.kv.params import receive_params
from epd_serve.trace import DeviceTrace, Trace
from epd_serve.wake import idle_waiter
from epd_serve.wiring import StageWiring
from npu_ops.torch_memory import memory_here

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
        self._loads: list[FeatureSlot] = []
        self._promised: set[str] = set()  # answers of has_cache_item within one step
        self._consumer: FeatureConsumer | None = None
        self._encoder: EncoderScheduler | None = None
        self._producer: FeatureProducer | None = None
        self._reader: ArenaReader | None = None
        self._loaded: DeviceTrace | None = None  # with the reader
        self.admission: FeatureAdmission | None = None  # of a consumer's scheduler side
        self._cache_is_handed_over = compat.hands_over_encoder_cache()
        self._trace = Trace(wiring.trace_path, wiring.instance)
        if role is ECConnectorRole.SCHEDULER:
            if self.is_consumer:
                self._consumer = FeatureConsumer(wiring)
                self.admission = FeatureAdmission(
                    self._consumer,
                    # Who only prefills is retried from the start.
                    keeps=_is_received if wiring.both else _always(wiring.role.decodes),
                    reserves=_is_received if wiring.both else _always(wiring.role.takes_kv),
                    can_fail=compat.can_fail_requests(),
                    media_is_absent=compat.media_is_absent(vllm_config),
                )
            else:
                reports = compat.tells_finished_requests()
                collect = compat.item_metadata(vllm_config) if reports else compat.no_item_metadata
                self._encoder = EncoderScheduler(open_local_store(wiring), collect, skips=self._cache_is_handed_over)
        elif self.is_producer:
            if compat.tp_rank() == 0:  # every rank computes the whole feature; one of them stores it
                self._producer = FeatureProducer(wiring, vllm_config.device_config.device)
        else:
            self._reader = open_reader(wiring, vllm_config.device_config.device)
            kind = torch.device(vllm_config.device_config.device).type
            self._loaded = DeviceTrace(self._trace, memory_here(kind))

    # --- scheduler side -------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False leaves the request waiting for this step; asked again every step."""
        if self._encoder is not None:
            self._encoder.asked(request)
        if self.admission is None:
            return True
        return self.admission.may_run(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """A promise that kills the engine when broken: true only for what is verified and pinned."""
        if self._encoder is not None:
            return self._encoder.has(identifier)
        if self._consumer is not None and self._consumer.pinned(identifier) is not None:
            self._promised.add(identifier)
        return identifier in self._promised

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        key = request.mm_features[index].identifier
        if self._encoder is not None:
            self._encoder.allocated(request, key)
        elif self._consumer is not None and key in self._promised:  # else it is being encoded, even if it came just now
            held = self._consumer.pinned(key)
            assert held is not None, "a feature that was promised in this step is unpinned"
            self._loads.append(FeatureSlot.of(held))

    def take_unavailable_requests(self) -> set[str]:
        """Requests that lack a feature and must not encode it here: vLLM fails them, which is safe to repeat."""
        return self._consumer.take_failed() if self._consumer is not None else set()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(False: nothing of vLLM's is kept, the response's `ec_transfer_params`)."""
        if self._consumer is not None:
            self._consumer.ended(request.request_id)
        if self._encoder is None:
            return False, None
        return False, self._encoder.finished(request, served=not compat.was_aborted(request)) or None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FeatureMetadata:
        finished = set(scheduler_output.finished_req_ids)
        if self._late_release:
            finished, self._finished = self._finished, finished
        if self._encoder is not None:
            return FeatureMetadata(self._encoder.step(finished))
        step, self._loads = FeatureStep(loads=self._loads), []
        self._promised.clear()
        if self._consumer is not None and self.admission is not None:
            self._consumer.release(finished)
            self.admission.forget(finished)
            if not scheduler_output.total_num_scheduled_tokens and self._consumer.waiting():
                idle_waiter.expect_wake()
        return FeatureMetadata(step)

    # --- worker side ----------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._producer is not None and not self._cache_is_handed_over:
            self._producer.step(self._bound_step())

    def start_save_caches(self, **kwargs: Any) -> None:
        if self._producer is not None:
            self._producer.step(self._bound_step(), kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copy this step's features from the arena. The scheduler side holds their pins, so they are there."""
        assert self._reader is not None and self._loaded is not None
        begun = time.monotonic()
        for slot in load(self._reader, self._bound_step().loads, encoder_cache):
            self._loaded.stamp(slot.key, "feature_loaded", t0=begun)
            begun = time.monotonic()

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._producer is not None:
            self._producer.save(encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def shutdown(self) -> None:
        for part in (self._consumer, self._encoder, self._producer, self._reader, self._loaded):
            if part is not None:
                part.close()

    def _bound_step(self) -> FeatureStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FeatureMetadata)
        return metadata.step


def _is_received(request: Request) -> bool:
    """Whether another instance prefills it for this one."""
    return receive_params(request.kv_transfer_params, request.request_id) is not None


def _always(answer: bool) -> Callable[[Request], bool]:
    return lambda request: answer
