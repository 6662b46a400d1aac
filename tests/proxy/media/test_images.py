"""Images: what passes, what is refused, and how quickly."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epd_serve.errors import RequestError
from proxy.media.images import inspect_image
from tests.proxy.fakes import image_file

KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]


def photo(kind: str = "JPEG", size: tuple[int, int] = (96, 64), **options: object) -> bytes:
    """An image of noise, the same at each call: where a file is cut decides what its last bytes look like."""
    file = io.BytesIO()
    noise = random.Random(7).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def inspect(data: bytes, max_pixels: int = 36_000_000) -> tuple[str, tuple[int, int]]:
    return inspect_image(data, param="item", max_pixels=max_pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_sound_images_pass_with_their_type_and_size(kind: str) -> None:
    assert inspect(photo(kind)) == (f"image/{kind.lower()}", (96, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_images_cut_short_are_refused(kind: str, share: float) -> None:
    data = photo(kind)
    with pytest.raises(RequestError) as refused:
        inspect(data[: int(len(data) * share)])
    assert refused.value.param == "item" and refused.value.code == "invalid_image"


def test_a_gif_cut_at_a_byte_that_looks_like_its_trailer_is_refused() -> None:
    data = photo("GIF")
    cut = data.index(b";", len(data) // 2) + 1
    assert cut < len(data) and data[cut - 2 : cut] != b"\0;"
    with pytest.raises(RequestError, match="truncated"):
        inspect(data[:cut])


def test_progressive_jpegs_and_trailing_bytes_are_fine() -> None:
    whole = photo(progressive=True, quality=90)
    assert inspect(whole + b"\0" * 100)[1] == (96, 64)
    assert inspect(photo() + b"trailer \xff\xda of a camera")[1] == (96, 64)
    with pytest.raises(RequestError):
        inspect(whole[: len(whole) * 2 // 3])


def test_a_thumbnails_end_does_not_hide_a_cut_image() -> None:
    exif = Image.Exif()
    exif[0x010E] = "description"
    data = photo(exif=exif.tobytes() + b"\xff\xd8 thumb \xff\xd9")
    assert inspect(data)[1] == (96, 64)
    with pytest.raises(RequestError):
        inspect(data[: len(data) * 2 // 3])


def test_the_pixel_limit_is_inclusive() -> None:
    assert inspect(image_file(10, 10), max_pixels=100)[1] == (10, 10)
    with pytest.raises(RequestError, match="10x10 = 100 pixels, the limit is 99"):
        inspect(image_file(10, 10), max_pixels=99)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(KINDS), st.integers(0, 400))
def test_damage_never_raises_anything_but_a_request_error(noise: bytes, kind: str, at: int) -> None:
    data = image_file(16, 16, kind=kind)
    for broken in (noise, data[:at] + noise, data[:at] + noise + data[at + len(noise) :]):
        with suppress(RequestError):
            inspect(broken, max_pixels=10_000)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes) -> bytes:
    whole = image_file()
    return whole[:33] + b"".join(chunks) + whole[33:]  # behind IHDR


ZEROS = zlib.compress(bytes(256 << 20), 9)
BOMBS = {
    "an ICC profile": png_with(chunk(b"iCCP", b"x\0\0" + ZEROS)),
    "a text": png_with(chunk(b"zTXt", b"x\0\0" + ZEROS)),
    "texts": png_with(*[chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1_000_000), 9))] * 200),
    "a million chunks": png_with(chunk(b"abCd", b"") * 1_000_000),
    "a WebP of 268 megapixels": photo("WEBP")[:8]
    + b"WEBPVP8X"
    + struct.pack("<IBxxx", 10, 0)
    + (16382).to_bytes(3, "little") * 2,
    "a JPEG of a thousand scans": photo().replace(b"\xff\xd9", b"\xff\xda\0\x0c" * 1000 + b"\xff\xd9"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_much_is_refused_and_not_unpacked(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refused:
            inspect(BOMBS[name])
        assert refused.value.code in ("invalid_image", "too_many_pixels")
        assert tracemalloc.get_traced_memory()[1] < len(BOMBS[name]) + (80 << 20)  # Pillow unpacks 64 MiB of text
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "GIF", "JPEG", "PNG", "WEBP"])
def test_a_whole_image_is_judged_without_being_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded")

    whole = photo(kind)
    for plugin in (Image.Image, *{type(Image.open(io.BytesIO(photo(one)))) for one in KINDS}):
        monkeypatch.setattr(plugin, "load", never)
    assert inspect(whole)[1] == (96, 64)
