"""One admitted request in front of the stages: its kind, its priority, how many sequences it decodes, its place, and
the order in which its turn comes. Values.

The transitions between places are the queue's (`proxy/admission/queue.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from epd_serve.errors import RequestError
from proxy.config.limits import KeyLimits
from proxy.request.parse import Endpoint, ParsedRequest


class Kind(StrEnum):
    TEXT = "text"
    MEDIA = "media"

    @property
    def other(self) -> Kind:
        return Kind.MEDIA if self is Kind.TEXT else Kind.TEXT


class Place(StrEnum):
    LOADING = "loading"
    TO_ENCODE = "to-encode"
    ENCODING = "encoding"
    TO_SERVE = "to-serve"
    SERVED = "served"
    GONE = "gone"


@dataclass(frozen=True)
class Capacity:
    """What may be with the stages at once, over all instances.

    Attributes:
        encodes: requests at the encoders. sequences: prefilling or decoding. prefill_tokens: of prompts not prefilled.
    """

    encodes: float
    sequences: float
    prefill_tokens: float


class Ticket(Struct, eq=False):
    """One admitted request.

    Attributes:
        due: when it is to go, in seconds on the caller's clock; `number` tells equals apart.
        tokens: of its prompt, estimated. sequences: how many it decodes at once.
        encoding: it holds a place at the encoders. prefilling: its tokens count.
        ahead: it is served while its items are still being encoded, so nothing of it can be prefilled yet.
        queued_at: when it joined the queue it is or was in. granted_at: when its turn to be served came, or last came.
    """

    kind: Kind
    arrived: float
    due: float
    number: int
    sequences: int = 1
    tokens: float = 0.0
    place: Place = Place.LOADING
    encoding: bool = False
    prefilling: bool = False
    ahead: bool = False
    queued_at: float = 0.0
    granted_at: float = 0.0

    @property
    def order(self) -> tuple[float, int]:
        return (self.due, self.number)

    @property
    def is_queued(self) -> bool:
        """It waits for its turn in one of the queues."""
        return self.place is Place.TO_ENCODE or self.place is Place.TO_SERVE


class QueueFull(Exception):
    """As many wait as may. `retry_after_s`: when there may be room again, None where nobody can tell."""

    def __init__(self, kind: Kind, waiting: int, retry_after_s: float | None) -> None:
        super().__init__(f"{waiting} {kind} requests wait")
        self.kind = kind
        self.waiting = waiting
        self.retry_after_s = retry_after_s


@dataclass
class TicketQueue:
    """Tickets in the order of their turn."""

    tickets: list[Ticket] = field(default_factory=list)

    def add(self, ticket: Ticket) -> None:
        insort(self.tickets, ticket, key=order_of)

    def remove(self, ticket: Ticket) -> None:
        index = self.ahead_of(ticket.order)
        assert self.tickets[index] is ticket, "a ticket is where its order says"
        del self.tickets[index]

    def ahead_of(self, order: tuple[float, int]) -> int:
        return bisect_left(self.tickets, order, key=order_of)


def order_of(ticket: Ticket) -> tuple[float, int]:
    return ticket.order


def kind_of(request: ParsedRequest) -> Kind:
    return Kind.MEDIA if request.media else Kind.TEXT


def priority_of(request: ParsedRequest, limits: KeyLimits) -> int:
    """The client's `priority`, as vLLM means it: lower is sooner, 0 is usual. A better one than `limits` allow counts
    as the best that they do, as one beyond `admission.priority_limit` does.

    Raises:
        RequestError: it is no integer.
    """
    value = request.body.get("priority")
    if value is None:
        value = 0
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise RequestError("priority must be an integer; lower means sooner.", param="priority")
    return value if limits.best_priority is None else max(value, limits.best_priority)


def sequences_of(request: ParsedRequest, most: int) -> int:
    """Answers that are decoded side by side: `n` for each prompt.

    Raises:
        RequestError: a list of prompts asks for more than `most`, `max_sequences` of the settings.
    """
    n = request.body.get("n")
    answers = n if isinstance(n, int) else 1
    prompts = request.body["prompt"] if request.endpoint is Endpoint.COMPLETIONS else None
    if not isinstance(prompts, list) or isinstance(prompts[0], int):
        return answers
    sequences = answers * len(prompts)
    if len(prompts) > 1 and sequences > most:
        times = f", and n {answers} for each" if answers > 1 else ""
        raise RequestError(
            f"prompt has {len(prompts)} prompts{times}: {sequences} answers, at most {most} can be asked for at once; "
            "send several requests.",
            param="prompt",
        )
    return sequences
