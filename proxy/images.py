"""Pictures are judged by their header and their ends before any stage decodes them.

Owns the allowed formats, the pixel limit and the truncation check; a few milliseconds at most for a sound picture.
"""

from __future__ import annotations

import io
import warnings

# The two plugins are imported for their registration: without them the first such picture imports all of Pillow's.
from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401

from epd_serve.errors import RequestError

# What Pillow decodes in its own memory-safe loaders; EPS, PDF and the like run interpreters.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Our own limit is enforced on the header; Pillow's warning about it is noise.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def inspect_picture(data: bytes, *, param: str, max_pixels: int) -> tuple[str, int]:
    """Check a picture.

    Args:
        data: the encoded file. param: the field to name in errors. max_pixels: limit of width x height.

    Returns:
        (MIME type, pixels). Pixels of the first frame.

    Raises:
        RequestError: not a picture, of a format not allowed, too many pixels, or broken.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"{param}: {error} (limit {max_pixels:,} pixels).", param=param, code="too_many_pixels"
        ) from None
    except Exception as error:  # Pillow raises whatever a broken file leads its plugins to
        raise _invalid(param, f"not a readable picture (accepted: {', '.join(FORMATS)})") from error
    with picture:
        width, height = picture.size
        if width * height > max_pixels:
            raise RequestError(
                f"{param}: the picture has {width}x{height} = {width * height:,} pixels, the limit is {max_pixels:,}.",
                param=param,
                code="too_many_pixels",
            )
        if width == 0 or height == 0:
            raise _invalid(param, f"the picture has {width}x{height} pixels")
        mime = Image.MIME[picture.format or ""]
        try:
            _refuse_truncated(picture, data)
        except Exception as error:
            raise _invalid(param, f"the picture is corrupt or truncated ({error})") from error
    return mime, width * height


def _refuse_truncated(picture: Image.Image, data: bytes) -> None:
    """Raise what Pillow raises when the file is cut short; decode only where its end does not prove it whole."""
    if picture.format == "PNG":
        picture.verify()  # walks the chunks and their CRCs, decodes nothing
        return
    # After the last start-of-scan marker, 0xFF is stuffed: an end-of-image marker there is a real one.
    if picture.format in ("JPEG", "MPO") and data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda"):
        return
    if picture.format == "WEBP" and len(data) >= 8 + int.from_bytes(data[4:8], "little"):
        return
    if picture.format in ("JPEG", "MPO"):
        picture.draft("RGB", (picture.width // 8, picture.height // 8))
    picture.load()


def _invalid(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: {what}.", param=param, code="invalid_image")
