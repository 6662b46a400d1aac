"""Names of features: equal for equal content under equal processing, different for anything else.

Imports the standard library only; the proxy makes keys. A key covers everything that changes a feature's bytes or who
may see it: the media's bytes (not its URL), every processor option (`max_pixels`, `fps`, frame counts, server-level
ones included: the caller merges them), modality, model, revision and dtype of the encoder, and the tenant. It does not
cover the request, the prompt, or the layout, so that these share features.

A key begins with a short digest of the tenant alone: whose share of a store its feature takes (`tenant_of`).

An image that several encoders make together has no feature under its key, but one of each part under keys of their own
(`part_keys`), which say how it was cut: parts of another cut have other names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from store.errors import StoreError

_DOMAIN = b"epd-serve/feature-key/1"
_KEY = re.compile(r"([0-9a-f]{3})-[0-9a-f]{64}(?:/[0-9]+-[0-9]+)?")
_PART = re.compile(r"(.+)/([0-9]{1,4})-([0-9]{1,4})")
TENANTS = 16**3
"""As many are told apart by `tenant_of`; two that meet there have one share together."""


def feature_key(
    data: bytes,
    *,
    processor_options: dict[str, object],
    model: str,
    revision: str,
    dtype: str,
    tenant: str,
    modality: str,
) -> str:
    """The key of the feature that one media item becomes: 3 lowercase hex digits by its tenant, a hyphen, and 64 by
    all of it.

    Args:
        data: the media as loaded, still encoded.
        processor_options: `mm_processor_kwargs`; JSON values, order of keys irrelevant.
        model, revision, dtype: the encoder that makes the feature.
        tenant: salt, so that features are never shared across tenants.
        modality: `image`, `video` or `audio`.

    Raises:
        StoreError: `processor_options` holds something that JSON cannot express.
    """
    fields = (
        ("content", hashlib.sha256(data).hexdigest()),  # the fastest strong digest of hashlib where hardware has it
        ("processor_options", _canonical_json(processor_options)),
        ("model", model),
        ("revision", revision),
        ("dtype", dtype),
        ("tenant", tenant),
        ("modality", modality),
    )
    digest = hashlib.sha256(_DOMAIN)
    for name, value in fields:
        for text in (name, value):
            # Lone surrogates can come out of a client's JSON; they must name something, not crash.
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    whose = hashlib.sha256(_DOMAIN + b"/tenant/" + tenant.encode("utf-8", "surrogatepass"))
    return f"{whose.hexdigest()[:3]}-{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Part:
    """Of an image whose tiles are dealt out in `count` equal shares, in order: the one of this index."""

    whole: str
    index: int
    count: int

    def of(self, tiles: int) -> range:
        """Its tiles; none where there are fewer tiles than parts, and this one comes off worst."""
        return range(self.index * tiles // self.count, (self.index + 1) * tiles // self.count)


def part_keys(key: str, count: int) -> tuple[str, ...]:
    """The keys of so many parts of an image, in the order of its tiles."""
    return tuple(f"{key}/{index}-{count}" for index in range(count))


def part_of(key: str) -> Part | None:
    """What a key is a part of; None for that of a whole feature."""
    named = _PART.fullmatch(key) if "/" in key else None
    if named is None:
        return None
    part = Part(named[1], int(named[2]), int(named[3]))
    return part if part.index < part.count else None


def whole_of(key: str) -> str:
    """The key of the image that a part is of; any other key as it is."""
    part = part_of(key)
    return part.whole if part is not None else key


def parts_by_whole(keys: Iterable[str]) -> dict[str, list[str]]:
    """Keys of parts by the keys of their images; keys of whole features are left out."""
    parts: dict[str, list[str]] = {}
    for key in keys:
        if (whole := whole_of(key)) != key:
            parts.setdefault(whole, []).append(key)
    return parts


def tenant_of(key: str) -> int:
    """Whose share of a store a key's feature takes: a number below `TENANTS`; 0 for names that vLLM or others made."""
    ours = _KEY.fullmatch(key)
    return int(ours[1], 16) if ours else 0


def _canonical_json(options: dict[str, object]) -> str:
    try:
        text = json.dumps(options, sort_keys=True, separators=(",", ":"), allow_nan=False)
        if json.loads(text) != options:
            raise TypeError("a key is not a string, or a value not JSON's")  # it would make 1 and "1" the same
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"processor_options: {error}") from error
