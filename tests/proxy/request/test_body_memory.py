"""What decoding really takes is never more than what was counted beforehand, however a body is built."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from proxy import strict_json
from proxy.request.body_memory import LARGE_BYTES, weighed

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
