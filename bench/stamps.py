"""Reads phase stamps and joins those of one request across proxy and stages. Times are CLOCK_MONOTONIC seconds.

The proxy stamps under the request id and names the feature keys and the transfer ids of the request; stages stamp
under those. A key may occur in many requests (repeated pictures), so only stamps within the request's life count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
            self._by_subject[stamp.subject].append(stamp)
            if "client_id" in stamp.more:
                self._named[stamp.more["client_id"]] = stamp.subject

    def named(self, client_id: str) -> dict[str, float]:
        """As `of`, by the `x-request-id` that the client gave; of several of that name, the last."""
        return self.of(self._named[client_id]) if client_id in self._named else {}

    def of(self, request_id: str) -> dict[str, float]:
        """Time of each event of the request. Of several stamps the one that completes the phase counts: the first
        of an event named in `_FIRST`, else the last (the last of several pictures to be encoded, for instance)."""
        own = self._by_subject.get(request_id, [])
        if not own:
            return {}
        subjects = [request_id]
        for stamp in own:
            subjects += stamp.more.get("keys", ())
            subjects += [stamp.more["transfer"]] if "transfer" in stamp.more else []
        begun, ended = own[0].t, max(stamp.t for stamp in own)
        events: dict[str, float] = {}
        for stamp in self._within(dict.fromkeys(subjects), begun, ended):
            if stamp.event not in events or stamp.event not in _FIRST:
                events[stamp.event] = stamp.t
        return events

    def _within(self, subjects: Iterable[str], begun: float, ended: float) -> Sequence[Stamp]:
        found = [stamp for subject in subjects for stamp in self._by_subject[subject] if begun <= stamp.t <= ended]
        return sorted(found, key=lambda stamp: stamp.t)


_FIRST = frozenset({"arrived", "encode_sent", "encode_arrived", "encode_start", "first_byte"})
