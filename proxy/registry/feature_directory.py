"""What this proxy knows of the MM Store's features: which are there, and the metadata that stands in for their media.

Fed by announcements and by encoders' answers. Both are hints: on the same host the arena's index is asked before one
is believed (`holds`), elsewhere a hint counts for `TRUST_S`. Pure state, bounded; the clock is the caller's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from epd_serve.wire import FeatureExpected, FeatureReady
from store.keys import part_keys, part_of, whole_of

Metadata = Mapping[str, Any]
TRUST_S = 30.0  # a consumer that recomputes a lost feature does not tell, so no hint may be believed for ever
EXPECT_S = 1.0  # an encoder says every 200 ms what it holds; one that has died, or was left, does not
PROMISE_S = 2.0  # an encoder answers before its put has ended, so that P and D start meanwhile
NEVER = -math.inf


@dataclass(slots=True)
class _Feature:
    """What is known of one.

    Attributes:
        metadata: fields of its item, as `placeholder_metadata` gives them; a function of the key, so it never ages.
        maker: incarnation of the encoder that made it, or "".
        ready_at: when it was announced to be stored, if it has not been lost since.
        expected_at: when an encoder last said that it works on it, until that has ended.
        promised_at: when an encoder answered that it is being stored.
        pooled: the second tier holds it.
        parts: in how many parts it was made last (`store.keys.part_keys`), if it was.
    """

    metadata: Metadata | None = None
    maker: str = ""
    ready_at: float = NEVER
    expected_at: float = NEVER
    promised_at: float = NEVER
    pooled: bool = False
    parts: int = 0


UNKNOWN = _Feature()


class FeatureDirectory:
    """Features by key, the least recently used forgotten beyond `limit`.

    Args:
        holds: asks the arena of this host: True, False, or None where there is none to ask (or no answer).

    `has_had_metadata`: some encoder has given some item's metadata.
    """

    def __init__(self, limit: int, *, holds: Callable[[str], bool | None] = lambda _: None) -> None:
        self._limit = limit
        self._holds = holds
        self._features: OrderedDict[str, _Feature] = OrderedDict()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self.has_had_metadata = False

    def __len__(self) -> int:
        return len(self._features)

    def expected(self, event: FeatureExpected, now: float) -> None:
        """An encoder has begun to work on these."""
        for key, metadata in event.items.items():
            self._made(key, metadata, event.incarnation).expected_at = now
            self._tell(key)

    def renewed(self, keys: Iterable[str], now: float) -> None:
        """An encoder still holds these."""
        for key in keys:
            feature = self._of(key)
            if feature.expected_at > NEVER:
                feature.expected_at = now

    def announced(self, event: FeatureReady, now: float) -> None:
        """An encoder has put it."""
        feature = self._made(event.key, event.metadata, event.incarnation)
        feature.ready_at, feature.pooled = now, event.pooled
        feature.expected_at = feature.promised_at = NEVER
        self._tell(event.key)

    def promised(self, key: str, metadata: object, *, maker: str, now: float) -> None:
        """An encoder answered that it has encoded this."""
        self._made(key, metadata, maker).promised_at = now

    def lost(self, keys: Iterable[str]) -> None:
        """Not to be had: an encoder could not store these, or a consumer did not find them."""
        for key in keys:
            feature = self._of(key)
            if feature is not UNKNOWN:
                feature.ready_at = feature.expected_at = feature.promised_at = NEVER
                feature.pooled, feature.parts = False, 0

    def distrust(self, keys: Iterable[str]) -> None:
        """A stage refused the metadata of these."""
        for key in keys:
            if key in self._features:
                self._features[key].metadata = None

    def knows(self, key: str, now: float) -> bool:
        """Whether the feature is there, or as good as there, or all of its parts are, so that no encoder need be
        asked."""
        return self._has(key, now) or self._all_parts(self._has, key, now)

    def is_coming(self, key: str, now: float) -> bool:
        """Whether the feature is there, or an encoder is at work on it, or on each of its parts."""
        return self._will_have(key, now) or self._all_parts(self._will_have, key, now)

    def parts(self, key: str, now: float) -> tuple[str, ...]:
        """Keys of its parts, where it is there, or coming, in parts alone."""
        if self._has(key, now) or not self._all_parts(self._will_have, key, now):
            return ()
        return part_keys(key, self._of(key).parts)

    def _all_parts(self, are: Callable[[str, float], bool], key: str, now: float) -> bool:
        count = self._of(key).parts
        return bool(count) and all(are(part, now) for part in part_keys(key, count))

    def _has(self, key: str, now: float) -> bool:
        feature = self._of(key)
        if feature is not UNKNOWN:
            self._features.move_to_end(key)
        if now - feature.promised_at < PROMISE_S:
            return True
        there = self._holds(key)
        return bool(there) or (now - feature.ready_at < TRUST_S and (feature.pooled or there is None))

    def _will_have(self, key: str, now: float) -> bool:
        return now - self._of(key).expected_at < EXPECT_S or self._has(key, now)

    def made_by(self, key: str, now: float) -> str:
        """The incarnation of the encoder that is at work on it, or ""."""
        feature = self._of(key)
        return feature.maker if now - feature.expected_at < EXPECT_S else ""

    @contextmanager
    def followed(self, keys: Iterable[str], listener: Callable[[], None]) -> Iterator[None]:
        """`listener` is called at announcements of one of these, for the time of this context."""
        keys = tuple(keys)
        for key in keys:
            self._listeners.setdefault(key, []).append(listener)
        try:
            yield
        finally:
            for key in keys:
                self._listeners[key].remove(listener)
                if not self._listeners[key]:
                    del self._listeners[key]

    def metadata(self, key: str) -> Metadata | None:
        """What stands in for the media of `key`, or None where only the media itself will do."""
        return self._of(key).metadata

    def makers(self, keys: Iterable[str]) -> frozenset[str]:
        """Incarnations of the encoders that made these."""
        return frozenset(maker for key in keys if (maker := self._of(key).maker))

    def _tell(self, key: str) -> None:
        for listener in self._listeners.get(whole_of(key), ()):  # whoever follows an item follows its parts
            listener()

    def _of(self, key: str) -> _Feature:
        return self._features.get(key, UNKNOWN)

    def _made(self, key: str, metadata: object, maker: str) -> _Feature:
        """An encoder says that this is its feature, and perhaps what stands in for the item."""
        if (part := part_of(key)) is not None:
            self._row(part.whole).parts = part.count
        feature = self._row(key)
        feature.maker = maker
        if fields := placeholder_metadata(metadata):
            feature.metadata = fields
            self.has_had_metadata = True
        return feature

    def _row(self, key: str) -> _Feature:
        feature = self._features.setdefault(key, _Feature())
        self._features.move_to_end(key)
        if len(self._features) > self._limit:
            self._features.popitem(last=False)
        return feature


def placeholder_metadata(metadata: object) -> Metadata | None:
    """An item's metadata in the form that vLLM takes in a `*_embeds` part: flat lists of finite numbers.

    A list that holds the one row of the one item is unfolded. None where anything else is in it, or nothing: what
    cannot be sent is treated like what is not known.
    """
    if not isinstance(metadata, Mapping):
        return None
    unfolded = {name: value[0] if _holds_one_row(value) else value for name, value in metadata.items()}
    try:
        fields = msgspec.convert(unfolded, dict[str, list[int | float]])
    except msgspec.ValidationError:
        return None
    return fields if fields and all(map(math.isfinite, chain.from_iterable(fields.values()))) else None


def _holds_one_row(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple)
