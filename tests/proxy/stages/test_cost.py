"""Estimated costs: tokens of items and prompts."""

from __future__ import annotations

from typing import Any

from proxy.fields.parts import MediaRef
from proxy.media.loader import LoadedItem
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.cost import prompt_tokens


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
