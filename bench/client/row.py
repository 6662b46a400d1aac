"""What became of one request: the row that is kept of it, in memory, in a file, and in every figure.

All times are CLOCK_MONOTONIC seconds, as the phase stamps of one host are. A time that never came is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any


class Outcome(StrEnum):
    """How a request ended.

    OK: a whole answer. ERROR: refused, failed, or no OpenAI answer. TRUNCATED: an answer that began and has no proper
    end, or fewer tokens than it was to have. CANCELLED: the client left, as it was meant to, or since the run was
    ended. TIMEOUT: it took longer than any may.
    """

    OK = "ok"
    ERROR = "error"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Row:
    """One request.

    Attributes:
        run: which run of a sweep. n: number within it. id: sent as `x-request-id`. spec: of the workload's request.
        due_s: when it was to be sent; in a closed loop when it was. ready_s: when the generator came to it.
        sent_s: when its first byte was written, which is after a connection was there.
        token_s: when each event with content was read; several read at once have one time.
        last_s: end of the content. ended_s: end of the answer, or when it was given up.
        usage_tokens: of the answer, as the server counts. prompt_tokens: likewise.
        fault: what went wrong, in a word that errors are counted by; "" where nothing did. error: what the server said.
        answered_id: the name under which the server says to know it. path, instances: of our proxy, where it told.
        slo_ttft_ms, slo_tpot_ms: of this request alone.
    """

    run: str
    n: int
    id: str
    spec: str
    due_s: float
    ready_s: float
    ended_s: float
    outcome: Outcome
    sent_s: float | None = None
    token_s: tuple[float, ...] = ()
    last_s: float | None = None
    status: int = 0
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str = ""
    fault: str = ""
    error: str = ""
    answered_id: str = ""
    path: str = ""
    instances: str = ""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def first_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    @property
    def output_tokens(self) -> int:
        """As the server counts them; where it does not, one per event with content."""
        return len(self.token_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first content."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1); None for an answer of one token."""
        if not self.token_s or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end of its answer."""
        return self.ended_s - self.due_s

    @property
    def itl_s(self) -> list[float]:
        """Times between events with content, which are tokens where the server sends them one by one."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def late_s(self) -> float:
        """By how much the generator came late to it."""
        return self.ready_s - self.due_s

    def to_json(self) -> dict[str, Any]:
        """Plain values; tokens as milliseconds after `due_s`. What is empty is left out."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("due_s", "ready_s", "sent_s", "last_s", "ended_s"):
            if plain[name] is not None:
                plain[name] = round(plain[name], 6)
        plain["outcome"] = self.outcome.value
        del plain["token_s"]
        plain["tokens_ms"] = [round((at - self.due_s) * 1e3, 3) for at in self.token_s]
        return {name: value for name, value in plain.items() if value not in (None, "", [])}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Row:
        """The opposite of `to_json`. Raises KeyError, TypeError or ValueError where it is no such row."""
        rest = dict(plain)
        due_s = float(rest["due_s"])
        tokens = tuple(due_s + ms / 1e3 for ms in rest.pop("tokens_ms", ()))
        return cls(**{**rest, "outcome": Outcome(rest["outcome"])}, token_s=tokens)
