"""The headers of a request: as starlette finds them, whatever the case and however often one is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from proxy.http.exchange import RequestHeaders

names = st.sampled_from(["x-a", "x-b", "x-epd"])


@given(
    raw=st.lists(st.tuples(names, st.text(alphabet="abc é", max_size=3))),
    name=st.sampled_from(["x-a", "X-A", "x-b", "X-Epd", "x-none"]),
)
def test_they_are_what_starlette_finds(raw: list[tuple[str, str]], name: str) -> None:
    scope = {"type": "http", "headers": [(name.encode(), value.encode("latin-1")) for name, value in raw]}
    ours, theirs = RequestHeaders(scope), Headers(scope=scope)
    assert ours.get(name) == theirs.get(name)
    assert ours.get(name, "other") == theirs.get(name, "other")
    assert ours.getlist(name) == theirs.getlist(name)


@pytest.mark.parametrize("name", ["x-a", "X-A"])
def test_of_several_the_first_counts(name: str) -> None:
    headers = RequestHeaders({"type": "http", "headers": [(b"x-a", b"1"), (b"x-a", b"2")]})
    assert headers.get(name) == "1" and headers.getlist(name) == ["1", "2"]
