"""Which way features come from which encoder: decided by trying, once per life of an encoder. Pure.

Two processes on one NPU cannot connect before CANN 9.1 (Mooncake #3453), and what else
keeps a pair apart (a fabric, a firewall, a refused registration) is not known before it is tried. So a consumer that
hears of an encoder's life for the first time fetches its probe object into the slabs of all its workers:

    (unheard of) --meet--> PROBING --fetched--> DEVICE
                           PROBING --failed `_TRIES` times--> ARENA

Until DEVICE is decided, and after ARENA is, features of that encoder come through the arena: nothing is tried at a
request's expense. `ArenaNeed` is the encoder's half: it puts into the arena as long as somebody may need that.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

_TRIES = 5
_PAUSE_S = 0.25
_MOST_LIVES = 256


class Path(enum.Enum):
    PROBING = "probing"
    DEVICE = "device"
    ARENA = "arena"


@dataclass
class _Pair:
    path: Path = Path.PROBING
    tries: int = 0
    next_at: float = 0.0
    under_way: bool = False


@dataclass(frozen=True)
class Verdict:
    """How features come from this life of an encoder; `reason`: why not device to device."""

    encoder: str
    path: Path
    reason: str = ""


@dataclass
class PairProbe:
    """Verdicts by incarnation of the encoder. Not thread-safe."""

    refusal: str = ""  # why this instance has no device path at all
    _pairs: OrderedDict[str, _Pair] = field(default_factory=OrderedDict)

    def path(self, encoder: str) -> Path:
        pair = self._pairs.get(encoder)
        return pair.path if pair is not None else Path.PROBING

    def meet(self, encoder: str) -> Verdict | None:
        """An encoder was heard of. The verdict, if one is due already."""
        if encoder in self._pairs:
            return None
        pair = self._pairs[encoder] = _Pair()
        if len(self._pairs) > _MOST_LIVES:
            self._pairs.popitem(last=False)
        if not self.refusal:
            return None
        pair.path = Path.ARENA
        return Verdict(encoder, Path.ARENA, self.refusal)

    def refuse(self, reason: str) -> list[Verdict]:
        """This instance cannot take features into device memory: for all encoders, also those to come."""
        self.refusal = reason
        verdicts = []
        for encoder, pair in self._pairs.items():
            if pair.path is not Path.ARENA:
                pair.path = Path.ARENA
                verdicts.append(Verdict(encoder, Path.ARENA, reason))
        return verdicts

    def due(self, now: float) -> list[str]:
        """Encoders to probe now."""
        due = [
            encoder
            for encoder, pair in self._pairs.items()
            if pair.path is Path.PROBING and not pair.under_way and now >= pair.next_at
        ]
        for encoder in due:
            self._pairs[encoder].under_way = True
        return due

    def tried(self, encoder: str, failure: str, now: float) -> Verdict | None:
        """How a probe ended; `failure` "" when it came through."""
        pair = self._pairs.get(encoder)
        if pair is None or pair.path is not Path.PROBING:
            return None
        pair.under_way = False
        pair.next_at = now + _PAUSE_S * 2**pair.tries  # a tier that stalls for seconds must not decide for ever
        pair.tries += 1
        if failure and pair.tries < _TRIES:
            return None
        pair.path = Path.ARENA if failure else Path.DEVICE
        return Verdict(encoder, pair.path, failure)

    def probing(self) -> bool:
        return any(pair.path is Path.PROBING for pair in self._pairs.values())


class ArenaNeed:
    """The encoder's half: whether its features must be in the arena too.

    Needed until every instance that is expected to take them said that it reaches this life of the encoder; one that
    comes, or restarts and says otherwise, makes it needed again. Where nobody is expected by name (no file of peers),
    the first that reaches it is believed to stand for all.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._expected: frozenset[str] = frozenset()
        self._reaches: dict[str, bool] = {}  # by instance that has said

    @property
    def needed(self) -> bool:
        expected = self._expected or tuple(self._reaches)  # a copy: the other thread may hear meanwhile
        return not expected or not all(self._reaches.get(one, False) for one in expected)

    def expect(self, instances: Iterable[str]) -> None:
        """Who takes features now, by name. What one that is not among them has said is forgotten."""
        self._expected = frozenset(instances)
        if self._expected:
            self._reaches = {name: reaches for name, reaches in self._reaches.items() if name in self._expected}

    def hear(self, instance: str, encoder: str, path: str) -> None:
        """An announcement `FeaturePath`."""
        if encoder == self._incarnation:
            self._reaches[instance] = path == Path.DEVICE.value
