"""Reads phase stamps and joins those of one request across proxy and stages. Times are CLOCK_MONOTONIC seconds.

Proxy and stages stamp under the request id; the proxy names the feature keys and the transfer ids of the request, under
which stages stamp too. A key may occur in many requests (repeated images), so only stamps within its life count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stamp:
    t: float
    instance: str
    subject: str
    event: str
    more: Mapping[str, Any]


def read_stamps(folder: Path) -> list[Stamp]:
    """All stamps of a launch, oldest first. A line that a dying process cut short is skipped."""
    stamps = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                raw = json.loads(line)
            except ValueError:
                continue
            known = {name: raw.pop(name) for name in ("t", "instance", "subject", "event")}
            stamps.append(Stamp(**known, more=raw))
    return sorted(stamps, key=lambda stamp: stamp.t)


class Timeline:
    """Stamps by subject, for looking up one request after another."""

    def __init__(self, stamps: Iterable[Stamp]) -> None:
        self._by_subject: dict[str, list[Stamp]] = defaultdict(list)
        self._named: dict[str, str] = {}
        for stamp in stamps:
            for subject in (stamp.subject, *stamp.more.get("transfers", ())):  # a packet carries several
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
            subjects += stamp.more.get("keys", ())
            subjects += [stamp.more["transfer"]] if "transfer" in stamp.more else []
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
