"""Which transfers may arrive at one worker of D, and when each has ended, so that it is reported exactly once. Pure.

    announced --a DONE | something lost--> arriving --the last DONE--> ended --expected, taken--> (unknown)
    announced | arriving --given up by the scheduler | lost, and only D writes--> ended

What is said of transfers that are not announced, or not any more, is nobody's. Of the ends only the first counts, and
an end may come before the step that makes D expect the transfer. One that is
expected on condition (of P's first token) is not taken as arrived before that is met. A failure waits
for the DONE of the other workers of P, which may still be writing. Nobody may ever send DONE after something was lost:
where D does all the writing itself such a transfer ends at once, as D drops what is late; where a transport writes
one-sidedly it waits, at worst until the scheduler gives it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from epd_serve import wire
from epd_serve.wire import TransferKey

Item = TypeVar("Item")
Worker = tuple[str, int]  # instance and incarnation, rank


@dataclass(frozen=True)
class End:
    """How a transfer ended; `reason` where it failed."""

    ok: bool
    reason: str = ""


@dataclass
class _Arriving:
    """The workers that have said DONE, and the first thing that went wrong."""

    done: set[Worker | None] = field(default_factory=set)
    reason: str = ""


class Arrivals(Generic[Item]):
    """Not thread-safe. `Item` is what the owner wants back with the end of a transfer.

    Args:
        one_sided: P may write to D's memory without D's help.
    """

    def __init__(self, *, one_sided: bool) -> None:
        self._one_sided = one_sided
        self._announced: set[TransferKey] = set()  # until taken
        self._expected: dict[TransferKey, Item] = {}
        self._conditional: set[TransferKey] = set()  # of those, the ones that lack something beside their KV
        self._arriving: dict[TransferKey, _Arriving] = {}
        self._ended: dict[TransferKey, End] = {}

    def announce(self, key: TransferKey) -> None:
        """P is about to hear of blocks for this transfer; `expect` follows."""
        self._announced.add(key)

    def may_arrive(self, key: TransferKey) -> bool:
        """Whether it is announced and its end was not taken."""
        return key in self._announced

    def expect(self, key: TransferKey, item: Item, *, conditional: bool = False) -> None:
        """D waits for this transfer, and will take its end; where `conditional`, as arrived only after `complete`."""
        self._announced.add(key)
        self._expected[key] = item
        if conditional:
            self._conditional.add(key)

    def complete(self, key: TransferKey) -> None:
        """What an expected transfer lacked beside its KV is here."""
        self._conditional.discard(key)

    def give_up(self, key: TransferKey) -> None:
        """The scheduler knows that nothing more will be written, whatever was said here."""
        if key in self._expected and (key not in self._ended or key in self._conditional):
            self._end(key, End(False, "given up by the scheduler"))

    def done(self, worker: Worker | None, done: wire.Done, packets: int) -> End | None:
        """A worker of P has said DONE. Returns the end, if this was the last that was missing.

        Args:
            worker: None where the connection never said hello: ZMQ made it anew by itself, and messages may be lost.
            packets: how many with a part in this transfer have come over this connection.
        """
        reason = _fault(worker, done, packets)
        if worker is None and done.senders > 1:  # one of several, nobody knows which: it cannot be counted
            return self.lost(done.key, reason)
        if self._is_closed(done.key):
            return None
        arriving = self._arriving.setdefault(done.key, _Arriving())
        if worker in arriving.done:
            return None
        arriving.done.add(worker)
        arriving.reason = arriving.reason or reason
        if len(arriving.done) < done.senders:
            return None
        return self._end(done.key, End(not arriving.reason, arriving.reason))

    def lost(self, key: TransferKey, reason: str) -> End | None:
        """Something of it did not arrive: a hole must not pass for KV. Returns the end, if this is it."""
        if self._is_closed(key):
            return None
        if not self._one_sided:
            return self._end(key, End(False, reason))
        arriving = self._arriving.setdefault(key, _Arriving())
        arriving.reason = arriving.reason or reason
        return None

    def has_ended(self) -> bool:
        """Whether there is something to take."""
        return any(map(self._may_be_taken, self._ended))

    def take(self, *, ok: bool) -> list[tuple[Item, End]]:
        """What has ended so and is expected, once. Nothing may be written for it from now on."""
        taken = [key for key, end in self._ended.items() if end.ok is ok and self._may_be_taken(key)]
        for key in taken:
            self._conditional.discard(key)
            self._announced.discard(key)
        return [(self._expected.pop(key), self._ended.pop(key)) for key in taken]

    def _may_be_taken(self, key: TransferKey) -> bool:
        return key in self._expected and not (self._ended[key].ok and key in self._conditional)

    def _is_closed(self, key: TransferKey) -> bool:
        return key in self._ended or key not in self._announced

    def _end(self, key: TransferKey, end: End) -> End:
        self._arriving.pop(key, None)
        self._ended[key] = end
        return end


def _fault(worker: Worker | None, done: wire.Done, packets: int) -> str:
    """What is wrong with this DONE, or ""."""
    if not done.ok:
        return done.reason or "given up by prefill"
    if worker is None:
        return "the link was interrupted"
    return "" if packets == done.packets else f"{packets} of {done.packets} packets have arrived"
