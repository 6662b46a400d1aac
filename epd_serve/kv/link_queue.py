"""What waits for one link, and what goes next (EPD-Serve §3.3, event-driven queue and precise scheduling). Pure.

Packets go by earliest deadline, equals in the order in which they came. The end of a transfer (its DONE) goes as soon
as no packet with a part of that transfer waits here. While somebody else needs the wire (a fetch, a collective phase)
packets yield, but only as long as they can afford.

Who takes from here also sends: it takes again when the packet has moved, so what was taken and ended is in order.
Not thread-safe: the link has the lock and the clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_YIELD_S = 0.02  # a packet waits no longer than this for others' traffic, all yields together
_SHORTEST_S = 1e-4  # nobody waits for less: waking up takes as long

J = TypeVar("J")


@dataclass
class _Packet(Generic[J]):
    job: J
    deadline: float
    nbytes: int
    members: set[Hashable]
    number: int  # in the order of arrival
    yielded_before_s: float  # what the queue had yielded in all when the packet came

    def urgency(self) -> tuple[float, int]:
        return self.deadline, self.number


class LinkQueue(Generic[J]):
    """Jobs are the caller's, of any type but float and None. Times are seconds of the caller's clock.

    Args:
        seconds: how long the link moves so many bytes, by today's estimate.
    """

    def __init__(self, seconds: Callable[[int], float] = lambda nbytes: 0.0) -> None:
        self._seconds = seconds
        self._packets: list[_Packet[J]] = []  # by urgency
        self._queued: dict[Hashable, int] = {}  # packets per member, never 0
        self._ends: dict[Hashable, J] = {}  # of members with packets
        self._ready: deque[tuple[Hashable, J]] = deque()  # ends whose packets are out
        self._arrived = 0
        self._yielded_s = 0.0
        self._yields_since: float | None = None

    def put(self, job: J, deadline: float, nbytes: int, members: Iterable[Hashable]) -> None:
        """A packet with parts of `members`, at least one, none of which has ended."""
        packet = _Packet(job, deadline, nbytes, set(members), self._arrived, self._yielded_s)
        assert packet.members, "a packet of nobody"
        assert not any(member in self._ends for member in packet.members), "a packet after its transfer's end"
        self._arrived += 1
        insort(self._packets, packet, key=_Packet.urgency)
        for member in packet.members:
            self._queued[member] = self._queued.get(member, 0) + 1

    def put_end(self, member: Hashable, job: J) -> None:
        """The last message of `member`."""
        assert member not in self._ends, "a transfer ends once"
        if member in self._queued:
            self._ends[member] = job
        else:
            self._ready.append((member, job))

    def take(self, now: float, quiet_until: float = 0.0) -> J | float | None:
        """What goes now.

        Args:
            quiet_until: others need the wire until then.

        Returns:
            The job; or for how long nothing does, because the link keeps quiet and every packet can afford it (ask
            again then, or when something came); or None: nothing waits here that can go.
        """
        if self._yields_since is not None:
            self._yielded_s += max(0.0, now - self._yields_since)
            self._yields_since = None
        if self._ready:
            return self._ready.popleft()[1]
        if not self._packets:
            return None
        wait_s = min(quiet_until - now, self._affordable_s(now))
        if wait_s > _SHORTEST_S:
            self._yields_since = now
            return wait_s
        packet = self._packets.pop(0)
        for member in packet.members:
            self._leave(member)
        return packet.job

    def reprioritise(self, member: Hashable, deadline: float) -> None:
        """The packets with a part of `member` are due by `deadline`, where they were due later."""
        for packet in self._packets:
            if member in packet.members:
                packet.deadline = min(packet.deadline, deadline)
        self._packets.sort(key=_Packet.urgency)

    def backlog_bytes(self, deadline: float) -> int:
        """Bytes that would go before a packet put now with that deadline."""
        return sum(packet.nbytes for packet in self._packets if packet.deadline <= deadline)

    def drop(self, member: Hashable) -> list[J]:
        """Forget a transfer: its end, and the packets that are its alone, which are returned.

        A packet that carries others too still comes out; who moves it leaves this member's part out.
        """
        dropped = [packet.job for packet in self._packets if packet.members == {member}]
        self._packets = [packet for packet in self._packets if packet.members != {member}]
        for packet in self._packets:
            packet.members.discard(member)
        self._queued.pop(member, None)
        self._ends.pop(member, None)
        self._ready = deque(end for end in self._ready if end[0] != member)
        return dropped

    def members(self) -> set[Hashable]:
        """The transfers of which a packet or the end waits here."""
        return {*self._queued, *(member for member, _ in self._ready)}

    def _affordable_s(self, now: float) -> float:
        """How long nothing may go: no packet yields too long in all, nor is the most urgent deadline missed."""
        longest_s = self._yielded_s - min(packet.yielded_before_s for packet in self._packets)
        due = self._packets[0].deadline
        return min(MAX_YIELD_S - longest_s, due - now - self._seconds(self.backlog_bytes(due)))

    def _leave(self, member: Hashable) -> None:
        self._queued[member] -= 1
        if not self._queued[member]:
            del self._queued[member]
            if member in self._ends:
                self._ready.append((member, self._ends.pop(member)))
