"""Bodies in memory: decoding takes no more than was counted beforehand, however a body is built; one in pieces is the
body that the same strings would make, and holds its media once."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from proxy import strict_json
from proxy.strict_json import LARGE_BYTES, ONE_PIECE_BYTES, WRITE_BYTES, Inlined, Pieces, encoded, weighed

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


COUNT = 100_000
BODIES = {
    "objects of one field": b"[" + b'{"a":0},' * COUNT + b"0]",
    "empty objects": b"[" + b"{}," * COUNT + b"0]",
    "empty lists": b"[" + b"[]," * COUNT + b"0]",
    "floats": b"[" + b"1.5," * COUNT + b"0]",
    "integers": b"[" + b"99999," * COUNT + b"0]",
    "one object of many fields": b"{" + b",".join(b'"a%d":1.5' % n for n in range(COUNT)) + b"}",
    "nested": b"[" + (b"[" * 100 + b"]" * 100 + b",") * 1000 + b"0]",
    "wide text": json.dumps({"a": "x" * COUNT + "\U0001f600"}, ensure_ascii=False).encode(),
    "escaped wide text": json.dumps({"a": "x" * COUNT + "\U0001f600"}).encode(),
    "a large image": b'{"a": "data:image/png;base64,' + b"A" * (2 * LARGE_BYTES) + b'"}',
    "bombs behind a large string": b'["' + b"A" * (2 * LARGE_BYTES) + b'"' + b',{"a":0}' * COUNT + b"]",
    "bombs that look like a string": b'["\\"","A",' + b'{"a":0},' * 5 * COUNT + b'"' + b"A" * LARGE_BYTES + b'"]',
    "only the standard library takes it": b'\xef\xbb\xbf["\\u0041",' + b'{"a":0},' * COUNT + b"0]",
}


@pytest.mark.parametrize("name", BODIES)
def test_decoding_takes_no_more_than_was_counted(name: str) -> None:
    raw = bytearray(BODIES[name])
    weight = weighed(raw)
    tracemalloc.start()
    try:
        decoded = strict_json.decode(raw)
        kept, peak = tracemalloc.get_traced_memory()
        # msgspec allocates through CPython's allocators, which tracemalloc sees.
        assert peak > 0 and decoded
        assert peak <= weight.decoding_bytes + 10_000
        assert kept <= weight.decoded_bytes(0) + 10_000
    finally:
        tracemalloc.stop()


def test_a_large_image_counts_about_what_it_is() -> None:
    raw = BODIES["a large image"]
    assert weighed(raw).decoded_bytes(media_bytes=len(raw) - 10) < len(raw) + 1000
