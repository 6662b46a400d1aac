"""How P and D are given a request's media, attempt by attempt. Pure.

    METADATA   grid and key instead of the media. The stage cannot recompute: a lost feature fails it.
    FEATURES   the media rides along, yet a lost feature fails the request, because it has to be encoded again first, or
               because the stage must not recompute it under this name (below).
    PIXELS     the media rides along, and a lost feature is recomputed from it. The last resort, which cannot be lost.

A failed attempt is followed by the next of METADATA | FEATURES -> [encoded again: METADATA | FEATURES] -> PIXELS; each
step down happens at most once, and does not use up a retry.

Why a name matters: vLLM (0.32, `multimodal/cache/lru.py`) caches processed items by `uuid` on both sides of its engine.
An item sent with its media, then as metadata, then with its media again is dropped from the third message as known, and
the engine finds the second one's: no pixels. That is well while the feature is there and kills the engine when it
recomputes. So where metadata travels, media to be recomputed goes under a name of its own, all items of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epd_serve.wire import ALL_MISSING, MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG
from proxy.config.settings import ProxySettings
from proxy.context import Delivery, RequestContext
from proxy.media.loader import LoadedItem
from proxy.stages.bodies import media_name, placeholder_body, renamed_body, with_xargs


def next_delivery(ctx: RequestContext, settings: ProxySettings, before: Delivery | None = None) -> Delivery:
    """What to try now, by what the encoders made of the items. `before`: in the attempt after which lost features were
    encoded again; None where nothing was lost yet."""
    if ctx.features is None or ctx.features.missing:
        return Delivery.PIXELS
    if before in (None, Delivery.METADATA) and settings.send_pixels == "auto" and metadata_suffices(ctx):
        return Delivery.METADATA
    may_encode_again = before is None and settings.on_missing_feature == "reencode"
    return Delivery.FEATURES if may_encode_again or _only_under_another_name(ctx, settings) else Delivery.PIXELS


def goes_as_metadata(ctx: RequestContext, settings: ProxySettings) -> bool:
    """Whether the items of a request would be delivered as metadata, if that were known.

    Not with processor options: vLLM makes another identity of `uuid` and options, and embeddings have none.
    """
    return settings.send_pixels == "auto" and not ctx.request.processor_options


def metadata_suffices(ctx: RequestContext) -> bool:
    """Whether P and D can do without the media of a request.

    All items or none, since media and metadata must not mix within a modality, whose items have the same fields.
    """
    if ctx.features is None or ctx.request.processor_options:
        return False
    fields: dict[str, set[str]] = {}
    for item in ctx.items:
        metadata = ctx.features.metadata.get(item.key)
        if not metadata or fields.setdefault(item.ref.modality, set(metadata)) != set(metadata):
            return False
    return bool(ctx.items)


def delivered(ctx: RequestContext, delivery: Delivery, settings: ProxySettings) -> Mapping[str, Any]:
    """The body that both P's and D's are made from."""
    if ctx.features is None:
        return ctx.base
    if delivery is Delivery.METADATA:
        return with_xargs(placeholder_body(ctx.base, ctx.items, ctx.features.metadata), **_FAIL)
    if delivery is Delivery.FEATURES:
        return with_xargs(ctx.base, **_FAIL)
    base, missing = ctx.base, ctx.features.missing
    if renamed := _renamed(ctx, settings):
        base = renamed_body(base, renamed)
        missing = tuple(dict.fromkeys(media_name(item.key) for item in renamed))
    if ctx.request.processor_options and set(missing) == {item.key for item in ctx.items}:
        missing = (ALL_MISSING,)
    return with_xargs(base, **{MISSING_XARG: ",".join(missing)}) if missing else base


def _renamed(ctx: RequestContext, settings: ProxySettings) -> Sequence[LoadedItem]:
    """Items whose media goes under a name of its own. What is surely recomputed needs no feature's name, and another
    life of this proxy may have sent it as metadata."""
    assert ctx.features is not None, "only requests with features are asked about"
    if _only_under_another_name(ctx, settings):
        return ctx.items
    if settings.send_pixels != "auto" or ctx.request.processor_options:
        return ()
    return [item for item in ctx.items if item.key in ctx.features.missing]


def _only_under_another_name(ctx: RequestContext, settings: ProxySettings) -> bool:
    """Whether stages may hold an item of it without its media under its key. Not with processor options: vLLM's own
    name for the item has them in it."""
    assert ctx.features is not None, "only requests with features are asked about"
    return settings.send_pixels == "auto" and ctx.features.metadata_in_use and not ctx.request.processor_options


_FAIL = {ON_MISSING_XARG: ON_MISSING_FAIL}
