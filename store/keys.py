"""Names of features: equal for equal content under equal processing, different for anything else.

Imports the standard library only; the proxy makes keys. A key covers everything that changes a feature's bytes or who
may see it: the media's bytes (not its URL), every processor option (`max_pixels`, `fps`, frame counts, server-level
ones included: the caller merges them), modality, model, revision and dtype of the encoder, and the tenant. It does not
cover the request, the prompt, or the layout, so that these share features.

A key begins with a short digest of the tenant alone: whose share of a store its feature takes (`tenant_of`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping

from store.errors import StoreError

_DOMAIN = b"epd-serve/feature-key/1"
_KEY = re.compile(r"([0-9a-f]{3})-[0-9a-f]{64}")
TENANTS = 16**3
"""As many are told apart by `tenant_of`; two that meet there have one share together."""


def content_digest(data: bytes) -> str:
    """64 hex digits that name the media bytes (sha256: the fastest strong digest of hashlib where it has hardware)."""
    return hashlib.sha256(data).hexdigest()


def feature_key(
    data: bytes,
    *,
    processor_options: Mapping[str, object],
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
        ("content", content_digest(data)),
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


def tenant_of(key: str) -> int:
    """Whose share of a store a key's feature takes: a number below `TENANTS`; 0 for names that vLLM or others made."""
    ours = _KEY.fullmatch(key)
    return int(ours[1], 16) if ours else 0


def _canonical_json(options: Mapping[str, object]) -> str:
    try:
        if not all(isinstance(name, str) for name in _names(options)):  # JSON would make 1 and "1" the same
            raise TypeError("a key is not a string")
        return json.dumps(options, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"processor_options: {error}") from error


def _names(value: object) -> Iterator[object]:
    """Every key of every mapping in it."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _names(item)


def _plain(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
