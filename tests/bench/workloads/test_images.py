"""Images: drawn alike everywhere, as large as photographs, kept on disk."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
import statistics
from pathlib import Path

import pytest
from PIL import Image

from bench.workloads import images as images_module
from bench.workloads.images import Images, default_cache, encode, render
from bench.workloads.requests import ImageRef
from epd_serve.errors import ConfigError

SMALL = ImageRef(60, 40, 5)


def bits_per_pixel(width, height, count):
    return statistics.fmean(len(encode(render(seed, width, height))) * 8 / width / height for seed in range(count))


def test_pixels_follow_from_seed_and_size():
    first, again, other = (render(seed, 96, 64).tobytes() for seed in (1, 1, 2))

    assert first == again != other


def test_pixels_are_the_same_on_every_machine():
    assert hashlib.sha256(render(7, 96, 64).tobytes()).hexdigest()[:16] == "d13dbfcd26b05cf3"


@pytest.mark.parametrize(("width", "height"), [(320, 240), (802, 652), (1280, 720)])
def test_pictures_are_as_large_as_photographs(width, height):
    """JPEG photographs of quality 85 have about 2 bits a pixel; noise has over 6, a flat picture 0.1."""
    assert 1.2 < bits_per_pixel(width, height, 4) < 3.2


def test_pictures_differ_in_size_on_the_wire():
    sizes = [len(encode(render(seed, 320, 240))) for seed in range(12)]

    assert max(sizes) > 1.3 * min(sizes)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 300), (7, 3), (513, 40)])
def test_any_size_can_be_drawn(width, height):
    assert render(1, width, height).size == (width, height)


def test_bytes_are_of_the_size_that_was_asked_for(tmp_path):
    with Image.open(io.BytesIO(Images(tmp_path).data(SMALL))) as picture:
        assert (picture.format, picture.size) == ("JPEG", (60, 40))


def test_a_picture_is_drawn_once(tmp_path, monkeypatch):
    first = Images(tmp_path).data(SMALL)
    monkeypatch.setattr(images_module, "render", None)

    assert Images(tmp_path).data(SMALL) == first
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".jpeg"]


def test_a_data_url_carries_the_same_bytes(tmp_path):
    head, _, body = Images(tmp_path).data_url(SMALL).partition(",")

    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(body) == Images(tmp_path).data(SMALL)


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"--cache .*file/in.*: Not a directory"):
        Images(tmp_path / "file" / "in").file(SMALL)


def test_a_full_disk_is_named_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(ConfigError, match="No space left on device"):
        Images(tmp_path).file(SMALL)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_cache_lies_where_caches_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "epd-serve" / "pictures"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(default_cache()) == "/home/somebody/.cache/epd-serve/pictures"
