"""The tokeniser of simulated stages: four bytes of UTF-8 are a token, and its id says which. Pure, reversible."""

from __future__ import annotations

from collections.abc import Iterable

TOKEN_BYTES = 4
WORDS = (
    " the", " and", " for", " has", " not", " but", " all", " one", " its", " may", " can", " new", " two", " off",
    " now", " way",
)  # fmt: skip
"""What answers are made of: one word is one generated token, and one of a prompt that has it."""


def token_ids(text: str) -> list[int]:
    """Ids of a text. The byte after the last one marks the length, so that no two tokens share an id."""
    raw = text.encode(errors="replace")
    return [int.from_bytes(raw[at : at + TOKEN_BYTES] + b"\1", "little") for at in range(0, len(raw), TOKEN_BYTES)]


def text_of(ids: Iterable[int]) -> str:
    """The text of ids; of ids that no text has, what can be read of them.

    Raises:
        ValueError: a negative id.
    """
    raw = bytearray()
    for one in ids:
        if one < 0:
            raise ValueError(f"token id {one} is negative")
        piece = one.to_bytes(max(1, (one.bit_length() + 7) // 8), "little")
        raw += piece[:-1] if piece.endswith(b"\1") else piece
    return raw.decode(errors="replace")


def word_id(seed: int, number: int) -> int:
    """The id of that token; `text_of` knows it."""
    return int.from_bytes(word(seed, number).encode() + b"\1", "little")


def word(seed: int, number: int) -> str:
    """The text of generated token `number` of the answer to a prompt with this seed."""
    return WORDS[(seed + number) % len(WORDS)]
