"""Reads phase stamps and joins those of one request across proxy and stages. Times are CLOCK_MONOTONIC seconds.

Proxy and stages stamp under the request id; the proxy names the feature keys and the transfer ids of the request, under
which stages stamp too. A key may occur in many requests (repeated images), so only stamps within its life count.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.keys import whole_of

MOST_STAMPS = 10_000
"""Of one look at some subjects: each takes some 200 bytes where it travels."""


@dataclass(frozen=True)
class Stamp:
    """`clock`: names the one that `t` is of (`epd_serve.trace.clock_id`); "" where the writer did not say."""

    t: float
    instance: str
    subject: str
    event: str
    more: Mapping[str, Any]
    clock: str = ""

    @property
    def name(self) -> tuple[float, str, str, str]:
        """No two stamps have the same."""
        return self.t, self.instance, self.subject, self.event

    @property
    def subjects(self) -> list[str]:
        """A packet carries several transfers, and what is said of a part is said of its image."""
        return list(dict.fromkeys((self.subject, whole_of(self.subject), *self.more.get("transfers", ()))))

    @property
    def leads_to(self) -> list[str]:
        """Subjects of the same request: its items' keys, its transfer."""
        return [*self.more.get("keys", ()), *([self.more["transfer"]] if "transfer" in self.more else [])]


def read_stamps(folder: Path) -> list[Stamp]:
    """All stamps of a launch, oldest first."""
    return sorted(_stamps(folder), key=_time)


def stamps_about(folder: Path, subjects: Iterable[str], clock: str) -> list[Stamp]:
    """Those about any of these subjects that are made by this clock: hosts may share the folder. Oldest first,
    `MOST_STAMPS` at most."""
    wanted = set(subjects)
    ours = (stamp for stamp in _stamps(folder) if stamp.clock in ("", clock))
    found = (stamp for stamp in ours if not wanted.isdisjoint(stamp.subjects))
    return heapq.nsmallest(MOST_STAMPS, found, key=_time)


def _stamps(folder: Path) -> Iterator[Stamp]:
    """In no order. A line that a dying process cut short is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    raw = json.loads(line)
                except ValueError:
                    continue
                known = {name: raw.pop(name) for name in ("t", "instance", "subject", "event")}
                yield Stamp(**known, clock=raw.pop("clock", ""), more=raw)


def _time(stamp: Stamp) -> float:
    return stamp.t


class Timeline:
    """Stamps by subject, for looking up one request after another."""

    def __init__(self, stamps: Iterable[Stamp]) -> None:
        self._by_subject: dict[str, list[Stamp]] = defaultdict(list)
        self._named: dict[str, str] = {}
        for stamp in stamps:
            for subject in stamp.subjects:
                self._by_subject[subject].append(stamp)
            if "client_id" in stamp.more:
                self._named[stamp.more["client_id"]] = stamp.subject

    def named(self, client_id: str) -> list[Stamp]:
        """As `stamps`, by the `x-request-id` that the client gave; of several of that name, the last. A stage that was
        asked past the proxy knows the request by that very name."""
        return self.stamps(self._named.get(client_id, client_id))

    def stamps(self, request_id: str) -> list[Stamp]:
        """All of the request, of its items and its transfers, within its life, oldest first."""
        own = self._by_subject.get(request_id, [])
        subjects = [request_id]
        for stamp in own:
            subjects += stamp.leads_to
        found = [
            stamp
            for subject in dict.fromkeys(subjects)
            for stamp in self._by_subject.get(subject, ())
            if own[0].t <= stamp.t <= own[-1].t
        ]
        return sorted(found, key=lambda stamp: stamp.t)

    def of(self, request_id: str) -> dict[str, float]:
        """Time of each event of the request; of several stamps of one event the last, or of one in `_FIRST` the
        first."""
        events: dict[str, float] = {}
        for stamp in self.stamps(request_id):
            if stamp.event not in events or stamp.event not in _FIRST:
                events[stamp.event] = stamp.t
        return events


_FIRST = frozenset({"arrived", "encode_sent", "encode_start", "first_byte"})
