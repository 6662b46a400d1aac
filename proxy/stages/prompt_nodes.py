"""Where a prompt can be cut, and what it is called up to there: how the front door, which has no tokens, recognises
beginnings of prompts that stages have computed before. Pure.

A node is a digest of everything up to a place: the model, the tenant's salt, the tools, and each message part in order,
media by key. Two prompts that share a node begin alike up to it. The stages say of which blocks a prompt with these
nodes was made (`epd_serve.wire.PromptBlocks`). A digest that meets another by chance costs a worse choice, no more.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash
from msgspec import Struct
from msgspec.json import Encoder

from epd_serve.cache_ledger import packed
from proxy.fields.parts import MEDIA_KEYS
from proxy.stages.cost import CHARACTERS_PER_TOKEN

CHUNK_CHARACTERS = 2048
"""A longer text is cut there, too: two that begin alike may differ at their end only."""

MAX_NODES = 64
"""Of a prompt with more places than that the first ones are kept and the last ones: they are where others part."""

FIRST_NODES = 16

_ROOT = ("model", "cache_salt", "tools", "instructions", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
_BITS = 60  # as hashes of blocks: Python holds them in less
_json = Encoder(order="deterministic", enc_hook=str)


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
    if not messages or not isinstance(messages, str | list):
        return NO_NODES
    if isinstance(messages, list) and not isinstance(messages[0], Mapping):
        return NO_NODES  # token ids, or several prompts
    digest = xxhash.xxh3_64(_json.encode([base.get(name) for name in _ROOT]))
    nodes, tokens = [], []
    for piece, key in _pieces(messages):
        digest.update(piece)
        nodes.append(digest.intdigest() >> (64 - _BITS))
        tokens.append(item_tokens.get(key, 0.0) if key else len(piece) / CHARACTERS_PER_TOKEN)
    if len(nodes) > MAX_NODES:
        cut = len(nodes) - (MAX_NODES - FIRST_NODES)
        del nodes[FIRST_NODES:cut]
        tokens[cut] += sum(tokens[FIRST_NODES:cut])
        del tokens[FIRST_NODES:cut]
    after = [0.0, *itertools.accumulate(reversed(tokens[1:]))]
    return PromptNodes(tuple(nodes), tuple(reversed(after)))


def _pieces(messages: str | list[Any]) -> Iterator[tuple[bytes, str]]:
    """What stands between the places, and of an item its key."""
    if isinstance(messages, str):
        for piece in _cut(messages):
            yield piece, ""
        return
    for message in messages:
        if not isinstance(message, Mapping):
            yield _json.encode(message), ""
            continue
        content = message.get("content")
        # What else a message has (calls of tools, names) belongs to it from its beginning on.
        others = {name: value for name, value in message.items() if name != "content"}
        head = b"\0" + (str(others["role"]).encode() if others.keys() == {"role"} else _json.encode(others)) + b"\0"
        parts = content if isinstance(content, list) else [content] if content is not None else []
        if not parts:
            yield head, ""
        for part in parts:
            of_part = part if isinstance(part, Mapping) else {}
            text = of_part.get("text") if of_part else part
            if isinstance(text, str):
                for piece in _cut(text):
                    yield head + piece, ""
                    head = b""
            else:
                yield (
                    head + _json.encode(_without_media(part)),
                    str(of_part.get("uuid") or ""),
                )
            head = b""


def _cut(text: str) -> Iterator[bytes]:
    """Pieces of a text; at least one. Each but the last has `CHUNK_CHARACTERS`."""
    for at in range(0, max(len(text), 1), CHUNK_CHARACTERS):
        yield b"\1" * (at == 0) + text[at : at + CHUNK_CHARACTERS].encode("utf-8", "surrogatepass")


def _without_media(part: Any) -> Any:
    """`part` with its media left out; the item's key stays, as `uuid`."""
    if not isinstance(part, Mapping):
        return part
    return {name: value for name, value in part.items() if name not in MEDIA_KEYS}
