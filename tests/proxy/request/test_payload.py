"""A body in pieces is the body that the same strings would make, and holds its media once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.request.payload import ONE_PIECE_BYTES, WRITE_BYTES, Inlined, Pieces, encoded

BIG = b"A" * (2 * ONE_PIECE_BYTES)


def body(*sources: Any, text: str = "") -> dict[str, Any]:
    return {"messages": [{"content": [{"image_url": {"url": one}} for one in sources]}], "text": text}


@pytest.mark.parametrize("text", ["", "ünïcode", 'quote " and \\'], ids=["none", "wide", "escapes"])
def test_what_a_stage_reads_is_what_the_strings_say(text: str) -> None:
    items = [Inlined(b"data:image/png;base64,", BIG), Inlined(b"", memoryview(b"xxBASE64")[2:])]
    pieces = encoded(body(*items, items[0], text=text))
    assert isinstance(pieces, Pieces)
    raw = b"".join(pieces)
    assert len(raw) == len(pieces)
    assert json.loads(raw) == body(*map(str, items), str(items[0]), text=text)


def test_the_media_is_not_copied_and_goes_in_parts() -> None:
    data = b"A" * (3 * WRITE_BYTES)
    pieces = encoded(body(Inlined(b"", data)))
    parts = [part for part in pieces if part.obj is data]
    assert sum(map(len, parts)) == len(data) and max(map(len, parts)) <= WRITE_BYTES


def test_a_small_body_is_one_piece_and_text_alone_is_plain_json() -> None:
    assert json.loads(encoded(body(Inlined(b"data:,", b"abc")))) == body("data:,abc")  # type: ignore[arg-type]
    assert encoded({"a": 1}) == b'{"a":1}'
    with pytest.raises(TypeError):
        encoded({"a": object()})
