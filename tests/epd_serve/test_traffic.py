"""Traffic in a file: read back as it was written, in order, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_serve.errors import ConfigError
from epd_serve.traffic import Item, Request, read_traffic, write_traffic

ROWS = [
    Request("a", 10.5, 120, 7, (Item(100, 280, 280, key="k", tiles=3),), session="s", cached_tokens=3),
    Request("b", 12.0, 4, 1),
]


def test_what_is_written_is_read_from_its_first_arrival_on(tmp_path: Path) -> None:
    write_traffic(tmp_path / "t", reversed(ROWS))
    first, second = read_traffic(tmp_path / "t")
    assert (first.at_s, second.at_s) == (0.0, 1.5) and first.items == ROWS[0].items and first.session == "s"
    assert (first.item_tokens, first.text_tokens, second.text_tokens) == (100, 20, 4)
    assert "cached_tokens" not in (tmp_path / "t").read_text().splitlines()[0], "what is 0 is left out"


def test_what_is_older_is_beside_it_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    write_traffic(tmp_path / "t.1", ROWS[:1])
    write_traffic(tmp_path / "t", ROWS[1:])
    with (tmp_path / "t").open("a") as file:
        file.write('{"id": "half')
    assert [one.id for one in read_traffic(tmp_path / "t")] == ["a", "b"]
    with (tmp_path / "t").open("a") as file:
        file.write('\n{"id": "c", "at_s": 13, "prompt_tokens": 1, "output_tokens": 1}\n')
    write_traffic(tmp_path / "t.1", [*ROWS, ROWS[1]])
    assert [one.id for one in read_traffic(tmp_path / "t")] == ["a", "b", "c"], (
        "as another one goes on; each is there once"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no request"),
        ('{"id": "a"}\n\n', r"t:1: Object missing required field `at_s`"),
        ('{"id": "a", "at_s": 0, "prompt_tokens": 0, "output_tokens": 1}\n', r"t:1: .*>= 1.*prompt_tokens"),
        ('{"id": "a", "at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "text": "x"}\n', "unknown field `text`"),
    ],
)
def test_what_is_no_traffic_is_refused_by_line_and_field(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_traffic(tmp_path / "t")
    with pytest.raises(ConfigError, match="No such file"):
        read_traffic(tmp_path / "none")
