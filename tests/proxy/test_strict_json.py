"""JSON is judged as the standard library judges it, whoever reads it."""

from __future__ import annotations

import json
import math
import timeit
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_goes_in_comes_out(value: object) -> None:
    assert strict_json.decode(strict_json.encode(value)) == value
    assert strict_json.decode(json.dumps(value).encode()) == value


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:0123456789.eE+-tfn \\u', max_size=20).map(str.encode))
def test_nothing_is_taken_that_the_standard_library_refuses(raw: bytes) -> None:
    try:
        decoded = strict_json.decode(raw)
    except (ValueError, RecursionError):
        return
    assert decoded == json.loads(raw)


@pytest.mark.parametrize("raw", [b"NaN", b"[Infinity]", b"-1e999", b"9" * 5000, b"{", b'{"a":1}x', b"\xff", b""])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        strict_json.decode(raw)


def test_nesting_beyond_reason_is_refused() -> None:
    with pytest.raises(RecursionError):
        strict_json.decode(b"[" * 200_000)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b'"\\ud800"', ""),
        (b'{"messages": [{"role": "x\\udfff"}]}', "messages[0].role"),
        (b'{"a": {"\\ud800": 1}}', "a.\\ud800"),
        (b'{"a": "\xed\xa0\x80"}', "a"),
        (b'{"a": ["\\ud83d\\ude00", "\\ude00\\ud83d"]}', "a[1]"),
    ],
)
def test_lone_surrogates_are_refused_by_the_name_of_the_field(raw: bytes, path: str) -> None:
    with pytest.raises(strict_json.LoneSurrogateError) as refused:
        strict_json.decode(raw)
    assert refused.value.path == path and str(refused.value).isascii()


def test_who_is_refused_by_msgspec_waits_for_the_standard_library_and_little_more() -> None:
    raw = b'\xef\xbb\xbf{"a": "%b"}' % ("é" * (4 << 20)).encode()
    assert least_s(lambda: strict_json.decode(raw)) < 10 * least_s(lambda: json.loads(raw))


def least_s(called: Callable[[], object]) -> float:
    return min(timeit.repeat(called, number=1, repeat=3))


def test_pairs_marks_and_large_integers_pass() -> None:
    assert strict_json.decode(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert strict_json.decode(b"\xef\xbb\xbf{}") == {}
    assert strict_json.decode(strict_json.encode(10**30)) == 10**30


def test_of_a_name_that_comes_twice_the_last_one_counts() -> None:
    assert strict_json.decode(b'{"a":1,"a":null}') == {"a": None}


def test_fields_are_passed_on_as_they_came() -> None:
    decoded = dict(strict_json.fields(b'{"b" : 1.50 , "a":{"x":[1, 2]},"gone":0}'))
    del decoded["gone"]
    assert strict_json.encode(decoded) == b'{"b":1.50,"a":{"x":[1, 2]}}'
    for raw in (b"[1]", b"1", b"{", b""):
        with pytest.raises(ValueError):
            strict_json.fields(raw)


def test_infinities_are_never_made() -> None:
    assert isinstance(strict_json.decode(b"1e308"), float) and math.isfinite(strict_json.decode(b"1e308"))
    assert isinstance(strict_json.fields(b'{"a":1}')["a"], msgspec.Raw)
