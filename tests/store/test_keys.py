"""store.keys: every field counts, spelling does not, and nothing heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from store.errors import StoreError
from store.keys import TENANTS, Part, feature_key, part_keys, part_of, tenant_of
from tests.waiting import PATIENCE_S

FIELDS = ("model", "revision", "dtype", "tenant", "modality")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
options = st.dictionaries(st.text(), json_values, max_size=4)
requests = st.fixed_dictionaries(
    {"data": st.binary(max_size=20), "processor_options": options, **dict.fromkeys(FIELDS, st.text(max_size=8))}
)


def key(request: dict[str, Any]) -> str:
    return feature_key(request["data"], **{name: value for name, value in request.items() if name != "data"})


def reversed_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reversed_order(value[name]) for name in reversed(value)}
    return [reversed_order(item) for item in value] if isinstance(value, list) else value


@given(requests)
def test_a_key_is_stable_lowercase_hex(request: dict[str, Any]) -> None:
    made = key(request)
    assert made == key(request)
    assert re.fullmatch("[0-9a-f]{3}-[0-9a-f]{64}", made)


def test_keys_do_not_change_between_releases_unnoticed() -> None:
    made = feature_key(
        b"pixels", processor_options={"b": 1, "a": None}, model="m", revision="r", dtype="d", tenant="t", modality="i"
    )
    assert made == "539-1aae7aec68df81fc73c653e5cabc8abc31f27f347e85a4de934016bd7aa3cec5"


@given(requests, requests)
def test_a_key_tells_whose_share_it_takes_and_nothing_else_about_whose_it_is(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    same_tenant = {**other, "tenant": one["tenant"]}
    assert tenant_of(key(one)) == tenant_of(key(same_tenant))
    assert key(one).startswith(key(same_tenant)[:4]) and 0 <= tenant_of(key(one)) < TENANTS


def test_tenants_have_shares_of_their_own() -> None:
    request = {"data": b"x", "processor_options": {}, **dict.fromkeys(FIELDS, "x")}
    assert len({tenant_of(key({**request, "tenant": f"tenant {number}"})) for number in range(20)}) == 20


@pytest.mark.parametrize("name", ["", "k", "7" * 64, "0badcafe-0000-4000-8000-000000000000", "0ba-" + "x" * 64])
def test_names_that_were_not_made_here_are_nobodys(name: str) -> None:
    assert tenant_of(name) == 0


@given(requests, requests)
def test_any_field_changed_gives_another_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    for field in one:
        changed = {**one, field: other[field]}
        same = (
            json.dumps(changed[field], sort_keys=True) == json.dumps(one[field], sort_keys=True)
            if (field == "processor_options")
            else changed[field] == one[field]
        )
        assert (key(changed) == key(one)) == same


@given(requests)
def test_the_order_of_options_is_irrelevant(request: dict[str, Any]) -> None:
    assert key({**request, "processor_options": reversed_order(request["processor_options"])}) == key(request)


@given(requests, st.sampled_from(range(len(FIELDS) - 1)), st.integers(1, 8))
def test_moving_text_to_the_neighbouring_field_gives_another_key(
    request: dict[str, Any], left: int, count: int
) -> None:
    joined = request[FIELDS[left]] + request[FIELDS[left + 1]]
    moved = {**request, FIELDS[left]: joined[:count], FIELDS[left + 1]: joined[count:]}
    assume(moved != request)
    assert key(moved) != key(request)


def test_numbers_that_differ_in_type_are_different_options() -> None:
    base = {"data": b"", **dict.fromkeys(FIELDS, "")}
    keys = {key({**base, "processor_options": {"x": value}}) for value in (1, 1.0, True, "1", [1], None)}
    assert len(keys) == 6


@pytest.mark.parametrize(
    "bad", [{1: "x"}, {"x": object()}, {"x": float("nan")}, {"x": [{2: 3}]}, {"x": b"raw"}, {"x": (1,)}]
)
def test_options_that_json_cannot_say_are_refused(bad: Any) -> None:
    with pytest.raises(StoreError, match="processor_options"):
        key({"data": b"", "processor_options": bad, **dict.fromkeys(FIELDS, "")})


@pytest.mark.parametrize(
    "change",
    [
        {"data": b"other media"},
        {"processor_options": {"max_pixels": 401408, "fps": 2}},
        {"processor_options": {"max_pixels": 200704, "fps": 1}},
        {"processor_options": {}},
        {"model": "other"},
        {"revision": "r2"},
        {"dtype": "float16"},
        {"tenant": "tenant-b"},
        {"modality": "video"},
    ],
)
def test_what_changes_a_feature_or_its_readers_changes_the_key(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "data": b"media",
        "processor_options": {"max_pixels": 200704, "fps": 2},
        "model": "m",
        "revision": "r1",
        "dtype": "bfloat16",
        "tenant": "tenant-a",
        "modality": "image",
    }
    assert key(base) == key(dict(base))
    assert key({**base, **change}) != key(base)


def test_lone_surrogates_have_keys_of_their_own() -> None:
    base: dict[str, Any] = {"data": b"", "processor_options": {}, **dict.fromkeys(FIELDS, "")}
    assert len({key({**base, "tenant": text}) for text in ("\ud800", "\ud801", "?", "\ufffd")}) == 4


def test_importing_keys_imports_nothing_heavy() -> None:
    code = "import sys, store.keys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert not {"torch", "numpy", "vllm", "xxhash", "mooncake", "epd_serve"} & set(loaded.stdout.split())


@given(requests, st.integers(1, 32), st.integers(0, 40))
def test_parts_say_how_an_image_was_cut_and_take_its_tenants_share(
    request: dict[str, Any], count: int, tiles: int
) -> None:
    whole = key(request)
    parts = [part_of(one) for one in part_keys(whole, count)]
    assert parts == [Part(whole, index, count) for index in range(count)]
    assert [tile for part in parts if part is not None for tile in part.of(tiles)] == list(range(tiles))
    assert {tenant_of(one) for one in part_keys(whole, count)} == {tenant_of(whole)}


@pytest.mark.parametrize("name", ["k", "k/", "k/1", "k/2-2", "k/1-2/", "/0-1", "k/-1-2", "k/a-b"])
def test_other_names_are_no_parts(name: str) -> None:
    assert part_of(name) is None
