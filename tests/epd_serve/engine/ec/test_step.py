"""What a request of vLLM says about itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.ec.step import (
    item_keys,
    items_ahead,
    must_not_recompute,
    not_encoded,
    proxy_request_id,
    to_encode_again,
)


@pytest.mark.parametrize(
    ("vllm", "proxy"),
    [
        ("chatcmpl-7f3a9c-1a2b3c4d", "7f3a9c"),
        ("cmpl-7f3a9c-0-1a2b3c4d", "7f3a9c-0"),
        ("2_chatcmpl-7f3a9c-1a2b3c4d", "7f3a9c"),
        ("chatcmpl-0b5e0e3e-8d0c-4a53-9a3e-2f1d6c7b8a90-1a2b3c4d", "0b5e0e3e-8d0c-4a53-9a3e-2f1d6c7b8a90"),
        ("resp_7f3a9c_0-1a2b3c4d", "7f3a9c"),
        ("resp_7f3a9c_0", "7f3a9c"),
        ("chatcmpl-7f3a9c", "7f3a9c"),  # 0.23 appends nothing
        ("req-of-an-operator", "req-of-an-operator"),
        ("", ""),
    ],
)
def test_the_proxys_id_is_found_in_vllms(vllm: str, proxy: str) -> None:
    assert proxy_request_id(vllm) == proxy


def request(**extra: Any) -> Any:
    feature = lambda key, offset: SimpleNamespace(  # noqa: E731
        identifier=key, mm_position=SimpleNamespace(offset=offset, length=10)
    )
    return SimpleNamespace(
        mm_features=[feature("a", 0), feature("b", 10)], sampling_params=SimpleNamespace(extra_args=extra or None)
    )


def test_items_that_the_prefill_has_passed_are_not_needed() -> None:
    assert item_keys(request()) == ["a", "b"]
    assert [item.identifier for item in items_ahead(request(), 10)] == ["b"]
    assert items_ahead(request(), 20) == []


def test_xargs_are_read_and_nonsense_is_not() -> None:
    said = request(epd_missing="a,,b", epd_on_missing="fail", epd_encode_again="b")
    assert (not_encoded(said), to_encode_again(said), must_not_recompute(said)) == (["a", "b"], ["b"], True)
    assert not_encoded(request(epd_missing="*")) == ["a", "b"]
    odd = request(epd_missing=3, epd_on_missing="FAIL")
    assert (not_encoded(odd), must_not_recompute(odd)) == ([], False)
    assert not must_not_recompute(request())
    assert not must_not_recompute(SimpleNamespace(sampling_params=None))  # type: ignore[arg-type]
