"""How P and D are given a request's media, attempt by attempt. Pure.

    METADATA   grid and key instead of the media (design §4.4). The stage cannot recompute: a lost feature fails it.
    FEATURES   the media rides along, yet a lost feature fails the request, because the policy is to encode it again.
    PIXELS     the media rides along, and a lost feature is recomputed from it. The last resort, which cannot be lost.

A failed attempt is followed by the next of METADATA | FEATURES -> [encoded again: METADATA] -> PIXELS; each step down
happens at most once, and does not use up a retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from epd_serve.wire import MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG
from proxy.bodies import placeholder_body, with_xargs
from proxy.job import Job
from proxy.settings import ProxySettings


class Delivery(StrEnum):
    METADATA = "metadata"
    FEATURES = "features"
    PIXELS = "pixels"


def first_delivery(job: Job, settings: ProxySettings) -> Delivery:
    """What to try first. `job.features` says what the encoders made of the items."""
    if job.features is None or job.features.missing:
        return Delivery.PIXELS
    if settings.send_pixels == "auto" and metadata_suffices(job):
        return Delivery.METADATA
    return Delivery.FEATURES if settings.on_missing_feature == "reencode" else Delivery.PIXELS


def delivery_after_encoding_again(before: Delivery, job: Job) -> Delivery:
    """What to try once the lost features were encoded again: METADATA a second time, but FEATURES no more."""
    assert job.features is not None, "only requests with features are encoded again"
    again = before is Delivery.METADATA and not job.features.missing and metadata_suffices(job)
    return Delivery.METADATA if again else Delivery.PIXELS


def metadata_suffices(job: Job) -> bool:
    """Whether P and D can do without the media of `job`.

    Not with processor options: vLLM makes another identity of `uuid` and options, and embeddings have none. All items
    or none, since media and metadata must not mix within a modality, whose items have the same fields.
    """
    if job.features is None or job.request.processor_options:
        return False
    fields: dict[str, set[str]] = {}
    for item in job.items:
        metadata = job.features.metadata.get(item.key)
        if not metadata or fields.setdefault(item.ref.modality, set(metadata)) != set(metadata):
            return False
    return bool(job.items)


def delivered(job: Job, delivery: Delivery) -> Mapping[str, Any]:
    """The body that both P's and D's are made from."""
    if job.features is None:
        return job.base
    if delivery is Delivery.PIXELS:
        missing = job.features.missing
        return with_xargs(job.base, **{MISSING_XARG: ",".join(missing)}) if missing else job.base
    base = job.base
    if delivery is Delivery.METADATA:
        base = placeholder_body(base, job.items, job.features.metadata)
    return with_xargs(base, **{ON_MISSING_XARG: ON_MISSING_FAIL})
