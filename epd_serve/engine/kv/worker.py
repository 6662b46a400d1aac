"""The two workers under vLLM: what a Sender or a Receiver needs of the engine (KV tensors, rank, dtype)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from epd_serve.engine.compat import platform_fingerprint, tp_rank
from epd_serve.engine.kv.decode_scheduler import DecodeStep
from epd_serve.engine.kv.faults import Faults
from epd_serve.engine.kv.link import Link, Outgoing
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.prefill_scheduler import PrefillStep
from epd_serve.engine.kv.receiver import Receiver
from epd_serve.engine.kv.regions import Layers, layers_of, shape_of
from epd_serve.engine.kv.sender import Sender
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import ReceiveSide, SendSide
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring, worker_endpoint
from npu_ops.fences import fence
from npu_ops.memory import memory_here

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def uses_mooncake(wiring: StageWiring) -> bool:
    """`auto` is shared memory: who wires stages of several hosts says `mooncake`."""
    return wiring.kv_transport == "mooncake"


def quarantine_s(wiring: StageWiring) -> float:
    """How long D keeps blocks after P fell silent (see `DecodeDesk`)."""
    return MooncakeReceiveSide.quarantine_s if uses_mooncake(wiring) else ShmReceiveSide.quarantine_s


class _Worker:
    """What both ends share: identity, the KV cache as regions, and its shape for the handshake."""

    def __init__(self, wiring: StageWiring, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._wiring = wiring
        self._config = vllm_config
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = tp_rank()
        self._name = f"{wiring.instance}:{wiring.incarnation}"
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._mooncake: MooncakeEndpoint | None = None

    def _view(self, kv_caches: dict[str, torch.Tensor]) -> tuple[Layers, dict[str, Any]]:
        layers = layers_of(kv_caches, self._num_blocks)
        self._device = memory_here(layers[0][0].data.device.type)
        shape = shape_of(
            layers,
            block_size=self._config.cache_config.block_size,
            dtype=str(next(iter(kv_caches.values()))[0].dtype),
            tp=self._config.parallel_config.tensor_parallel_size,
            rank=self._rank,
            platform=platform_fingerprint(),
        )
        if uses_mooncake(self._wiring):
            self._mooncake = MooncakeEndpoint(layers, self._wiring.host, self._wiring.mooncake_protocol, self._device)
        return layers, shape


class PrefillWorker(_Worker):
    """P's worker: a Sender over this rank's KV cache."""

    _sender: Sender
    _idle = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers, shape = self._view(kv_caches)
        device = layers[0][0].data.device
        timeout_s = self._wiring.kv_peer_timeout_s

        def open_link(endpoint: str, on_over: Callable[[Outgoing], None]) -> Link:
            return Link(
                endpoint,
                source=self._name,
                shape=shape,
                side=self._side(layers, endpoint),
                timeout_s=timeout_s,
                on_over=on_over,
                trace=self._trace,
            )

        self._sender = Sender(
            rank=self._rank,
            num_layers=len(layers),
            group_layers=4,
            open_link=open_link,
            mark_written=lambda: fence(device),
            trace=self._trace,
        )
        self._sender.warm(worker_endpoint(template, self._rank) for template in self._wiring.kv_peers)

    def begin_step(self, step: PrefillStep) -> None:
        self._idle = step.idle
        self._sender.begin_step(step.chunks, step.stops, step.preempted)

    def layer_saved(self) -> None:
        self._sender.layer_saved()

    def end_step(self) -> None:
        self._sender.flush()

    def take_over(self, finished: set[str]) -> set[str]:
        return self._sender.take_over(finished, idle=self._idle)

    def close(self) -> None:
        if hasattr(self, "_sender"):
            self._sender.close()

    def _side(self, layers: Layers, endpoint: str) -> SendSide:
        if self._mooncake is not None:
            return MooncakeSendSide(layers, self._mooncake, self._wiring.kv_peer_timeout_s)
        peer = "".join(letter if letter.isalnum() else "-" for letter in endpoint.rsplit("/", 1)[-1])
        path = f"{self._wiring.kv_staging}-{self._wiring.instance}-{self._rank}-{peer}"
        return ShmSendSide(layers, path, self._wiring.kv_staging_bytes)


class DecodeWorker(_Worker):
    """D's worker: a Receiver into this rank's KV cache."""

    _receiver: Receiver
    _idle = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers, shape = self._view(kv_caches)
        side: ReceiveSide = ShmReceiveSide(layers, self._device)
        if self._mooncake is not None:
            side = MooncakeReceiveSide(self._mooncake)
        endpoint = worker_endpoint(self._wiring.kv_worker_endpoint, self._rank)
        faults = Faults(self._wiring.kv_faults)
        self._receiver = Receiver(endpoint, self._name, shape, [side], self._trace, device=self._device, faults=faults)
        self._bad_blocks: set[int] = set()

    def begin_step(self, step: DecodeStep) -> None:
        self._idle = step.idle
        self._receiver.expect(step.expected, step.failed)

    def take_finished(self) -> set[str]:
        received, failed = self._receiver.take_finished(idle=self._idle)
        for item in failed:  # vLLM wants the bad blocks no later than the pass that reports the request
            self._bad_blocks.update(item.blocks)
        return {item.request for item in (*received, *failed)}

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        if hasattr(self, "_receiver"):
            self._receiver.close()
