"""Where prompts can be cut: equal beginnings have equal names, whatever follows, and nothing else has. And what prompts
cost."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from epd_serve.cache_ledger import unpacked
from proxy.fields.parts import MediaRef
from proxy.media.loader import LoadedItem
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.prompt import (
    CHUNK_CHARACTERS,
    FIRST_NODES,
    MAX_LEVELS,
    MAX_NODES,
    NO_NODES,
    prompt_nodes,
    prompt_tokens,
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def image(key: str, url: str = "data:image/png;base64,AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, "uuid": key}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def nodes(*messages: Any, **more: Any) -> tuple[int, ...]:
    return prompt_nodes({"model": "m", "messages": list(messages), **more}, {}).nodes


def test_a_later_turn_begins_with_all_places_of_the_earlier_one() -> None:
    first = [user([image("a"), text("what is this?")])]
    later = [*first, {"role": "assistant", "content": "a cat"}, user("and that?")]
    assert len(nodes(*first)) == 2 and len(nodes(*later)) == 4
    assert nodes(*later)[:2] == nodes(*first)


def test_media_count_by_key_and_its_bytes_do_not() -> None:
    assert nodes(user([image("a", "data:,1")])) == nodes(user([image("a", "data:,2")]))
    one, other = nodes(user([image("a"), text("x")])), nodes(user([image("b"), text("x")]))
    assert not set(one) & set(other)
    parted = nodes(user([image("a"), text("y")]))
    assert parted[0] == one[0] and parted[1] != one[1]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"cache_salt": "tenant"},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"thinking": False}},
        {"messages": [{"role": "system", "content": "hello"}]},
        {"messages": [user("hello!")]},
        {"messages": [user("hel"), user("lo")]},
        {"messages": [{"role": "user", "name": "Ann", "content": "hello"}]},
    ],
)
def test_what_changes_the_tokens_changes_the_names(other: dict[str, Any]) -> None:
    base = {"model": "m", "messages": [user("hello")]}
    assert not set(prompt_nodes(base, {}).nodes) & set(prompt_nodes({**base, **other}, {}).nodes)


def test_what_does_not_change_them_does_not() -> None:
    assert nodes(user("hello"), temperature=0.5, stream=True) == nodes(user("hello"))
    assert nodes(user("hello")) == nodes(user([text("hello")]))


def test_long_texts_are_cut_and_share_what_they_begin_with() -> None:
    long = "x" * CHUNK_CHARACTERS
    one = prompt_nodes({"prompt": long + "a"}, {})
    other = prompt_nodes({"prompt": long + "b"}, {})
    assert one.nodes[0] == other.nodes[0] and one.nodes[1] != other.nodes[1]
    assert one.tokens_after == (0.25, 0.0)


def test_tokens_after_a_place_count_text_by_length_and_media_by_size() -> None:
    base = {"messages": [user([text("four"), image("a"), text("x" * 400)])]}
    assert prompt_nodes(base, {"a": 1000.0}).tokens_after == pytest.approx((1100, 100, 0), abs=1)


def test_of_a_long_conversation_the_first_and_the_last_places_are_kept() -> None:
    messages = [user("x" * (4 * number)) for number in range(100)]
    whole = prompt_nodes({"messages": messages}, {})
    assert len(whole.nodes) == MAX_NODES == len(whole.tokens_after)
    assert whole.nodes[:FIRST_NODES] == nodes_of(messages[:FIRST_NODES]) and whole.nodes[-1] == nodes_of(messages)[-1]
    assert whole.tokens_after[FIRST_NODES - 1] > whole.tokens_after[FIRST_NODES] > whole.tokens_after[-1] == 0


def nodes_of(messages: list[Any]) -> tuple[int, ...]:
    return prompt_nodes({"messages": messages}, {}).nodes


def test_responses_are_prompts_too() -> None:
    whole = prompt_nodes({"instructions": "be kind", "input": [user("hello"), user("more")]}, {})
    assert whole.nodes[:1] == prompt_nodes({"instructions": "be kind", "input": [user("hello")]}, {}).nodes
    assert prompt_nodes({"input": "hello"}, {}).nodes


@pytest.mark.parametrize("odd", [{}, {"prompt": [[1, 2], [3]]}, {"prompt": ["a", "b"]}, {"prompt": [1]}, {"input": 7}])
def test_what_is_no_single_text_has_no_places(odd: dict[str, Any]) -> None:
    assert prompt_nodes(odd, {}) is NO_NODES


def test_odd_content_is_no_error() -> None:
    assert nodes(user(None), user(["a", 5, {"type": "x"}]), {"role": "tool", "content": "\ud800"}, 5)


def test_the_stages_get_them_as_a_word() -> None:
    made = prompt_nodes({"messages": [user("hello"), user("more")]}, {})
    assert tuple(unpacked(base64.b64decode(made.word))) == made.nodes


# --- what prompts cost -----------------------------------------------------------------------------------------------


def item(key: str, tokens: float) -> LoadedItem:
    return LoadedItem(MediaRef(0, 0, key, "x", "x"), "", "key", tokens)


def request(**body: Any) -> ParsedRequest:
    return ParsedRequest(Endpoint.CHAT, {"model": "m", **body}, "m", False, (), None)


def said(content: Any) -> ParsedRequest:
    return request(messages=[{"role": "user", "content": content}])


def test_a_prompt_costs_its_text_and_its_items_but_not_the_data_of_its_media() -> None:
    text, tool = "x" * 4000, {"type": "function", "function": {"name": "f" * 400}}
    plain = prompt_tokens(said(text))
    assert 1000 <= plain <= 1010
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    imaged = prompt_tokens(said([{"type": "text", "text": text}, url]), [item("image_url", 50)])
    assert plain + 50 <= imaged <= plain + 60
    assert prompt_tokens(request(messages=[], tools=[tool])) >= 100


def test_prompts_of_completions_are_counted_in_every_form() -> None:
    assert prompt_tokens(request(prompt="x" * 400)) == 100
    assert prompt_tokens(request(prompt=["x" * 400, "x" * 400])) == 200
    assert prompt_tokens(request(prompt=list(range(77)))) == 77
    assert prompt_tokens(request(prompt=[list(range(7)), list(range(8))])) == 15


def test_scripts_whose_characters_are_tokens_cost_more_and_nothing_costs_nothing() -> None:
    assert prompt_tokens(request(prompt="好" * 400)) == 300
    assert prompt_tokens(request(prompt="\ud800")) == 1
    assert prompt_tokens(request(messages=None)) == 1


def test_what_no_stage_could_walk_is_refused() -> None:
    for levels, fits in ((MAX_LEVELS - 5, True), (MAX_LEVELS + 5, False)):
        content: Any = "x"
        for _ in range(levels):
            content = [content]
        if fits:
            prompt_tokens(said(content))
        else:
            with pytest.raises(RecursionError):
                prompt_tokens(said(content))
