"""A vLLM plugin for tests: all encoders report the same speed, whatever else a busy machine does while they work."""

from __future__ import annotations

TOKENS_PER_S = 1000.0


def register() -> None:
    """vLLM calls it in every process."""
    from epd_serve.engine.status.rates import StepRates

    StepRates.item_tokens_per_s = property(lambda self: TOKENS_PER_S)  # type: ignore[assignment, method-assign]
