"""From an OpenAI body to the prompts it asks about. Pure; what is wrong is said as vLLM would say it, in substance."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd_serve.sim.items import Item, item_of
from epd_serve.sim.tokens import TOKEN_BYTES, text_of, token_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Prompt:
    """Text, and media items somewhere in it. `given`: tokens of an answer that are computed with it."""

    text: bytes
    items: tuple[Item, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return max(1, -(-len(self.text) // TOKEN_BYTES)) + sum(item.tokens for item in self.items) + len(self.given)

    @property
    def ids(self) -> list[int]:
        """Token ids. Those of items, which all look alike, stand in front."""
        return [0] * sum(item.tokens for item in self.items) + (token_ids(self.text.decode(errors="replace")) or [1])

    @property
    def seed(self) -> int:
        """What the answer depends on."""
        return zlib.crc32(self.text)

    @property
    def digest(self) -> str:
        """What two stages must have seen to have the same KV."""
        digest = hashlib.blake2b(self.text, digest_size=16)
        for item in self.items:
            digest.update(b"\0" + item.tokens.to_bytes(8))
        for token in self.given:
            digest.update(token.to_bytes(8))
        return digest.hexdigest()


def prompts_of(path: str, body: Mapping[str, Any], item_tokens: int) -> list[Prompt]:
    """The prompts of a body for one of the three endpoints, or for /tokenize.

    Raises:
        ValueError: which field is wrong.
    """
    if path == RESPONSES:
        return [_response_prompt(body, item_tokens)]
    if path == COMPLETIONS or "messages" not in body:
        return _completion_prompts(body.get("prompt"))
    return [_chat_prompt(body["messages"], item_tokens)]


def _chat_prompt(messages: object, item_tokens: int) -> Prompt:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages has to be a list of at least one message")
    text: list[str] = []
    items: list[Item] = []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message has to be an object")
        text.append(f"<{message.get('role', 'user')}>")
        _take_parts(message.get("content"), text, items, item_tokens)
    text.append("<assistant>")
    return Prompt("".join(text).encode(errors="replace"), tuple(items))


def _response_prompt(body: Mapping[str, Any], item_tokens: int) -> Prompt:
    """`instructions` and `input`: a text, or messages, calls of tools and what they gave back."""
    given = body.get("input")
    if not isinstance(given, str | list) or not given:
        raise ValueError("input has to be a text or a list of at least one item")
    text = [f"<system>{body['instructions']}"] if body.get("instructions") else []
    items: list[Item] = []
    for one in given if isinstance(given, list) else [{"role": "user", "content": given}]:
        if not isinstance(one, dict):
            raise ValueError("an item of input has to be an object")
        text.append(f"<{one.get('role') or one.get('type', 'user')}>")
        for name in ("content", "arguments", "output"):
            _take_parts(one.get(name), text, items, item_tokens)
    text.append("<assistant>")
    return Prompt("".join(text).encode(errors="replace"), tuple(items))


def _take_parts(content: object, text: list[str], items: list[Item], item_tokens: int) -> None:
    """Append what a text or a list of parts says to `text`, and its media to `items`."""
    if isinstance(content, str):
        text.append(content)
        return
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, dict):
            item = item_of(part, item_tokens)
            if item is not None:
                items.append(item)
            text.append(str(part.get("text", "")))


def _completion_prompts(prompt: object) -> list[Prompt]:
    """A text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(prompt, str):
        return [Prompt(prompt.encode(errors="replace"))]
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return [Prompt(text_of(prompt).encode())]
        if all(isinstance(one, str | list) and one for one in prompt):
            return [inner for one in prompt for inner in _completion_prompts(one)]
    raise ValueError("prompt has to be a text, token ids, or a list of either")
