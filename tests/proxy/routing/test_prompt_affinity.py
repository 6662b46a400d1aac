"""What shares a prefix cache: turns of a conversation do, other people's and other images' do not."""

from __future__ import annotations

from typing import Any

from proxy.routing.prompt_affinity import LEADING_CHARACTERS, prompt_affinity

SYSTEM = {"role": "system", "content": "be brief"}


def talk(*messages: Any, **more: Any) -> str:
    return prompt_affinity({"model": "m", "messages": list(messages), **more})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_later_turn_has_the_affinity_of_the_first() -> None:
    first = talk(SYSTEM, user("hello"))
    assert first == talk(SYSTEM, user("hello"), {"role": "assistant", "content": "hi"}, user("go on"), temperature=0)
    assert first not in (talk(SYSTEM, user("bye")), talk(user("hello")), talk(SYSTEM, user("hello"), cache_salt="x"))


def test_images_count_by_their_keys() -> None:
    def imaged(key: str, url: str) -> str:
        return talk(user([{"type": "image_url", "image_url": {"url": url}, "uuid": key}]))

    assert imaged("a", "data:one") == imaged("a", "data:two") != imaged("b", "data:one")


def test_responses_count_by_what_they_begin_with() -> None:
    first = prompt_affinity({"instructions": "be kind", "input": [user("hello")]})
    assert first == prompt_affinity({"instructions": "be kind", "input": [user("hello"), user("more")]})
    assert first != prompt_affinity({"instructions": "be kind", "input": [user("bye")]})
    assert first != prompt_affinity({"input": [user("hello")]})
    assert prompt_affinity({"input": "hello"}) != prompt_affinity({"input": "bye"})


def test_plain_prompts_count_by_their_beginning() -> None:
    beginning = "x" * LEADING_CHARACTERS
    assert prompt_affinity({"prompt": beginning + "a"}) == prompt_affinity({"prompt": beginning + "b"})
    assert prompt_affinity({"prompt": "a" + beginning}) != prompt_affinity({"prompt": "b" + beginning})
    assert prompt_affinity({"prompt": [[1, 2], [3]]}) and prompt_affinity({"messages": ["odd", None]})
    assert prompt_affinity({"prompt": "\ud800"})
