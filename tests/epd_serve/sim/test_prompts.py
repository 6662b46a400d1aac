"""Tokens, media items and answers, as every stage must see them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.sim.choice import Choice
from epd_serve.sim.items import Item, item_of, picture_size
from epd_serve.sim.prompts import CHAT, COMPLETIONS, prompts_of
from epd_serve.sim.tokens import text_of, token_ids
from proxy.registry.feature_directory import placeholder_metadata
from tests.epd_serve.sim.served import data_url


def found(part: dict[str, object]) -> Item:
    item = item_of(part, 256)
    assert item is not None
    return item


@given(st.text())
def test_any_text_survives_its_tokens(text: str) -> None:
    assert text_of(token_ids(text)) == text


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_the_size_of_a_picture_is_read_from_its_header(kind: str) -> None:
    assert picture_size(data_url(kind, 280, 56)) == (56, 280)


def test_a_picture_has_a_token_per_28_by_28_pixels() -> None:
    item = found({"type": "image_url", "image_url": {"url": data_url("PNG", 280, 56)}, "uuid": "k"})
    assert (item.key, item.tokens, item.metadata) == ("k", 20, {"image_grid_thw": [[1, 4, 20]]})


def unfolded(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As the proxy sends it."""
    return dict(placeholder_metadata(metadata) or {})


@pytest.mark.parametrize("form", [dict, unfolded])
def test_metadata_in_place_of_a_picture_counts_the_same_tokens(form: Callable[[Any], dict[str, Any]]) -> None:
    item = found({"image_url": {"url": data_url("PNG", 280, 56)}, "uuid": "k"})
    placeholder = found({"type": "image_embeds", "image_embeds": form(item.metadata), "uuid": "k"})
    assert (placeholder.key, placeholder.tokens) == (item.key, item.tokens)
    assert item.has_media and not placeholder.has_media


@pytest.mark.parametrize("grid", [[], [1, 4], [[1, "x", 4]], "1 4 4", None])
def test_a_grid_that_is_none_has_the_profiles_tokens(grid: object) -> None:
    item = found({"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": "k"})
    assert item.tokens == 256


@pytest.mark.parametrize("source", ["data:image/png;base64,AAAA", "data:image/png;base64,####", "http://x/y", "x"])
def test_what_cannot_be_read_has_the_profiles_tokens(source: str) -> None:
    item = found({"image_url": source})
    assert item.tokens == 256 and item.key


def test_prompts_of_both_endpoints() -> None:
    parts = [{"type": "text", "text": "what is this"}, {"image_url": {"url": "x"}, "uuid": "k"}]
    (chat,) = prompts_of(CHAT, {"messages": [{"role": "user", "content": parts}]}, 256)
    assert chat.tokens == len(chat.ids) and [item.key for item in chat.items] == ["k"]
    ids = token_ids("and you?")
    two = prompts_of(COMPLETIONS, {"prompt": ["who", ids]}, 256)
    assert [one.text for one in two] == [b"who", b"and you?"]
    assert two[1] == prompts_of(COMPLETIONS, {"prompt": ids}, 256)[0]


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": "x"}, {"messages": [1]}])
def test_wrong_messages_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="message"):
        prompts_of(CHAT, body, 256)


@pytest.mark.parametrize("prompt", [None, [], [[]], {}, [1, "x"], [True], [-1]])
def test_wrong_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ValueError):
        prompts_of(COMPLETIONS, {"prompt": prompt}, 256)


def test_an_answer_ends_before_a_stop_text() -> None:
    whole = Choice(3, 0, limit=10, bounded=True)
    text = whole.text(10)
    stop = text[11:16]
    cut = Choice(3, 0, limit=10, bounded=True, stops=[stop, "never"])
    assert cut.text(cut.tokens) == text[: text.index(stop)]
    assert (cut.finish, cut.stop, whole.finish, whole.stop) == ("stop", stop, "length", None)
    assert cut.tokens < 10
    assert text_of(whole.token_id(number) for number in range(10)) == text
