"""D's scheduler side under vLLM: reserves blocks, tells P, and passes failures to the worker that must report them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd_serve import wire
from epd_serve.engine.kv.receiver import Expected
from epd_serve.kv.control import DecodeControl
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.faults import faults_of
from epd_serve.kv.params import ReceiveParams, prompt_hash, receive_params, tokens_to_go_on_after
from epd_serve.trace import Trace
from epd_serve.wake import idle_waiter
from epd_serve.wire import GOES_ON_AFTER, TransferKey
from epd_serve.wiring import StageWiring, worker_endpoint

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class DecodeStep:
    """Scheduler → worker, per step. `told`: transfers whose first token is known by now."""

    expected: list[Expected] = field(default_factory=list)
    failed: list[TransferKey] = field(default_factory=list)
    told: list[TransferKey] = field(default_factory=list)


@dataclass
class _Held:
    """A READY that must not leave yet: `steps` more steps may still write to its blocks."""

    request: str
    endpoint: str
    ready: wire.Ready
    steps: int


class DecodeScheduler:
    """One per D scheduler. See `epd_serve.engine.kv.connector` for when vLLM calls what.

    Args:
        quarantine_s: see `DecodeDesk`.
        steps_in_flight: steps that may still write to the blocks of finished requests when vLLM hands them out again
            (`compat.steps_in_flight_at_reuse`). P's packets know no stream: READY waits until those steps have ended.
    """

    def __init__(
        self,
        wiring: StageWiring,
        block_size: int,
        tp: int,
        quarantine_s: Callable[[str], float],
        *,
        steps_in_flight: int = 0,
    ) -> None:
        self._wiring = wiring
        self._steps_in_flight = steps_in_flight
        self._held: deque[_Held] = deque()
        self._unoffered: list[TransferKey] = []  # reserved, given up before their READY left
        self._block_size = block_size
        self._endpoints = [worker_endpoint(wiring.kv_worker_endpoint, rank) for rank in range(tp)]
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._desk = DecodeDesk(wiring.kv_peer_timeout_s, quarantine_s)
        self._control = DecodeControl(self._desk, faults_of(wiring.kv_faults), key_file=wiring.key_file)
        self._asked: set[str] = set()  # requests whose transfer was asked for: a preempted one computes alone
        self._key_of: dict[str, TransferKey] = {}
        self._awaiting_token: dict[TransferKey, Request] = {}
        self._step = DecodeStep()

    def queued(self, request: Request) -> None:
        """A request has arrived; it may have to wait for blocks for long."""
        params = self._params(request)
        if params is not None:
            with self._control.lock:
                self._desk.queued(params.key, params.endpoint)

    def tokens_to_load(self, request: Request, computed: int) -> int:
        """Prompt tokens that P will push: all that are not in D's prefix cache. 0 when there is nothing to ask for."""
        if self._params(request) is None or request.request_id in self._asked:
            return 0
        return max(0, request.num_prompt_tokens - computed)

    def reserve(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM allocated blocks for the prompt: offer them to P, once."""
        params = self._params(request)
        if params is None or tokens <= 0 or request.request_id in self._asked:
            return
        self._asked.add(request.request_id)
        count = -(-request.num_prompt_tokens // self._block_size)
        table = list(blocks.get_block_ids()[0])[:count]
        start = request.num_prompt_tokens - tokens
        ready = wire.Ready(
            key=params.key,
            incarnation=params.incarnation,
            source=f"{self._wiring.instance}:{self._wiring.incarnation}",
            blocks=table,
            start_token=start,
            prompt_tokens=request.num_prompt_tokens,
            prompt_hash=prompt_hash(
                request.prompt_token_ids or (), [feature.identifier for feature in request.mm_features]
            ),
            endpoints=self._endpoints,
        )
        if self._steps_in_flight:
            self._held.append(_Held(request.request_id, params.endpoint, ready, self._steps_in_flight))
        else:
            self._offer(params.endpoint, ready)
        self._key_of[request.request_id] = params.key
        missing = tuple(table[start // self._block_size :])
        if params.awaits_token:
            self._awaiting_token[params.key] = request
        self._step.expected.append(Expected(params.key, request.request_id, missing, params.awaits_token))
        self._trace.stamp(params.key.transfer_id, "decode_reserved")

    def step(self, output: SchedulerOutput) -> DecodeStep:
        self._take_tokens()
        step, self._step = self._step, DecodeStep()
        with self._control.lock:
            step.failed = self._desk.take_failures() + self._control.take_unoffered()
        step.failed += self._unoffered
        self._unoffered = []
        self._offer_held()
        if self._held:  # they leave after a step
            idle_waiter.need_step()
        elif not output.total_num_scheduled_tokens and self._key_of:
            idle_waiter.expect_wake()
        return step

    def received(self, requests: set[str]) -> None:
        """The worker reported these to vLLM, as received or as failed."""
        self._take_tokens()
        for request in requests:
            key = self._key_of.pop(request, None)
            if key is not None:
                with self._control.lock:
                    self._desk.closed(key)
        if requests:
            idle_waiter.wake()  # the next step can run them

    def finished(self, request: Request) -> None:
        """The request left the scheduler. vLLM keeps blocks of an unfinished load until the worker reports it."""
        params = self._params(request)
        self._asked.discard(request.request_id)
        if params is not None:
            self._awaiting_token.pop(params.key, None)
            _check_first_tokens(request)
        for held in [held for held in self._held if held.request == request.request_id]:
            self._held.remove(held)
            self._unoffered.append(held.ready.key)  # P never heard of its blocks: the worker may report it at once
        if params is not None:
            with self._control.lock:
                self._control.withdraw(params.key)
                self._desk.gone(params.key, time.monotonic())
            self._control.flush()

    def close(self) -> None:
        self._control.close()

    def _take_tokens(self) -> None:
        """Write P's tokens into the params of their requests, with which the worker gets them in the step that first
        runs them. Before that step is made: the worker, which the control thread has told, may report at any time."""
        with self._control.lock:
            tokens = self._desk.take_tokens()
        for key, token in tokens:
            request = self._awaiting_token.pop(key, None)
            if request is not None:  # else it has left
                assert request.kv_transfer_params is not None
                request.kv_transfer_params[GOES_ON_AFTER] = [token]
                self._step.told.append(key)

    def _offer(self, endpoint: str, ready: wire.Ready) -> None:
        with self._control.lock:
            self._control.offer(endpoint, ready)
        self._control.flush()

    def _offer_held(self) -> None:
        """Called once per scheduled step: vLLM takes the output of the oldest step before it schedules one too many."""
        for held in self._held:
            held.steps -= 1
        while self._held and self._held[0].steps < 0:
            held = self._held.popleft()
            self._offer(held.endpoint, held.ready)

    @staticmethod
    def _params(request: Request) -> ReceiveParams | None:
        return receive_params(request.kv_transfer_params, request.request_id)


def _check_first_tokens(request: Request) -> None:
    """What the client had must be what was sampled here. The proxy sees to it that it is not told two answers."""
    tokens = tokens_to_go_on_after(request.kv_transfer_params)[: len(request.output_token_ids)]
    if tokens != list(request.output_token_ids[: len(tokens)]):
        logger.error("request %s began with other tokens than its client has: %s", request.request_id, tokens)
