"""vLLM's EC connector for E→P: the shell that maps vLLM's hooks to our producer and consumer.

vLLM makes two objects, one in the scheduler process and one in each worker (one process or two, by executor). Written
to the subset of hooks that vLLM 0.23 and 0.32 share:

    E scheduler   ensure_cache_available notes which features the step's requests need
    E worker      save_caches → FeatureProducer.save; bind_connector_metadata → re-announce
    P scheduler   ensure_cache_available defers until pinned or lost; has_cache_item promises only what is pinned;
                  update_state_after_alloc / build_connector_meta name the arena bytes to load; pins go when the
                  request is among the finished
    P worker      start_load_caches copies from the arena into vLLM's encoder cache
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from epd_serve.engine.compat import tp_rank
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.wake import idle_bell
from epd_serve.trace import Trace
from epd_serve.wire import MISSING_XARG
from epd_serve.wiring import StageWiring
from store.arena import Arena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class FeatureSlot:
    """Where a pinned feature's bytes lie in the arena."""

    key: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class FeatureMetadata(ECConnectorMetadata):
    """Scheduler → worker, per step: what to load (consumer), what this step's requests need (producer)."""

    loads: list[FeatureSlot] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)


class FeatureConnector(ECConnectorBase):
    """E→P features through the host arena (EPD-Serve §3.2). See the module docstring."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        wiring = StageWiring.from_json(vllm_config.ec_transfer_config.ec_connector_extra_config["epd"])
        self._pending = FeatureMetadata()
        # Under async scheduling the step before may still be loading when a request finishes: pins go one step later.
        self._late_release = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
        self._finished: set[str] = set()
        self._consumer: FeatureConsumer | None = None
        self._producer: FeatureProducer | None = None
        self._arena: Arena | None = None
        self._trace = Trace(wiring.trace_path, wiring.instance)
        if role is ECConnectorRole.SCHEDULER:
            if self.is_consumer:
                self._consumer = FeatureConsumer(wiring)
        elif self.is_producer:
            if tp_rank() == 0:  # every rank computes the whole feature; one of them stores it
                self._producer = FeatureProducer(wiring)
        else:
            self._arena = Arena.attach(wiring.arena)

    # --- scheduler side -------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False leaves the request waiting for this step; asked again every step."""
        keys = [
            feature.identifier
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        if self._consumer is None:
            self._pending.needed.extend(keys)
            for key in keys:
                self._trace.stamp(key, "encode_arrived")
            return True
        if not keys:
            return True
        settled = self._consumer.ready_or_lost(request.request_id, keys)
        if not settled and (missing := _missing(request)):
            self._consumer.give_up(missing, "not encoded")
        return settled

    def has_cache_item(self, identifier: str) -> bool:
        """A promise that kills the engine when broken: true only for what is verified and pinned."""
        return self._consumer is not None and self._consumer.pinned(identifier) is not None

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if self._consumer is None:
            return
        lease = self._consumer.pinned(request.mm_features[index].identifier)
        if lease is not None:
            meta = lease.meta
            self._pending.loads.append(FeatureSlot(meta.key, lease.offset, meta.nbytes, meta.shape, meta.dtype))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FeatureMetadata:
        if self._consumer is not None:
            finished = set(scheduler_output.finished_req_ids)
            if self._late_release:
                finished, self._finished = self._finished, finished
            self._consumer.release(finished)
            if not scheduler_output.total_num_scheduled_tokens and self._consumer.waiting():
                idle_bell.wait()
        meta, self._pending = self._pending, FeatureMetadata()
        return meta

    # --- worker side ----------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._producer is not None:
            assert isinstance(connector_metadata, FeatureMetadata)
            self._producer.announce_again(connector_metadata.needed)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copy this step's features out of the arena. The scheduler side holds their pins, so they are there."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FeatureMetadata) and self._arena is not None
        for slot in metadata.loads:
            if slot.key not in encoder_cache:
                raw = torch.from_numpy(np.frombuffer(self._arena.view(slot.offset, slot.nbytes), np.uint8).copy())
                feature = raw.view(getattr(torch, slot.dtype)).view(slot.shape)
                encoder_cache[slot.key] = feature.to(self._vllm_config.device_config.device)
                self._trace.stamp(slot.key, "feature_loaded")

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._producer is not None:
            self._producer.save(encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def shutdown(self) -> None:
        for part in (self._consumer, self._producer, self._arena):
            if part is not None:
                part.close()


def _missing(request: Request) -> list[str]:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    value = extra.get(MISSING_XARG, "")
    return [key for key in value.split(",") if key] if isinstance(value, str) else []
