"""The recording: requests that were answered, as traffic without content (`epd_serve/traffic.py`), for the planner.

Items and sessions are told apart by hashes with a key that this process forgets at its end: equal ones can be seen in
one recording, and nothing else. A session is who begins with the same messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec.structs import replace

from epd_serve.traffic import Item, Request
from proxy.records.lines_file import LinesFile
from proxy.records.record import Record

FIRST_NODES = 2
"""Of a prompt, which those who go on with it have in common: what stands before its first answer."""


class Recording:
    """Args: file: where lines go; closed by whoever made it."""

    def __init__(self, file: LinesFile) -> None:
        self._file = file
        self._salt = secrets.randbits(64)
        self._encoder = msgspec.json.Encoder()
        self._noted: dict[str, tuple[float, tuple[Item, ...], str]] = {}

    def noted(self, record_id: str, prompt_tokens: float, items: Sequence[Item], nodes: Sequence[int]) -> None:
        """What is known of a request before it is answered.

        Args:
            items: with their own keys. nodes: of its prompt (`proxy/stages/prompt.py`).
        """
        own = tuple(replace(item, key=self._hash(item.key.encode())) for item in items)
        session = self._hash(repr(nodes[:FIRST_NODES]).encode()) if len(nodes) >= FIRST_NODES else ""
        self._noted[record_id] = prompt_tokens, own, session

    def ended(self, record: Record) -> None:
        """Write its line, soon, if it was answered."""
        known = self._noted.pop(record.id, None)
        tokens = record.tokens_sent
        if known is None or record.outcome != "200" or not tokens:
            return
        guessed, items, session = known
        prompt_tokens = max(1, record.prompt_tokens or round(guessed))
        cached = min(record.cached_tokens or 0, prompt_tokens)
        waited_s = record.first_byte_s or 0.0, record.total_s
        row = Request(record.id, record.began, prompt_tokens, tokens, items, session, cached, *waited_s)
        self._file.write(self._encoder.encode(row))

    def _hash(self, content: bytes) -> str:
        return xxhash.xxh3_64_hexdigest(content, seed=self._salt)
