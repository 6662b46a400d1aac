"""The user's own pictures and requests."""

from __future__ import annotations

import itertools
import json

import pytest
from PIL import Image

from bench.workloads.generate import Words
from bench.workloads.workload import read_dataset, repeated
from epd_serve.errors import ConfigError


@pytest.fixture
def shown(tmp_path):
    """A directory with a JPEG that calls itself PNG, and a PNG."""
    folder = tmp_path / "shown"
    folder.mkdir()
    Image.new("RGB", (30, 20)).save(folder / "a.png", "JPEG")
    Image.new("RGB", (10, 40)).save(folder / "b.png", "PNG")
    return folder


def read(tmp_path, shown, *rows):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_dataset(shown, file, Words())


def test_lines_of_aisbench_are_read(tmp_path, shown):
    first, second = read(
        tmp_path,
        shown,
        {
            "type": "image",
            "path": ["a.png", "b.png"],
            "question": "Which two?",
            "answer": "",
            "max_out_len": 5,
            "timestamp": 250,
        },
        {"type": "image", "path": [], "question": "No picture here", "timestamp": 1000},
    )

    assert (first.text, first.text_tokens, first.max_tokens, first.arrival_s) == ("Which two?", 2, 5, 0.25)
    assert (second.images, second.max_tokens, second.arrival_s) == ((), 64, 1.0)


def test_size_and_format_are_those_of_the_bytes(tmp_path, shown):
    (request,) = read(tmp_path, shown, {"path": ["a.png", "b.png"], "question": "?"})

    assert [(one.width, one.height, one.format) for one in request.images] == [(30, 20, "jpeg"), (10, 40, "png")]
    assert all(one.path.is_absolute() for one in request.images)


def test_empty_lines_are_left_out_and_absolute_paths_are_taken(tmp_path, shown):
    found = read(tmp_path, shown, {"question": "one"}, "", {"question": "two", "path": [str(shown / "b.png")]})

    assert [len(request.images) for request in found] == [0, 1]


def test_a_longer_run_begins_again_and_times_go_on(tmp_path, shown):
    found = read(tmp_path, shown, *({"question": "q", "timestamp": ms} for ms in (0, 1000, 3000)))
    again = list(itertools.islice(repeated(found), 7))

    assert [request.arrival_s for request in again] == [0, 1, 3, 4.5, 5.5, 7.5, 9]
    assert len({request.id for request in again}) == 7


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json", "JSON is malformed"),
        ("[1]", "Expected `object`, got `array`"),
        ({"path": []}, "Object missing required field `question`"),
        ({"question": " "}, r"Expected `str` matching regex .* at `\$\.question`"),
        ({"question": "q", "path": "a.png"}, r"Expected `array`, got `str` - at `\$\.path`"),
        ({"question": "q", "path": [3]}, r"Expected `str`, got `int` - at `\$\.path\[0\]`"),
        ({"question": "q", "path": ["none.jpg"]}, r"image .*none\.jpg cannot be read"),
        ({"question": "q", "path": ["text.jpg"]}, r"image .*text\.jpg cannot be read"),
        ({"question": "q", "path": ["cut.jpg"]}, r"image .*cut\.jpg cannot be read"),
        ({"question": "q", "path": ["cut.png"]}, r"image .*cut\.png cannot be read"),
        ({"question": "q", "path": ["."]}, r"image .*shown cannot be read"),
        ({"question": "q", "path": ["a.ico"]}, r"image .*a\.ico is ICO: use one of jpeg"),
        ({"question": "q", "type": "video"}, r"Invalid enum value 'video' - at `\$\.type`"),
        ({"question": "q", "max_out_len": 0}, r"Expected `int` >= 1 - at `\$\.max_out_len`"),
        ({"question": "q", "max_out_len": True}, r"Expected `int`, got `bool` - at `\$\.max_out_len`"),
        ({"question": "q", "max_out_len": "64"}, r"Expected `int`, got `str` - at `\$\.max_out_len`"),
        ({"question": "q", "timestamp": -1}, r"Expected `float` >= 0.0 - at `\$\.timestamp`"),
        ({"question": "q", "timestamp": "soon"}, r"Expected `float \| null`, got `str` - at `\$\.timestamp`"),
        ({"question": "q"}, "`timestamp` has to be in all lines or in none"),
        ({"question": "q", "timestamp": 1}, "`timestamp` 1 is before the 5 of the line above"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_what_is_wrong(tmp_path, shown, row, says):
    (shown / "text.jpg").write_text("hello")
    for name in ("cut.jpg", "cut.png"):
        picture = shown / name
        Image.effect_noise((64, 64), 50).save(picture)
        picture.write_bytes(picture.read_bytes()[:600])
    Image.new("RGB", (16, 16)).save(shown / "a.ico")

    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:2: {says}"):
        read(tmp_path, shown, {"question": "fine", "timestamp": 5}, row)


def test_missing_files_are_named(tmp_path, shown):
    with pytest.raises(ConfigError, match=r"nowhere is not a directory of images"):
        read_dataset(tmp_path / "nowhere", tmp_path / "p.jsonl", Words())
    with pytest.raises(ConfigError, match=r"p\.jsonl cannot be read"):
        read_dataset(shown, tmp_path / "p.jsonl", Words())
    with pytest.raises(ConfigError, match="holds no request"):
        read(tmp_path, shown, "")
