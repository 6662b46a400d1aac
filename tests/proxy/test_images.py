"""Pictures: what passes, what is refused, and how quickly."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epd_serve.errors import RequestError
from proxy.images import inspect_picture
from tests.proxy.fakes import picture

KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]


def photo(kind: str = "JPEG", size: tuple[int, int] = (96, 64), **options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 90).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def inspect(data: bytes, max_pixels: int = 36_000_000) -> tuple[str, int]:
    return inspect_picture(data, param="item", max_pixels=max_pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_sound_pictures_pass_with_their_type_and_pixels(kind: str) -> None:
    assert inspect(photo(kind)) == (f"image/{kind.lower()}", 96 * 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_pictures_cut_short_are_refused(kind: str, share: float) -> None:
    data = photo(kind)
    with pytest.raises(RequestError) as refused:
        inspect(data[: int(len(data) * share)])
    assert refused.value.param == "item" and refused.value.code == "invalid_image"


def test_progressive_jpegs_and_trailing_bytes_are_fine() -> None:
    whole = photo(progressive=True, quality=90)
    assert inspect(whole + b"\0" * 100)[1] == 96 * 64
    assert inspect(photo() + b"trailer \xff\xda of a camera")[1] == 96 * 64
    with pytest.raises(RequestError):
        inspect(whole[: len(whole) * 2 // 3])


def test_a_thumbnails_end_does_not_hide_a_cut_picture() -> None:
    exif = Image.Exif()
    exif[0x010E] = "description"
    data = photo(exif=exif.tobytes() + b"\xff\xd8 thumb \xff\xd9")
    assert inspect(data)[1] == 96 * 64
    with pytest.raises(RequestError):
        inspect(data[: len(data) * 2 // 3])


def test_the_pixel_limit_is_inclusive() -> None:
    assert inspect(picture(10, 10), max_pixels=100)[1] == 100
    with pytest.raises(RequestError, match="10x10 = 100 pixels, the limit is 99"):
        inspect(picture(10, 10), max_pixels=99)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(KINDS), st.integers(0, 400))
def test_damage_never_raises_anything_but_a_request_error(noise: bytes, kind: str, at: int) -> None:
    data = picture(16, 16, kind=kind)
    for broken in (noise, data[:at] + noise, data[:at] + noise + data[at + len(noise) :]):
        with suppress(RequestError):
            inspect(broken, max_pixels=10_000)
