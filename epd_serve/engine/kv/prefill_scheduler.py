"""P's scheduler side under vLLM: admits what D has reserved for, names the blocks that each step completes.

D renders and tokenises a request as P does, and reserves a moment after P could begin. So one request at a time begins
at once (`allow_ahead`). Its KV stays in its blocks, also once the request has finished here, and leaves in the first
step after D's READY. With a prompt of at most `AHEAD_TOKENS` that is a matter of milliseconds, which D's next token
waits for and the first one does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epd_serve import wire
from epd_serve.engine import compat
from epd_serve.engine.kv.sender import ChunkJob
from epd_serve.kv.control import PrefillControl
from epd_serve.kv.faults import faults_of
from epd_serve.kv.params import prompt_hash, send_params
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from epd_serve.kv.sending import Sending
from epd_serve.trace import Trace
from epd_serve.wake import idle_waiter
from epd_serve.wire import TransferKey
from epd_serve.wiring import StageWiring

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


AHEAD_TOKENS = 1024


@dataclass
class PrefillStep:
    """Scheduler → worker, per step.

    Attributes:
        chunks: what this step computes; late: what earlier ones have.
        ended: requests that vLLM had finished before anything of them was handed over, with their late chunks or none.
        stops, preempted: request ids, as those of `ended`.
        tokens: of the whole step.
        kept: how many requests vLLM has finished of which nothing is handed over yet.
    """

    chunks: list[ChunkJob] = field(default_factory=list)
    late: list[ChunkJob] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    tokens: int = 0
    kept: int = 0


class PrefillScheduler:
    """One per P scheduler. See `epd_serve.engine.kv.connector` for when vLLM calls what."""

    def __init__(self, wiring: StageWiring, block_size: int, kv_heads: int) -> None:
        self._block_size = block_size
        self._kv_heads = kv_heads
        self._trace = Trace(wiring.trace_path, wiring.instance)
        desk = PrefillDesk(wiring.incarnation, wiring.kv_ready_wait_s)
        self._control = PrefillControl(desk, wiring.kv_endpoint, faults_of(wiring.kv_faults), key_file=wiring.key_file)
        self._desk = desk
        self._sending: dict[str, Sending] = {}
        self._request_of: dict[TransferKey, str] = {}
        self._prompts: dict[str, PromptShape] = {}
        self._stops: list[str] = []
        self._may_go_ahead = False
        self._next_ahead: str | None = None  # the request that was let run last, if D has no blocks for it
        self._kept: dict[str, float] = {}  # finished before D had blocks, and since when

    def allow_ahead(self, fit: Callable[[int], bool]) -> int:
        """From now on one request at a time may begin before D has reserved, where that leaves room for any other.
        Called by our scheduler class.

        Args:
            fit: whether blocks for so many tokens do.

        Returns how many tokens' blocks it may hold.
        """
        self._may_go_ahead = fit(AHEAD_TOKENS)
        return AHEAD_TOKENS if self._may_go_ahead else 0

    def may_run(self, request: Request) -> bool:
        """False defers the request (vLLM asks again at the next step) until D has reserved its blocks."""
        params = send_params(request.kv_transfer_params, request.request_id)
        if params is None or request.request_id in self._sending:
            return True
        if request.request_id not in self._prompts:
            keys = [feature.identifier for feature in request.mm_features]
            digest = prompt_hash(request.prompt_token_ids or (), keys)
            shape = PromptShape(request.num_prompt_tokens, digest, self._block_size, self._kv_heads)
            self._prompts[request.request_id] = shape
            self._trace.stamp(params.key.transfer_id, "prefill_arrived")
        if self._admit(request.request_id, params.key) is not Admission.WAIT:
            return True
        if not self._may_go_ahead or request.num_prompt_tokens > AHEAD_TOKENS:
            return False
        with self._control.lock:
            self._next_ahead = None if self._desk.someone_ahead() else request.request_id
        return self._next_ahead is not None

    def begun(self, request: Request) -> None:
        """vLLM has allocated blocks for a request that may run. Where D has none, it goes ahead from now on: until now
        something else might have kept it from running."""
        may, self._next_ahead = self._next_ahead == request.request_id, None
        params = send_params(request.kv_transfer_params, request.request_id)
        if may and params is not None:
            self._admit(request.request_id, params.key, ahead=True)

    def _admit(self, request: str, key: TransferKey, *, ahead: bool = False) -> Admission:
        prompt = self._prompts[request]
        with self._control.lock:
            admission = self._desk.admit(key, prompt, time.monotonic(), ahead=ahead)
        self._control.flush()
        if admission is Admission.SEND:
            self._sending[request] = Sending(key, prompt.tokens, self._block_size)
            self._request_of[key] = request
        return admission

    def step(self, output: SchedulerOutput) -> PrefillStep:
        """Metadata of one step: the blocks that become whole in it, per transfer."""
        tokens = output.total_num_scheduled_tokens
        step = PrefillStep(preempted=list(output.preempted_req_ids or ()), tokens=tokens)
        for request in step.preempted:
            if request in self._sending:
                self._sending[request].lose()
        self._collect_stops()
        step.stops, self._stops = self._stops, []
        self._late(step, output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self._grow(new.req_id, list(new.block_ids[0]), restart=True)
            self._chunk(step, new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            if request in self._sending:
                groups = cached.new_block_ids[index]
                restart = request in cached.resumed_req_ids
                self._grow(request, list(groups[0]) if groups else [], restart=restart)
                computed = cached.num_computed_tokens[index]
                self._chunk(step, request, computed, output.num_scheduled_tokens[request])
        step.kept = len(self._kept)
        if not step.tokens:
            with self._control.lock:
                waiting = self._desk.waiting()
            if waiting or self._sending:  # for D's blocks; for the end of what is being sent
                idle_waiter.expect_wake()
        return step

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(keep its blocks until the worker reports, what to tell the proxy)."""
        keep, said = self._finished(request)
        params = send_params(request.kv_transfer_params, request.request_id)
        if params is not None and params.first_token and said is not None and compat.was_cut(request):
            sent = f"{wire.TOKEN_SENT}{request.output_token_ids[0]}"
            request.stop_reason = sent if said["ok"] else f"{wire.KV_NOT_SENT}{said['reason']}"
        return keep, said

    def _finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request.request_id, None)
        params = send_params(request.kv_transfer_params, request.request_id)
        if params is None:
            return False, None
        sending = self._sending.get(request.request_id)
        with self._control.lock:
            kept = (
                sending is not None
                and not sending.told
                and sending.whole
                and self._desk.is_wanted(params.key)
                and not compat.was_aborted(request)
            )
            complete = kept or (sending is not None and sending.complete)
            if params.first_token and complete and request.output_token_ids:
                self._desk.sampled(params.key, request.output_token_ids[0])
            stop = not complete and self._desk.gone(params.key, "prefill request ended early")
            if stop and (sending is None or not sending.told):
                self._desk.stopped_unsent(params.key)
                stop = False
            fate = self._desk.fate(params.key)
        self._control.flush()
        if stop:
            self._stops.append(request.request_id)
        if kept:
            self._kept[request.request_id] = time.monotonic()
            self._trace.stamp(params.key.transfer_id, "prefill_end")
        if kept or (sending is not None and sending.told):
            return True, {"ok": complete, "reason": "" if complete else "ended before the prompt was sent"}
        self._drop(request.request_id)
        return False, {"ok": False, "reason": fate or "nothing was sent"}

    def sent(self, requests: set[str]) -> None:
        """The worker reported these to vLLM: their transfers are over."""
        for request in requests:
            sending = self._drop(request)
            if sending is not None:
                with self._control.lock:
                    self._desk.closed(sending.key)
        if requests:
            idle_waiter.wake()  # their blocks are free for the next step

    def close(self) -> None:
        self._control.close()

    def _collect_stops(self) -> None:
        with self._control.lock:
            keys, self._control.stops = self._control.stops, []
            for key in keys:
                request = self._request_of.get(key)
                if request is not None and self._sending[request].told:
                    self._stops.append(request)
                else:
                    self._desk.stopped_unsent(key)
        if keys:
            self._control.flush()

    def _grow(self, request: str, blocks: list[int], *, restart: bool) -> None:
        if request in self._sending:
            self._sending[request].grow(blocks, restart=restart)

    def _late(self, step: PrefillStep, scheduled: Mapping[str, int]) -> None:
        """What was computed ahead of D leaves if D has blocks by now; if it never will, the blocks here are free."""
        for request, sending in list(self._sending.items()):
            if request in scheduled or sending.complete:
                continue
            job = self._job(request, sending)
            if job is not None:
                step.late.append(job)
            with self._control.lock:
                over = self._desk.fate(sending.key) is not None
            if request in self._kept and (job is not None or over):
                step.ended.append(request)
                del self._kept[request]
                if job is None:
                    self._drop(request)

    def _chunk(self, step: PrefillStep, request: str, computed: int, scheduled: int) -> None:
        sending = self._sending.get(request)
        if sending is None:
            return
        if not sending.computed:
            self._trace.stamp(sending.key.transfer_id, "prefill_start")
        sending.computed = computed + scheduled
        job = self._job(request, sending)
        if job is not None:
            step.chunks.append(job)

    def _job(self, request: str, sending: Sending) -> ChunkJob | None:
        """What there is to send of it. None also where D has no blocks yet, and where it was cancelled: the worker has
        been told, or never knew."""
        with self._control.lock:
            ready = self._desk.ready(sending.key)
        chunk = sending.chunk(ready) if ready is not None else None
        if ready is None or chunk is None:
            return None
        where = (ready.source, tuple(ready.endpoints), chunk.src, chunk.dst)
        return ChunkJob(sending.key, request, *where, chunk.remaining, self._kept.get(request, 0.0))

    def _drop(self, request: str) -> Sending | None:
        sending = self._sending.pop(request, None)
        if sending is not None:
            self._request_of.pop(sending.key, None)
        return sending
