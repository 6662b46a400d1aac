"""What a prompt costs before anybody has computed it, and what its beginnings are called, without a tokenizer. Pure.

Costs are tokens, estimated. Loads of the status table are sums of these and of what stages report, which count real
tokens. Nothing here needs to be exact: placing work well needs costs that are right relative to each other.

A *node* is a digest of everything up to a place where a prompt can be cut: the model, the tenant's salt, the tools, and
each message part in order, media by key. Two prompts that share a node begin alike up to it. The stages say of which
blocks a prompt with these nodes was made (`epd_serve.wire.PromptBlocks`). A digest that meets another by chance costs a
worse choice, no more.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash
from msgspec import Struct
from msgspec.json import Encoder

from epd_serve.cache_ledger import packed
from proxy.fields.parts import MEDIA_KEYS
from proxy.media.loader import LoadedItem
from proxy.request.parse import ParsedRequest

CHARACTERS_PER_TOKEN = 4
PROMPT_FIELDS = ("messages", "tools", "prompt", "input", "instructions")

MAX_LEVELS = 500
"""Levels of nesting within a prompt. Stages walk it by recursion, of which Python allows a thousand calls."""

CHUNK_CHARACTERS = 2048
"""A longer text is cut there, too: two that begin alike may differ at their end only."""

MAX_NODES = 64
"""Of a prompt with more places than that the first ones are kept and the last ones: they are where others part."""

FIRST_NODES = 16

_ROOT = ("model", "cache_salt", "tools", "instructions", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
_BITS = 60  # as hashes of blocks: Python holds them in less
_json = Encoder(order="deterministic", enc_hook=str)


def prompt_tokens(request: ParsedRequest, items: Sequence[LoadedItem] = ()) -> float:
    """Tokens of a request's prompt, its items among them. At least 1. Of text in other scripts than Latin, whose
    characters are tokens more often, the UTF-8 bytes are counted; a list of numbers is one of token ids.

    Raises:
        RecursionError: it is nested more deeply than a stage could walk it.
    """
    tokens = sum(item.tokens for item in items)
    values = [request.body[name] for name in PROMPT_FIELDS if request.body.get(name)]
    characters = levels = 0
    while values:
        levels += 1
        if levels > MAX_LEVELS:
            raise RecursionError("a prompt is nested too deeply")
        inner: list[Any] = []
        for value in values:
            if isinstance(value, str):
                characters += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
            elif isinstance(value, dict):
                inner += [part for name, part in value.items() if name not in MEDIA_KEYS]
            elif isinstance(value, list) and value:
                if isinstance(value[0], int):
                    tokens += len(value)
                else:
                    inner += value
        values = inner
    return max(characters / CHARACTERS_PER_TOKEN + tokens, 1.0)


class PromptNodes(Struct, frozen=True):
    """The places of one prompt, in order.

    Attributes:
        nodes: digests; the last one is of the whole prompt.
        tokens_after: estimated tokens between each node and the end.
    """

    nodes: tuple[int, ...] = ()
    tokens_after: tuple[float, ...] = ()

    @property
    def word(self) -> str:
        """For the stages (`epd_serve.wire.PROMPT_XARG`)."""
        return base64.b64encode(packed(self.nodes)).decode("ascii")


NO_NODES = PromptNodes()


def prompt_nodes(base: Mapping[str, Any], item_tokens: Mapping[str, float]) -> PromptNodes:
    """The nodes of one request; none of a list of prompts.

    Args:
        base: the body that the stages' are made from (`proxy.stages.bodies.base_body`); its `cache_salt` keeps tenants
            apart.
        item_tokens: of its media items, by key.
    """
    messages = base.get("messages", base.get("input", base.get("prompt")))
    if isinstance(messages, str) and messages:
        messages = [{"content": messages}]
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return NO_NODES  # token ids, or several prompts
    digest = xxhash.xxh3_64(_json.encode([base.get(name) for name in _ROOT]))
    nodes, tokens = [], []
    for piece, key in _pieces(messages):
        digest.update(piece)
        nodes.append(digest.intdigest() >> (64 - _BITS))
        tokens.append(item_tokens.get(key, 0.0) if key else len(piece) / CHARACTERS_PER_TOKEN)
    after = [*itertools.accumulate(reversed(tokens[1:]), initial=0.0)][::-1]
    if (others := len(nodes) - MAX_NODES) > 0:
        for places in (nodes, after):
            del places[FIRST_NODES : FIRST_NODES + others]
    return PromptNodes(tuple(nodes), tuple(after))


def _pieces(messages: list[Any]) -> Iterator[tuple[bytes, str]]:
    """What stands between the places, and of an item its key."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        # What else a message has (calls of tools, names) belongs to it from its beginning on.
        others = {name: value for name, value in message.items() if name != "content"} if content is not message else ()
        head = b"\0%b\0" % _json.encode(others)
        for part in content if isinstance(content, list) and content else [content]:
            text, key = part, ""
            if isinstance(part, dict):
                text, key = part.get("text"), str(part.get("uuid") or "")
            if isinstance(text, str):
                for at in range(0, max(len(text), 1), CHUNK_CHARACTERS):
                    said = text[at : at + CHUNK_CHARACTERS].encode("utf-8", "surrogatepass")
                    yield (head + said if at else head + b"\1" + said), ""
                    head = b""
            else:
                yield head + _json.encode(_without_media(part)), key
            head = b""


def _without_media(part: Any) -> Any:
    """`part` with its media left out; the item's key stays, as `uuid`."""
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name not in MEDIA_KEYS}
