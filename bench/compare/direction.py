"""Whether more of a figure is better, by its name and unit. Pure.

What nobody can call better or worse (how many requests there were, how long a run took) has no direction.
"""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["higher", "lower", ""]

_NEITHER = re.compile(
    r"(^|/)(requests|requests_of_the_run|window_s|run_s|offered_rps|output_tokens_mean|prompt_tokens_mean|stages|joined"
    r"|events_per_token|cancelled|seconds|kills|rounds|generator)(/|$)|(^|/)idle_|scheduling_ms|_p25$|_p75$"
)
_HIGHER = re.compile(
    r"attainment|goodput|(^|[/_])rps([/_]|$)|tokens_per_s|tput|throughput|per_core|overlap|gb_per_s|bandwidth"
    r"|same_tokens|(^|/)(ok|right)$|pictures_per_request|max_batch|kv_tokens"
)
_LOWER = re.compile(
    r"(ttft|tpot|itl|e2e|latency|added|exposed|late|wait|error|errors|memory|slowdown|encodes|residual|cpu)([/_]|$)"
    r"|_(ms|us|s|bytes|mib|kib|gib)(/|$)|(^|/)(error|truncated|timeout)$"
)


def better(figure: str) -> Direction:
    """`higher`, `lower` or "" by words of its path; what a rate or a share says goes before units of time."""
    if _NEITHER.search(figure):
        return ""
    if _HIGHER.search(figure):
        return "higher"
    return "lower" if _LOWER.search(figure) else ""
