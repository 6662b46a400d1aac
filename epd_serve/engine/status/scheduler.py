"""vLLM's own scheduler, whichever it would use here, with a watch on it: what `--scheduler-cls` names.

Thin on purpose: what of vLLM's changes does so elsewhere, one decision in `ec/partial_prefill.py`, and requests that go
on after tokens in `go_on.py`. It is chosen when it is made, because only then is it known whether batches overlap
(`AsyncScheduler`), and naming one of the two would switch that off or break it.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from typing import Any

from epd_serve.engine.argv import WIRING_ENV
from epd_serve.engine.compat import schedule_as_vllm_does
from epd_serve.engine.ec.partial_prefill import with_partial_prefill
from epd_serve.engine.go_on import going_on
from epd_serve.engine.request_trace import SchedulerTrace
from epd_serve.engine.status.cache_events import CacheEvents, events_of
from epd_serve.engine.status.publisher import LoadPublisher
from epd_serve.engine.status.watch import LoadWatch
from epd_serve.engine.step_budgets import share_steps, with_budgets
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring


class ReportingScheduler:
    """Calling it makes an instance of vLLM's scheduler class, extended; arguments are vLLM's (0.23 and 0.32 differ).

    Raises:
        KeyError: the process was not started as one of our stages.
        ConfigError: vllm-ascend schedules in vLLM's place, and cannot be kept from it.
        zmq.ZMQError: the address for reports cannot be bound.
    """

    def __new__(cls, *args: Any, vllm_config: Any, **more: Any) -> Any:
        made = reporting(with_budgets(going_on(with_partial_prefill(_vllms_choice(vllm_config)))))(
            *args, vllm_config=vllm_config, **more
        )
        schedule_as_vllm_does(made)
        wiring = StageWiring.from_json(json.loads(os.environ[WIRING_ENV]))
        if wiring.role.sends_kv:
            share_steps(made)
        made.hold_to_slo(wiring)
        made.watch_load(wiring)
        made.allow_early_begins(wiring)
        return made


def _vllms_choice(vllm_config: Any) -> type:
    """The class that vLLM would use if none was named."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    choice: type = config.get_scheduler_cls()
    return choice


@functools.cache
def reporting(base: Any) -> Any:
    """`base` with a watch that looks after each call that changes what is pending."""

    class Reporting(base):
        _publisher: LoadPublisher
        _watch: LoadWatch
        _tells_prompts: bool = False
        _trace: SchedulerTrace | None = None
        _cache: CacheEvents | None = None

        def watch_load(self, wiring: StageWiring) -> None:
            """From now on the load is reported, and where a trace was asked for, what becomes of each request."""
            cache, ledger = events_of(self, wiring.instance, wiring.incarnation) or (None, None)
            self._cache, self._tells_prompts = cache, wiring.prefills
            self._publisher = LoadPublisher(wiring, ledger)
            if cache is not None:
                cache.changed = self._publisher.cache_changed
            trace = Trace(wiring.trace_path, wiring.instance) if wiring.trace_path else None
            self._watch = LoadWatch(
                self, wiring, self._publisher.offer, budgets=getattr(self, "budgets", None), trace=trace
            )
            self._watch.changed()
            if trace is not None:
                self._trace = SchedulerTrace(trace)

        def schedule(self, *args: Any, **more: Any) -> Any:
            output = super().schedule(*args, **more)
            self._watch.scheduled(output)
            if self._cache is not None and output.finished_req_ids:
                self._cache.finished(output.finished_req_ids)
            if self._trace is not None:
                self._trace.scheduled(output)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **more: Any) -> Any:
            result = super().update_from_output(scheduler_output, *args, **more)
            self._watch.updated(scheduler_output)
            if self._trace is not None:
                self._trace.updated(result.values())
            return result

        def add_request(self, request: Any) -> None:
            if self._trace is not None:
                self._trace.queued(request)
            super().add_request(request)
            if self._cache is not None:
                self._cache.added(request, tell=self._tells_prompts)
            self._watch.changed()
            # vLLM tells its KV connector of a new request; ours for features would first hear when it is let run.
            if consumer := self._feature_consumer:
                consumer.arrived(request)

        def reset_encoder_cache(self) -> None:
            super().reset_encoder_cache()
            if consumer := self._feature_consumer:  # vLLM names what it frees in a step, and here nothing
                consumer.encoder_cache_reset()

        @property
        def _feature_consumer(self) -> Any:
            return getattr(getattr(self, "ec_connector", None), "consumer", None)

        def finish_requests(self, *args: Any, **more: Any) -> Any:
            result = super().finish_requests(*args, **more)
            self._watch.changed()
            return result

        def shutdown(self) -> None:
            self._publisher.close()
            super().shutdown()

    Reporting.__name__ = f"Reporting{base.__name__}"
    return Reporting
