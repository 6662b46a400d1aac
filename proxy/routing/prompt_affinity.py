"""What makes two requests likely to share a prefix cache: how their prompts begin, and whose they are. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from proxy.fields.parts import MEDIA_KEYS

LEADING_CHARACTERS = 1024
"""How much of a plain prompt counts, which has no turns to tell apart."""


def prompt_affinity(base: Mapping[str, Any]) -> str:
    """The same for all turns of a conversation, and for requests that begin alike: all messages up to the first of the
    user, media by their keys; the first `LEADING_CHARACTERS` of a plain prompt. The `input` of a response is either.

    Args:
        base: the body that the stages' are made from (`proxy.stages.bodies.base_body`); its `cache_salt` keeps tenants
            apart.
    """
    messages = base.get("messages", base.get("input"))
    plain = messages if isinstance(messages, str) else base.get("prompt")
    beginning: Any = str(plain)[:LEADING_CHARACTERS]
    if isinstance(messages, list):
        beginning = []
        for message in messages:
            beginning.append(_without_media(message))
            if isinstance(message, Mapping) and message.get("role") == "user":
                break
    identity = json.dumps([base.get("model"), base.get("cache_salt"), base.get("instructions"), beginning], default=str)
    return hashlib.blake2b(identity.encode("ascii"), digest_size=16).hexdigest()


def _without_media(message: Any) -> Any:
    """`message` with its media left out; the items' keys stay, as `uuid`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {name: value for name, value in part.items() if name not in MEDIA_KEYS} if isinstance(part, Mapping) else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
