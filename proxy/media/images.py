"""Images are judged by their header and their ends before any stage decodes them.

Owns the allowed formats, the pixel limit and the truncation check; a few milliseconds at most for a sound image.
Stages decode the first frame alone (vLLM, `multimodal/media/image.py`), so its pixels are what decoding costs them;
what costs without pixels, parts by the thousand and progressive scans by the hundred, is counted here.
"""

from __future__ import annotations

import io
import warnings

# The two plugins are imported for their registration: without them the first such image imports all of Pillow's.
from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin  # noqa: F401

from epd_serve.errors import RequestError
from proxy.errors import media_refused
from proxy.media.containers import MAX_PARTS

# What Pillow decodes in its own memory-safe loaders; EPS, PDF and the like run interpreters.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_SCANS = 100
"""Scans of a JPEG: each goes over all pixels once more. Encoders make about ten."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Our own limit is enforced on the header; Pillow's warning about it is noise.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
Image.preinit()  # the other formats, which the first image of all would import


def inspect_image(data: bytes, *, param: str, max_pixels: int) -> tuple[str, tuple[int, int]]:
    """Check an image.

    Args:
        data: the encoded file. param: the field to name in errors. max_pixels: limit of width x height.

    Returns:
        (MIME type, (width, height)). Pixels of the first frame.

    Raises:
        RequestError: not an image, of a format not allowed, too many pixels, or broken.
    """
    if data.startswith(PNG_SIGNATURE) and _png_chunks(data) > MAX_PARTS:
        raise _invalid(param, f"a PNG of more than {MAX_PARTS:,} chunks")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MAX_SCANS:
        raise _invalid(param, f"a JPEG of more than {MAX_SCANS} scans")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise media_refused(param, f"{error} (limit {max_pixels:,} pixels)", "too_many_pixels") from None
    except Exception as error:  # Pillow raises whatever a broken file leads its plugins to
        raise _invalid(param, f"not a readable image (accepted: {', '.join(FORMATS)})") from error
    with image:
        width, height = image.size
        if width * height > max_pixels:
            what = f"the image has {width}x{height} = {width * height:,} pixels, the limit is {max_pixels:,}"
            raise media_refused(param, what, "too_many_pixels")
        if width == 0 or height == 0:
            raise _invalid(param, f"the image has {width}x{height} pixels")
        mime = Image.MIME[image.format or ""]
        try:
            if not _is_whole(image, data):
                raise ValueError("it ends too early")
        except Exception as error:
            raise _invalid(param, f"the image is corrupt or truncated ({error})") from error
    return mime, (width, height)


def _is_whole(image: Image.Image, data: bytes) -> bool:
    """Whether the file is not cut short; raises what Pillow raises where that is found out by decoding. Decoded is only
    where neither its end nor its header tells, and what is small: the eighth of a JPEG, the bytes of a GIF's first
    frame."""
    match image.format:
        case "PNG":
            image.verify()  # walks the chunks and their CRCs, decodes nothing
            return True
        case "JPEG" | "MPO":
            # After the last start-of-scan marker, 0xFF is stuffed: an end-of-image marker there is a real one.
            if data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda"):
                return True
            if image.info.get("progressive"):  # its decoder holds every pixel, whatever size is asked of it
                return False
            image.draft("RGB", (image.width // 8, image.height // 8))
        case "WEBP" if len(data) >= 8 + int.from_bytes(data[4:8], "little"):
            return True
        case "TIFF":
            tags = image.tag_v2  # type: ignore[attr-defined]
            starts, sizes = ((tags.get(old) or tags.get(tiled) or ()) for old, tiled in ((273, 324), (279, 325)))
            ends = [start + size for start, size in zip(starts, sizes, strict=True)]
            return 0 < max(ends, default=0) <= len(data)
        case "BMP" if not image.info.get("compression"):
            row_bytes = (image.width * int.from_bytes(data[28:30], "little") + 31) // 32 * 4
            return int.from_bytes(data[10:14], "little") + row_bytes * image.height <= len(data)
        case "GIF" if data.rstrip(b"\0").endswith(b"\0;"):  # whatever precedes a trailer ends with an empty block
            return True
    image.load()
    return True


def _png_chunks(data: bytes) -> int:
    """How many chunks a PNG has, one more than `MAX_PARTS` at most."""
    at, count = len(PNG_SIGNATURE), 0
    while at + 8 <= len(data) and count <= MAX_PARTS:
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        count += 1
    return count


def _invalid(param: str, what: str) -> RequestError:
    return media_refused(param, what, "invalid_image")
