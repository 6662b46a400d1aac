"""From an OpenAI body to the prompts it asks about. Pure; what is wrong is said as vLLM would say it, in substance."""

from __future__ import annotations

import hashlib
import itertools
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
    """Text, and media items in it, each before the byte of the text that `places` says. `given`: tokens of an answer
    that are computed with it."""

    text: bytes
    items: tuple[Item, ...] = ()
    places: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return max(1, -(-len(self.text) // TOKEN_BYTES)) + sum(item.tokens for item in self.items) + len(self.given)

    @property
    def item_ends(self) -> tuple[int, ...]:
        """Tokens of the prompt up to the end of each item."""
        before = itertools.accumulate(item.tokens for item in self.items)
        return tuple(place // TOKEN_BYTES + tokens for place, tokens in zip(self.places, before, strict=True))

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
    made = _Made(item_tokens)
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message has to be an object")
        made.text(f"<{message.get('role', 'user')}>")
        made.parts(message.get("content"))
    return made.prompt()


def _response_prompt(body: Mapping[str, Any], item_tokens: int) -> Prompt:
    """`instructions` and `input`: a text, or messages, calls of tools and what they gave back."""
    given = body.get("input")
    if not isinstance(given, str | list) or not given:
        raise ValueError("input has to be a text or a list of at least one item")
    made = _Made(item_tokens)
    if body.get("instructions"):
        made.text(f"<system>{body['instructions']}")
    for one in given if isinstance(given, list) else [{"role": "user", "content": given}]:
        if not isinstance(one, dict):
            raise ValueError("an item of input has to be an object")
        made.text(f"<{one.get('role') or one.get('type', 'user')}>")
        for name in ("content", "arguments", "output"):
            made.parts(one.get(name))
    return made.prompt()


class _Made:
    """A prompt in the making. Its template fills each text up to whole tokens, so that the beginning of a conversation
    has the same tokens in all of its turns, answers among them."""

    def __init__(self, item_tokens: int) -> None:
        self._item_tokens = item_tokens
        self._text = bytearray()
        self._items: list[Item] = []
        self._places: list[int] = []

    def text(self, text: str) -> None:
        raw = text.encode(errors="replace")
        self._text += raw + b" " * (-len(raw) % TOKEN_BYTES)

    def parts(self, content: object) -> None:
        """A text or a list of parts."""
        if isinstance(content, str):
            self.text(content)
            return
        for part in content if isinstance(content, list) else ():
            if isinstance(part, str):
                self.text(part)
            elif isinstance(part, dict):
                if (item := item_of(part, self._item_tokens)) is not None:
                    self._items.append(item)
                    self._places.append(len(self._text))
                self.text(str(part.get("text", "")))

    def prompt(self) -> Prompt:
        self.text("<assistant>")
        return Prompt(bytes(self._text), tuple(self._items), tuple(self._places))


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
