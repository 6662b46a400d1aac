"""One admitted request in front of the stages: its kind, its place, and the order in which its turn comes. Values.

The transitions between places are the queue's (`proxy/admission/queue.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct


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
