"""What a prompt costs before anybody has computed it: its tokens, estimated. Pure.

Loads of the status table are sums of these and of what stages report, which count real tokens, so both are in tokens.
Nothing here needs to be exact: placing work well needs costs that are right relative to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.fields.parts import MEDIA_KEYS
from proxy.media.loader import LoadedItem
from proxy.request.parse import ParsedRequest

CHARACTERS_PER_TOKEN = 4
PROMPT_FIELDS = ("messages", "tools", "prompt", "input", "instructions")

MAX_LEVELS = 500
"""Levels of nesting within a prompt. Stages walk it by recursion, of which Python allows a thousand calls."""


def prompt_tokens(request: ParsedRequest, items: Sequence[LoadedItem] = ()) -> float:
    """Tokens of a request's prompt, its items among them. At least 1. Of text in other scripts than Latin, whose
    characters are tokens more often, the UTF-8 bytes are counted.

    Raises:
        RecursionError: it is nested more deeply than a stage could walk it.
    """
    body = request.body
    prompt_parts = [body[name] for name in PROMPT_FIELDS if body.get(name)]
    tokens = _text_tokens(prompt_parts)
    if items:
        tokens += sum(item.tokens for item in items)
    return max(tokens, 1.0)


def _text_tokens(values: list[Any]) -> float:
    """Returns the tokens of all text within these. A list of numbers is one of token ids. Media are left out: their
    data is no text."""
    characters = tokens = levels = 0
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
    return characters / CHARACTERS_PER_TOKEN + tokens
