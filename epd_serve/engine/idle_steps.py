"""Lets EngineCore sleep between steps that compute nothing, until something has changed for one of our connectors.

vLLM steps as long as it has requests. While all of them wait for a connector, each step is a look at the queue, a
message to the workers and their answers, every millisecond. Here the engine sleeps after such a step, until a thread of
ours in any process of the stage calls `idle_waiter.wake`, or until a message of the API server arrives. It does not
where anything else may be next: a request that runs (but for one that has come to a feature it waits for) or has just
ended, a batch in flight, a grammar being compiled.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from epd_serve.wake import idle_waiter

logger = logging.getLogger(__name__)

_LONGEST_S = 0.25  # for what becomes due with time alone: deadlines of transfers and features
_GRAMMAR = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
_RINGS, _SLEEPS, _AWAKE = "epd_serve_rings", "epd_serve_sleeps", "epd_serve_awake"


def sleep_between_idle_steps() -> None:
    """Install it in an EngineCore (read in vLLM 0.23 and 0.32): other processes have not loaded its module."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None:
        return
    engine: Any = core.EngineCoreProc
    real = getattr(engine, "_process_engine_step", None)
    if real is None:
        logger.warning("this vLLM steps differently; a stage that waits for features or KV takes part of a core")
        return
    if hasattr(real, _SLEEPS):
        return

    @functools.wraps(real)
    def step(self: Any) -> Any:
        executed, awake = real(self), 0
        if idle_waiter.wake_is_expected() and not executed and _only_we_are_waited_for(self):
            awake = 1 + getattr(self, _AWAKE, 0)  # idle steps since the last sleep
            if awake > len(self.batch_queue or ()):
                idle_waiter.wait(_LONGEST_S)
                awake = 0
        setattr(self, _AWAKE, awake)
        return executed

    setattr(step, _SLEEPS, True)
    engine._process_engine_step = step


def _only_we_are_waited_for(engine: Any) -> bool:
    """Nothing but a `wake` makes the next step worth taking. What arrives from now on rings."""
    _ring_at_arrival(engine.input_queue)
    scheduler = engine.scheduler
    awaits_feature = getattr(scheduler, "awaits_feature", lambda request: False)
    in_flight = (output for _, output, *_ in engine.batch_queue or ())
    return not (
        any(output.total_num_scheduled_tokens for output in in_flight)
        or not all(awaits_feature(request) for request in scheduler.running)
        or scheduler.finished_req_ids  # whose room the next step can give to others
        or not engine.input_queue.empty()
        or any(request.status.name == _GRAMMAR for request in scheduler.requests.values())
    )


def _ring_at_arrival(queue: Any) -> None:
    """Through `queue.Queue._put`, which Python has for those who change what putting does."""
    if hasattr(queue, _RINGS):
        return
    put = queue._put

    def ringing(item: Any) -> None:
        put(item)
        idle_waiter.wake()

    queue._put = ringing
    setattr(queue, _RINGS, True)
