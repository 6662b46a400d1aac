"""The two workers under vLLM: what a Sender or a Receiver needs of the engine (KV tensors, rank, dtype, device)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from epd_serve import wire
from epd_serve.engine import compat
from epd_serve.engine.kv.checksum_audit import ChecksumAudit, asked_for
from epd_serve.engine.kv.decode_scheduler import DecodeStep
from epd_serve.engine.kv.grouping_file import open_grouping
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.prefill_scheduler import PrefillStep
from epd_serve.engine.kv.receiver import Receiver
from epd_serve.engine.kv.regions import flat_regions, layers_of, shape_of
from epd_serve.engine.kv.reporter import Reporter
from epd_serve.engine.kv.sender import Sender
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import ReceiveSide, SendSide
from epd_serve.engine.kv.transports import OnDemand, offered
from epd_serve.engine.traffic import TrafficBoard
from epd_serve.kv.faults import faults_of
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.kv.transport_selection import MOONCAKE, SHM, why_not
from epd_serve.peers import Peers
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring, worker_endpoint
from npu_ops.torch_memory import memory_here

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVCache:
    """This worker's KV cache as transfers see it: regions, shape for the handshake, device, transports.

    Made by the model's thread, which has set its device.
    """

    def __init__(
        self, wiring: StageWiring, vllm_config: VllmConfig, num_blocks: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.wiring = wiring
        self.rank = compat.tp_rank()
        self.name = f"{wiring.instance}:{wiring.incarnation}"
        self.trace = Trace(wiring.trace_path, wiring.instance)
        self.faults = faults_of(wiring.kv_faults)
        self.layers = layers_of(tensors, num_blocks)
        self.shape = shape_of(
            self.layers,
            names=tensors,
            block_size=vllm_config.cache_config.block_size,
            dtype=compat.kv_dtype(vllm_config, next(iter(tensors.values()))[0].dtype),
            tp=vllm_config.parallel_config.tensor_parallel_size,
            rank=self.rank,
            platform=compat.platform_fingerprint(),
            kv_heads_total=compat.total_kv_heads(vllm_config),
            layout=compat.kv_cache_layout(vllm_config),
        )
        kind = self.layers[0][0].data.device.type
        self.device = memory_here(kind)
        self._kind = kind
        self._together = None if wiring.spans_nodes else True  # with those whom nobody has met yet
        # Now, and not when a link opens: no device has memory to spare once it serves.
        largest_block = max(sum(region.block_bytes for region in layer) for layer in self.layers)
        ways = offered(wiring, kind, same_node=self._together)
        stages = SHM in ways and (wiring.takes_kv or not self.device.host_visible)  # P's CPU gathers in place
        self._memory = PacketMemory(self.device, max(SLICE_BYTES, largest_block) if stages else 0)
        scratch = self.device.allocate(LARGEST_PROBE_BYTES if MOONCAKE in ways else 0)
        self._mooncake = OnDemand(
            lambda: MooncakeEndpoint(
                flat_regions(self.layers), wiring.host, wiring.mooncake_protocol, self.device, scratch
            )
        )

    def send_sides(self, endpoint: str, peers: Peers) -> list[SendSide]:
        """P's ends of one link, in order of preference. `peers`: who is there."""
        ways = offered(self.wiring, self._kind, colocated=peers.beside(endpoint), same_node=peers.together(endpoint))
        return [self._send_side(name, endpoint) for name in ways]

    def receive_sides(self) -> list[ReceiveSide]:
        """D's ends of all its links."""
        return [
            MooncakeReceiveSide(self._mooncake)
            if name == MOONCAKE
            else ShmReceiveSide(self.layers, self.device, self._memory)
            for name in offered(self.wiring, self._kind, same_node=self._together)
        ]

    def why_not(self, transport: str, node: str) -> str:
        """Why D takes no KV by this transport from a worker of that node, or ""."""
        return why_not(transport, self.wiring.kv_transport, self._kind, here=self.wiring.node, there=node)

    def checksum_audit(self) -> ChecksumAudit | None:
        return ChecksumAudit(self.layers, self.device, self.trace) if asked_for() else None

    def _send_side(self, name: str, endpoint: str) -> SendSide:
        wiring = self.wiring
        if name == MOONCAKE:
            return MooncakeSendSide(self.layers, self._mooncake, wiring.mooncake_protocol, wiring.kv_peer_timeout_s)
        peer = "".join(letter if letter.isalnum() else "-" for letter in endpoint.rsplit("/", 1)[-1])
        path = f"{wiring.kv_staging}-{wiring.instance}-{self.rank}-{peer}"
        return ShmSendSide(self.layers, path, wiring.kv_staging_bytes, self.device, self._memory)


class PrefillWorker:
    """P's worker: a Sender over this rank's KV cache, and what it reports of its links."""

    _sender: Sender | None = None
    _audit: ChecksumAudit | None = None

    def __init__(self, wiring: StageWiring) -> None:
        self._wiring = wiring
        self._grouping = open_grouping(wiring.kv_grouping, wiring.kv_packet_floor_bytes)
        self._rank = compat.tp_rank()
        self._peers = Peers(wiring)
        self._kept = 0  # requests that have yet to leave, by the scheduler's word
        self._reporter = Reporter(wiring, self._rank, self._turn)

    def register(self, cache: KVCache) -> None:
        board = TrafficBoard(self._wiring.traffic, announcer=1 + cache.rank)

        def open_link(endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link:
            return Link(
                endpoint,
                rank=rank,
                source=cache.name,
                shape=cache.shape,
                sides=cache.send_sides(endpoint, self._peers),
                device=cache.device,
                timeout_s=self._wiring.kv_peer_timeout_s,
                on_over=on_over,
                trace=cache.trace,
                faults=cache.faults,
                quiet_until=board.quiet_until,
                on_change=self._reporter.changed,
                node=self._wiring.node,
                key_file=self._wiring.key_file,
            )

        self._sender = Sender(
            shape=cache.shape,
            grouping=self._grouping,
            device=cache.device,
            open_link=open_link,
            trace=cache.trace,
            on_open=self._reporter.changed_urgently,
        )
        self._audit = cache.checksum_audit()
        self._follow_peers()
        self._reporter.start()

    def fence(self, step: PrefillStep) -> None:
        """Before the step writes anything. `begin_step` does it again, which is free."""
        self._sending().preempt(step.preempted)

    def begin_step(self, step: PrefillStep) -> None:
        if self._audit is not None:
            self._audit.computing(step.late, step.stops)
            self._audit.computed()  # a step without tokens has no end in 0.23
            self._audit.computing(step.chunks, ())
        self._sending().begin_step(step.chunks, step.stops, step.preempted, step.tokens)
        self._sending().send_late(step.late, step.ended)
        kept, self._kept = self._kept, step.kept
        if kept != step.kept:
            self._reporter.changed_urgently()

    def layer_saved(self, name: str) -> None:
        self._sending().layer_saved(name)

    def end_step(self) -> None:
        self._sending().flush()
        if self._audit is not None:
            self._audit.computed()

    def take_over(self, finished: set[str]) -> set[str]:
        return self._sending().take_over(finished)

    def close(self) -> None:
        self._reporter.close()
        if self._sender is not None:
            self._sender.close()

    def _sending(self) -> Sender:
        assert self._sender is not None, "vLLM registers the KV caches before it runs a step"
        return self._sender

    def _follow_peers(self) -> None:
        """Open links to those that this instance sends KV to now, before traffic; close those to whoever has left."""
        if self._peers.changed():
            self._sending().meet(self._peers.takers_of_kv())
        self._sending().part(self._peers.may_be_at)

    def _turn(self) -> wire.KvReport:
        """The reporter's, at least once a second."""
        self._sending().look()
        self._follow_peers()
        return self._report()

    def _report(self) -> wire.KvReport:
        wiring, sender = self._wiring, self._sending()
        return wire.KvReport(
            wiring.instance,
            wiring.incarnation,
            self._rank,
            self._grouping.name,
            sender.layer_s,
            sender.report(),
            sender.open + self._kept,
        )


class DecodeWorker:
    """D's worker: a Receiver into this rank's KV cache."""

    _receiver: Receiver | None = None
    _audit: ChecksumAudit | None = None

    def __init__(self, wiring: StageWiring) -> None:
        self._wiring = wiring
        self._bad_blocks: set[int] = set()

    def register(self, cache: KVCache) -> None:
        self._receiver = Receiver(
            worker_endpoint(self._wiring.kv_worker_endpoint, cache.rank),
            cache.name,
            cache.shape,
            cache.receive_sides(),
            cache.trace,
            device=cache.device,
            faults=cache.faults,
            node=self._wiring.node,
            why_not=cache.why_not,
            key_file=self._wiring.key_file,
        )
        self._audit = cache.checksum_audit()

    def begin_step(self, step: DecodeStep) -> None:
        self._receiving().expect(step.expected, step.failed, step.told)

    def take_finished(self) -> set[str]:
        received, failed = self._receiving().take_finished()
        if self._audit is not None:
            self._audit.received(received)
        for item in failed:  # vLLM wants the bad blocks no later than the pass that reports the request
            self._bad_blocks.update(item.blocks)
        return {item.request for item in (*received, *failed)}

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _receiving(self) -> Receiver:
        assert self._receiver is not None, "vLLM registers the KV caches before it runs a step"
        return self._receiver
