"""One link: the thread at a P worker that sends everything for one D worker.

A thread per peer, so that a dead or slow peer delays no other. What leaves next is the outbox's decision, who is
reached the peer's. Packets move in slices: a large one does not hold up a more urgent one for long. The model's thread
waits for nothing here, however long a slice is under way.

Four rules keep a hole from passing for KV, and KV out of blocks that D has given to others:

* a transfer that was stopped or preempted has a new generation; its part of an older packet is left out of it, and
  what of it was under way is written over, as it is sent again from its beginning, before a DONE that says "whole";
* a connection that fails takes with it every transfer that has packets on it, for they may be lost: no DONE follows;
* blocks belong to one life of D: once another life answers, transfers of the former one end;
* a transfer that failed is over, which P's scheduler takes for its last write, only when no write that was given up
  until then can still land. Writes of transfers that fail later do not keep it, nor is it kept if nothing was sent.

P's scheduler says to D that a transfer is alive as long as the links' threads work: one that hangs ends the stage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.kv.link_connection import Connection
from epd_serve.engine.kv.link_cost import MeasuredCost
from epd_serve.engine.kv.link_jobs import DoneJob, Outbox, Outgoing, PacketJob, SliceJob
from epd_serve.engine.kv.link_peer import Peer
from epd_serve.engine.kv.link_record import LinkRecord, Outcome
from epd_serve.engine.kv.link_transfers import ActiveTransfers
from epd_serve.engine.kv.transport import LinkError, SendSide
from epd_serve.engine.vital_thread import VitalThread
from epd_serve.kv.faults import Faults
from epd_serve.kv.grouping import LinkCost
from epd_serve.kv.plan import LayerPacket
from epd_serve.kv.slices import SLICE_BYTES, packet_bytes
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.fences import DeviceHungError
from npu_ops.memory import DeviceMemory

logger = logging.getLogger(__name__)

_IDLE_S = 1.0


class Link:
    """Opens by itself, opens again after a failure, ends with `close`.

    Args:
        endpoint: D worker's data address; rank: its tensor-parallel rank.
        source: instance and incarnation of P; node: where it is; shape: of its KV cache (`regions.shape_of`).
        sides: P's ends of the transports, in order of preference.
        timeout_s: silence of D after which the connection fails; a transfer waits for one whole attempt to open it.
        on_over: called once per transfer, from this thread, when DONE was sent or cannot be.
        quiet_until: until when packets that can wait should leave the network to others (`TrafficBoard`).
        slice_bytes: what is moved at once at most.
        on_change: called from this thread when `snapshot` has news.
        key_file: of the deployment's key, where the endpoint is a TCP port.
        gate: passed before anything else is done.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        rank: int,
        source: str,
        shape: Mapping[str, Any],
        sides: Sequence[SendSide],
        device: DeviceMemory,
        timeout_s: float,
        on_over: Callable[[Outgoing], None],
        trace: Trace,
        faults: Faults | None = None,
        quiet_until: Callable[[float], float] = lambda now: 0.0,
        slice_bytes: int = SLICE_BYTES,
        on_change: Callable[[], None] = lambda: None,
        node: str = "local",
        key_file: str = "",
        gate: CaptureGate = capture_gate,
    ) -> None:
        self._endpoint, self._rank = endpoint, rank
        self._gate = gate
        self._sides = tuple(sides)
        self._device = device
        self._timeout_s = timeout_s
        self._on_over, self._on_change = on_over, on_change
        self._quiet_until = quiet_until
        self._faults = faults or Faults()
        self._cost = MeasuredCost()
        self._transfers = ActiveTransfers()
        self._record = LinkRecord(self._cost, trace)
        self._connection = Connection(
            endpoint,
            source=source,
            shape=shape,
            sides=sides,
            timeout_s=timeout_s,
            faults=self._faults,
            probe=self._cost.probe,
            on_credit=self._record.credited,
            node=node,
            key_file=key_file,
            on_turn=self._beat,
        )
        self._peer = Peer(endpoint, self._connection, self._transfers, self._record.lost, self._changed)
        slice_bytes = min(slice_bytes, *(side.largest_move for side in sides))
        self._outbox = Outbox(slice_bytes, lambda nbytes: self._cost.now().seconds(nbytes))
        self._failed: list[tuple[DoneJob, list[int]]] = []  # per side, how many writes were given up until then
        self._thread = VitalThread(f"epd-kv-link to {endpoint}", self._run)
        self._thread.start()

    # --- any thread -----------------------------------------------------------------------------------------------

    def put(self, job: PacketJob, deadline: float) -> None:
        """Send a packet; `deadline` (monotonic) says when it is wanted at D."""
        self._transfers.know(job.outs, time.monotonic())
        self._outbox.put(job, deadline)
        self._connection.wake.ring()

    def end(self, job: DoneJob) -> None:
        """Send DONE after all packets of its transfer."""
        self._transfers.know((job.out,), time.monotonic())
        self._outbox.end(job)
        self._connection.wake.ring()

    def reprioritise(self, key: TransferKey, deadline: float) -> None:
        """What is queued of this transfer is wanted earlier than was said."""
        self._outbox.reprioritise(key, deadline)

    def drop(self, key: TransferKey) -> None:
        """Forget what is queued of this transfer, which has a new generation and has not ended."""
        self._outbox.drop(key)

    def cost(self) -> LinkCost:
        return self._cost.now()

    def backlog_s(self, deadline: float) -> float:
        """How long what goes before a packet with this deadline will keep the link busy."""
        nbytes = self._outbox.backlog_bytes(deadline) + self._record.in_flight_bytes
        return self._cost.now().seconds(nbytes) if nbytes else 0.0

    def snapshot(self) -> wire.KvLink:
        """The link now. Its parts are read one by one while it works: each is right, they need not agree exactly."""
        cost, up = self._cost.now(), self._peer.state == "up"
        return wire.KvLink(
            peer=self._peer.name or self._endpoint,
            rank=self._rank,
            state=self._peer.state,
            reason=self._peer.reason,
            transport=self._connection.side.label if up else "",
            setup_s=cost.setup_s,
            s_per_byte=cost.s_per_byte,
            queued_bytes=self._outbox.backlog_bytes(),
            retries=self._peer.retries,
            **asdict(self._record.counters),
        )

    def look(self) -> None:
        """Ends the stage if the link's thread hangs. To be called about once a second, by one thread."""
        self._thread.look()

    def close(self) -> None:
        """Send what is queued if the link is up, then end."""
        self._connection.closing.set()
        self._connection.wake.ring()
        self._thread.join(timeout=self._timeout_s)

    # --- the link's thread ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._thread.beat()

    def _run(self) -> None:
        while not self._gate.passed(_IDLE_S):
            self._beat()
            if self._connection.closing.is_set():
                return  # nothing was opened, and no device may be touched
        self._device.enter_thread()
        while not self._finished():
            self._beat()
            job = self._next()
            outcome: Outcome = "failed"
            try:
                if isinstance(job, SliceJob):
                    self._move(job)
                elif isinstance(job, DoneJob):
                    outcome = self._end(job)
                else:
                    self._peer.wait(job)
            except LinkError as error:
                self._fail(job, str(error))
            except DeviceHungError:  # what it has been given may still run, and read any of this memory
                raise
            except Exception as error:  # this peer's, or this packet's: the stage has other links
                logger.exception("KV link to %s", self._endpoint)
                self._fail(job, f"{type(error).__name__}: {error}")
            if isinstance(job, DoneJob):
                if outcome == "failed" and self._transfers.ever_sent(job.out.key):
                    self._failed.append((job, [side.given_up() for side in self._sides]))
                else:
                    self._over(job, outcome)
            self._release()
        self._peer.disconnect()
        for side in self._sides:
            side.close()

    def _release(self) -> None:
        """Failed transfers of which nothing can land any more are over."""
        failed, self._failed = self._failed, []
        for job, given_up in failed:
            if any(side.may_land(count) for side, count in zip(self._sides, given_up, strict=True)):
                self._failed.append((job, given_up))
            else:
                self._over(job, "failed")

    def _over(self, job: DoneJob, outcome: Outcome) -> None:
        self._record.ended(job, outcome)
        self._transfers.over(job.out.key)
        self._on_over(job.out)
        self._on_change()

    def _changed(self) -> None:
        self._record.peer = self._peer.name or self._endpoint
        self._on_change()

    def _finished(self) -> bool:
        return self._connection.closing.is_set() and (not self._connection.is_open or self._outbox.empty())

    def _next(self) -> SliceJob | DoneJob | float:
        """What leaves now, or until when there is nothing."""
        now = time.monotonic()
        quiet_until = self._quiet_until(now) if self._connection.side.shares_network else 0.0
        job = self._outbox.take(now, quiet_until)
        if job is None:
            return now + _IDLE_S
        return now + job if isinstance(job, float) else job

    def _move(self, job: SliceJob) -> None:
        packet, connection = job.packet, self._connection
        living = self._peer.reach(job.wanted())
        if living:
            self._ready(packet, living)
            connection.side.make_room(packet_bytes(job.slice, packet.block_bytes), connection.receive)
        sendable = packet.current() & {out.key for out in living}
        parts = tuple(part for part in job.slice.parts if part[0] in sendable)
        if not parts:
            self._record.left_out(packet)
            return
        part = LayerPacket(job.slice.first, job.slice.last, parts)
        self._transfers.sent(sendable)
        move = self._record.moving(packet, part)
        connection.staged_seq = 0
        connection.side.move(part, connection.send, connection.receive)
        self._record.moved(move, connection.staged_seq)
        connection.wait(0.0)  # takes the credits that came in

    def _ready(self, packet: PacketJob, outs: Sequence[Outgoing]) -> None:
        """Returns when the device has written the packet's layers."""
        if not packet.began_at:
            self._faults.reached("packet")
        began = time.monotonic()
        packet.written()
        self._record.computed(outs, began)

    def _end(self, job: DoneJob) -> Outcome:
        if not self._peer.reach(job.wanted()):
            return "failed"
        self._faults.reached("done")
        # Preempted after its last chunk: its packets were left out, so it is not whole.
        stale = job.ok and job.generation != job.out.generation
        packets = self._connection.side.staged(job.out.key)
        reason = "preempted by prefill" if stale else job.reason
        self._connection.send(wire.Done(job.out.key, job.ok and not stale, reason, packets, job.out.senders))
        self._transfers.done(job.out.key)
        if not job.ok:
            return "cancelled"
        return "failed" if stale else "sent"

    def _fail(self, job: SliceJob | DoneJob | float, reason: str) -> None:
        """This job's transfers end, and all that have packets on the connection."""
        if not isinstance(job, float):
            self._transfers.broke(job.wanted())
        self._peer.failed(reason)
