"""What a request of vLLM tells us, whatever the role: its xargs of ours, its items, the proxy's name for it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from epd_serve.wire import ALL_MISSING, ENCODE_AGAIN_XARG, MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

# `0_chatcmpl-<X-Request-Id>-1a2b3c4d`: the child of an n > 1, the endpoint, the proxy's id, vLLM's random suffix.
# `resp_<id>_0-1a2b3c4d`: the same of a response, whose turns vLLM counts behind the id.
_OURS = re.compile(r"(?:\d+_)?(?:chatcmpl-|cmpl-)?(.+?)(?:-[0-9a-f]{8})?")
_RESPONSE = re.compile(r"resp_(.+?)_\d+(?:-[0-9a-f]{8})?")


def proxy_request_id(request_id: str) -> str:
    """The proxy's id of a request, as far as vLLM's can tell: what it sent begins with it, or is it."""
    matched = _RESPONSE.fullmatch(request_id) or _OURS.fullmatch(request_id)
    return matched.group(1) if matched else request_id


def items_ahead(request: Request, num_computed_tokens: int = 0) -> list[MultiModalFeatureSpec]:
    """The items that the prefill has not passed, each occurrence, in the order of the prompt."""
    return [
        feature
        for feature in request.mm_features
        if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
    ]


def item_keys(request: Request, num_computed_tokens: int = 0) -> list[str]:
    """Keys of these."""
    return [feature.identifier for feature in items_ahead(request, num_computed_tokens)]


def not_encoded(request: Request) -> list[str]:
    """Keys that no encoder produced, by the proxy's word."""
    keys = _keys(request, MISSING_XARG)
    return item_keys(request) if keys == [ALL_MISSING] else keys


def to_encode_again(request: Request) -> list[str]:
    """Keys that a consumer could not get, by the proxy's word."""
    return _keys(request, ENCODE_AGAIN_XARG)


def must_not_recompute(request: Request) -> bool:
    """Whether a lost feature fails the request."""
    return _xarg(request, ON_MISSING_XARG) == ON_MISSING_FAIL


def _keys(request: Request, name: str) -> list[str]:
    return [key for key in _xarg(request, name).split(",") if key]


def _xarg(request: Request, name: str) -> str:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    value = extra.get(name, "")
    return value if isinstance(value, str) else ""
