"""The transfer params of one request, as the proxy sets them, and the identity of its prompt."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from epd_serve.wire import FIRST_TOKEN, GOES_ON_AFTER, TransferKey

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # vLLM >= 0.28 appends it to the request id, per instance


@dataclass(frozen=True)
class SendParams:
    """`kv_transfer_params` of a request at P. `first_token`: D is to go on after the token that is sampled here."""

    key: TransferKey
    incarnation: str
    first_token: bool = False


@dataclass(frozen=True)
class ReceiveParams:
    """`kv_transfer_params` of a request at D: where its KV comes from.

    Attributes:
        awaits_token: it goes on after P's first token, which P will say; once it is known it stands under
            `goes_on_after` in the params, for the logits processor (`epd_serve.engine.forced_tokens`).
    """

    key: TransferKey
    peer: str
    incarnation: str
    endpoint: str
    awaits_token: bool = False


def transfer_key(raw: dict[str, Any], request_id: str) -> TransferKey:
    """Name of one child's transfer: both ends got the same X-Request-Id, so its id agrees but for the suffix."""
    return TransferKey(str(raw["transfer_id"]), _RANDOM_SUFFIX.sub("", request_id))


def send_params(raw: dict[str, Any] | None, request_id: str) -> SendParams | None:
    """None for a request that is served here alone (vLLM's own warm-up, an operator's curl)."""
    if not raw or "transfer_id" not in raw:
        return None
    key = transfer_key(raw, request_id)
    return SendParams(key, str(raw.get("incarnation", "")), raw.get(FIRST_TOKEN) is True)


def receive_params(raw: dict[str, Any] | None, request_id: str) -> ReceiveParams | None:
    """None for a request without a prefill instance: D computes it alone."""
    if not raw or "transfer_id" not in raw or "peer" not in raw:
        return None
    peer = raw["peer"]
    return ReceiveParams(
        transfer_key(raw, request_id),
        str(peer["instance"]),
        str(peer["incarnation"]),
        str(peer["endpoint"]),
        raw.get(FIRST_TOKEN) is True,
    )


def tokens_to_go_on_after(raw: dict[str, Any] | None) -> list[int]:
    """The tokens of an answer that the client has; empty also where they are no tokens."""
    tokens = (raw or {}).get(GOES_ON_AFTER)
    whole = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    return tokens if isinstance(tokens, list) and whole else []


def prompt_hash(token_ids: Iterable[int], item_keys: Iterable[str]) -> str:
    """What both ends must have tokenised: placeholder tokens look alike, so the items' keys are part of it."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16)
    for key in item_keys:
        digest.update(key.encode() + b"\0")
    return digest.hexdigest()
