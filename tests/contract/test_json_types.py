"""Which JSON an annotation lets pass: no type is missing that pydantic would take."""

from __future__ import annotations

import pytest

from tests.contract.json_types import json_types


@pytest.mark.parametrize(
    ("annotation", "letters"),
    [
        ("list[int] | None", "l"),
        ("str | list[str] | None", "ls"),
        ("list[ours.Tool] | None", "L"),
        ("list[ours.Tool | Theirs]", "l"),
        ("ours.Tool | dict[str, Any] | None", "o"),
        ("Literal['none'] | ours.Tool", "os"),
        ("Annotated[Optional['dict[str, int]'], Field()]", "o"),
        ("Union[bool, Iterable[str]]", "lns"),
        ("Theirs | ours.Tool", ""),
        ("Any", ""),
        ("int | None", ""),
        ("Literal['a', 'b']", ""),
    ],
)
def test_letters_of_an_annotation(annotation: str, letters: str) -> None:
    assert json_types(annotation, lambda name: name.startswith("ours.")) == letters
