"""What is held against request bodies under which instances died: suspected, convicted, acquitted. Time comes in.

- *Suspected* is a body that an instance had when it died, sent there within the last `blame_s`, and of which nothing
  had come back: who has answered has survived what kills, and who has been computing for long is not what killed.
- *Convicted* is only who is alone on trial when a second instance dies. A node that takes several instances with it
  therefore convicts nobody, however popular a body was on all of them.
- An answer acquits a body, and so everything else that is sent often: between two deaths it is answered somewhere. A
  conviction acquits whoever was suspected for the same deaths only: they have been explained.

A convicted body is refused for `quarantine_s`, twice as long each further time; between, one death convicts again. What
is kept is a digest, never a body. Who is on trial when is `proxy/stages/suspects.py`'s business.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from epd_serve.instances import IncarnationId
from proxy.config.limits import PoisonLimits

DEATHS = 2
"""Instances that convict a body."""

EXPLAINED = 64
"""Incarnations that are remembered to have ended by a body that is convicted."""


@dataclass
class PoisonRecord:
    """What is held against one body.

    Attributes:
        deaths: incarnations that ended while it was there, and whether it was being encoded then.
        sent_at: when it was sent to the last of them. age_s: how long that one lived on.
        convictions: so far. refused_until, updated_at: times; the latter of the last news of it.
    """

    deaths: dict[IncarnationId, bool] = field(default_factory=dict)
    sent_at: float = 0.0
    age_s: float = 0.0
    convictions: int = 0
    refused_until: float = 0.0
    updated_at: float = 0.0

    @property
    def suspected(self) -> bool:
        return bool(self.deaths) and not self.refused_until

    @property
    def names(self) -> str:
        """The instances that died."""
        return names_of(self.deaths)


class PoisonRecords:
    """Records by the digest of a body, those of which there was news last at the end. All times are of one clock."""

    def __init__(self, limits: PoisonLimits) -> None:
        self._limits = limits
        self._records: OrderedDict[bytes, PoisonRecord] = OrderedDict()
        self._explained: deque[IncarnationId] = deque(maxlen=EXPLAINED)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, digest: bytes, now: float) -> PoisonRecord | None:
        """Returns what is held against a body at `now`. What is old is forgotten here."""
        while self._records:
            oldest = next(iter(self._records.values()))
            if max(oldest.updated_at, oldest.refused_until) + self._limits.memory_s >= now:
                break
            self._records.popitem(last=False)
        record = self._records.get(digest)
        if record is not None and 0 < record.refused_until <= now:  # on probation: one death convicts
            record.refused_until = 0.0
            record.deaths = dict(list(record.deaths.items())[-1:])
        return record

    def died(
        self,
        digest: bytes,
        incarnation_id: IncarnationId,
        *,
        sent_at: float,
        died_at: float,
        now: float,
        encoding: bool,
        on_trial: bool,
    ) -> PoisonRecord | None:
        """An instance died under a body.

        Args:
            sent_at: when the body was sent to it. died_at: when it ended, which may be noticed late (`now`).
            encoding: the body was being encoded there.
            on_trial: nobody else who is suspected was being tried then. Without it only a first death counts.

        Returns:
            The record, if this convicts the body.
        """
        age_s = max(0.0, died_at - sent_at)
        if age_s > self._limits.blame_s or incarnation_id in self._explained:
            return None
        record = self.get(digest, now)
        if record is None:
            while len(self._records) >= self._limits.bodies:
                self._records.popitem(last=False)
            record = self._records[digest] = PoisonRecord()
        elif record.refused_until or (record.deaths and not on_trial):
            return None
        record.deaths[incarnation_id] = encoding
        record.sent_at, record.age_s, record.updated_at = sent_at, age_s, now
        self._records.move_to_end(digest)
        if len(record.deaths) < DEATHS:
            return None
        self._convict(record, now)
        return record

    def survived(self, digest: bytes, *, encoding: bool) -> bool:
        """A body was answered, or only encoded, which acquits it of the deaths of encoders.

        Returns:
            Whether anything was held against it.
        """
        record = self._records.get(digest)
        if record is None or record.refused_until:
            return False
        if encoding:
            record.deaths = {name: encoded for name, encoded in record.deaths.items() if not encoded}
        else:
            record.deaths, record.convictions = {}, 0
        self._forget_if_clear(digest, record)
        return True

    def count(self, *, refused: bool) -> int:
        """Returns how many bodies are refused, or suspected."""
        return sum(bool(record.deaths) and (record.refused_until > 0) is refused for record in self._records.values())

    def _convict(self, record: PoisonRecord, now: float) -> None:
        limits = self._limits
        record.refused_until = now + min(limits.quarantine_max_s, limits.quarantine_s * 2.0**record.convictions)
        record.convictions += 1
        self._explained.extend(record.deaths)
        for digest, other in list(self._records.items()):
            if other is not record and not other.refused_until:
                other.deaths = {name: encoded for name, encoded in other.deaths.items() if name not in record.deaths}
                self._forget_if_clear(digest, other)

    def _forget_if_clear(self, digest: bytes, record: PoisonRecord) -> None:
        if not record.deaths and not record.convictions:
            del self._records[digest]


def names_of(incarnation_ids: Iterable[IncarnationId]) -> str:
    """The instances, and how often where it was more than once."""
    times = Counter(name for name, _ in incarnation_ids)
    return " and ".join(f"{name} {count} times" if count > 1 else name for name, count in sorted(times.items()))
