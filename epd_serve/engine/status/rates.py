"""How fast an engine works, from the steps that it has done lately. Pure: the clock is the caller's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from epd_serve.engine.status.pending import StepWork
from epd_serve.wire import FEW_PROMPT_TOKENS

MEMORY_S = 10.0
"""Busy seconds after which a step counts 1/e. An idle engine forgets nothing: its speed is what it was."""


@dataclass
class _Mean:
    """Decayed amount per decayed second."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        kept = math.exp(-seconds / MEMORY_S)
        self.amount, self.seconds = self.amount * kept + amount, self.seconds * kept + seconds

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds if self.seconds > 0 else 0.0


class StepRates:
    """Speeds by kind of work. A step that does several kinds counts for each with all of its time: that is what a
    request of that kind can expect beside the others."""

    def __init__(self) -> None:
        self._ended_at = -math.inf
        self._steps, self._prompt, self._items, self._decode = _Mean(), _Mean(), _Mean(), _Mean()

    def ended(self, work: StepWork, begun_at: float, now: float) -> float:
        """A step that did something is over. Under async scheduling it was begun before the last one ended: it had the
        device from there on. Returns its seconds."""
        seconds = max(now - max(begun_at, self._ended_at), 1e-6)
        self._ended_at = now
        self._steps.add(1, seconds)
        if work.prompt_tokens >= FEW_PROMPT_TOKENS:
            self._prompt.add(work.prompt_tokens, seconds)
        if work.item_tokens:
            self._items.add(work.item_tokens, seconds)
        if work.decodes:
            self._decode.add(1, seconds)  # one token for each of them; speculation may give more
        return seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; 0 before the first."""
        return 1 / self._steps.per_s if self._steps.per_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self._prompt.per_s

    @property
    def item_tokens_per_s(self) -> float:
        return self._items.per_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second and request."""
        return self._decode.per_s
