"""Rows of requests that never were, for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

from bench.clients.results import Outcome, RequestRecord


def row(
    n: int = 0, due: float = 0.0, *, ttft: float = 0.1, gap: float = 0.01, tokens: int = 3, **more: Any
) -> RequestRecord:
    """A whole answer: `tokens` tokens, the first `ttft` after `due`, then one every `gap`. Seconds."""
    times = tuple(due + ttft + gap * at for at in range(tokens))
    last = times[-1] if times else None
    given = {
        "run": "r",
        "n": n,
        "id": f"x-{n}",
        "spec": "s",
        "due_s": due,
        "ready_s": due,
        "sent_s": due,
        "token_s": times,
        "last_s": last,
        "ended_s": last or due,
        "outcome": Outcome.OK,
        "status": 200,
        "usage_tokens": tokens,
    }
    return RequestRecord(**{**given, **more})


def failed(n: int = 0, due: float = 0.0, fault: str = "status 429", outcome: Outcome = Outcome.ERROR) -> RequestRecord:
    return row(n, due, tokens=0, outcome=outcome, fault=fault, error=f"said {fault}", usage_tokens=None)
