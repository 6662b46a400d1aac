"""How long a layer takes to compute, as a function of the step's tokens: from fences of the device, as steps go by.

A step's first and last layer and its end each leave a timed fence; their distances are known once the device has got
there, which under asynchronous scheduling is a step or two later. A layer is announced when its KV is written, before
its MLP: what is left of the step after the last one is its tail, in which the last packet still hides.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from epd_serve.kv.fit import LineFit
from epd_serve.trace import DeviceTrace, Trace
from npu_ops.fences import TimedFence
from npu_ops.memory import DeviceMemory

# Before anything was measured: a layer of a small model, for any number of tokens. The first steps replace it.
_PRIOR_S, _PRIOR_S_PER_TOKEN = 1e-3, 1e-6
_LEAST_S = 1e-9
_PENDING = 64  # steps; a device that is further behind is not measured


@dataclass
class _Step:
    tokens: int
    began: float
    hooks: list[float] = field(default_factory=list)  # when each layer was announced, on the host
    first: TimedFence | None = None
    last: TimedFence | None = None


class LayerClock:
    """Belongs to the model runner's thread. `last_s`: seconds per layer of the last step that was measured."""

    def __init__(self, device: DeviceMemory, layers: int, trace: Trace | DeviceTrace) -> None:
        self.last_s = 0.0
        self._device = device
        self._layers = layers
        self._trace = trace
        self._fit = LineFit(_PRIOR_S, _PRIOR_S_PER_TOKEN)
        self._tail: LineFit | None = None  # until one was measured none is counted on
        self._step = _Step(0, 0.0)
        self._pending: deque[tuple[int, TimedFence, TimedFence, TimedFence]] = deque(maxlen=_PENDING)

    def layer_s(self, tokens: int) -> float:
        """Expected seconds per layer of a step with so many tokens."""
        self._resolve()
        return self._fit.at(tokens)

    def tail_s(self, tokens: int) -> float:
        """Expected seconds from the last layer's KV to the end of such a step."""
        return self._tail.at(tokens) if self._tail is not None else 0.0

    def begin(self, tokens: int) -> None:
        self._step = _Step(tokens, time.monotonic())

    def layer(self, fence: TimedFence | None) -> TimedFence | None:
        """One more layer is queued. Returns its fence, which is made where it is measured and the caller has none."""
        step = self._step
        step.hooks.append(time.monotonic())
        if len(step.hooks) == 1:
            step.first = fence = fence or self._device.timed_fence()
        elif len(step.hooks) == self._layers and step.first is not None:
            step.last = fence = fence or self._device.timed_fence()
        return fence

    def end(self) -> None:
        """The forward pass has returned."""
        step = self._step
        if step.first is not None and step.last is not None:
            self._pending.append((step.tokens, step.first, step.last, self._device.timed_fence()))
        self._trace.stamp("step", "prefill_step", t0=step.began, tokens=step.tokens, layers=step.hooks)

    def _resolve(self) -> None:
        while self._pending:
            tokens, first, last, end = self._pending[0]
            passed_s, tail_s = last.seconds_since(first), end.seconds_since(last)
            if passed_s is None or tail_s is None:
                return
            self._pending.popleft()
            self.last_s = passed_s / (self._layers - 1)
            self._fit.observe(tokens, self.last_s)
            if self._tail is None:
                self._tail = LineFit(tail_s or _LEAST_S, 0.0)
            self._tail.observe(tokens, tail_s)
