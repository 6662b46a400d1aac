"""Video and audio are judged by what their container says, before any stage decodes them.

Owns the limits on a clip's length and on its frames' size. What a container says can be wrong, and some say nothing:
then the limit on bytes is the bound. Reading containers is `proxy/containers.py`'s.
"""

from __future__ import annotations

from epd_serve.errors import RequestError
from proxy.containers import read_clip


def inspect_clip(data: bytes, *, param: str, max_s: float, max_pixels: int) -> None:
    """Check a clip.

    Args:
        data: the file. param: the field to name in errors. max_s: seconds. max_pixels: width x height of a frame.

    Raises:
        RequestError: longer, or of larger frames.
    """
    clip = read_clip(data)
    if clip.duration_s is not None and clip.duration_s > max_s:
        raise RequestError(
            f"{param}: {clip.duration_s:.1f} s long, the limit is {max_s:g} s.", param=param, code="media_too_long"
        )
    if clip.pixels is not None and clip.pixels > max_pixels:
        raise RequestError(
            f"{param}: frames of {clip.pixels:,} pixels, the limit is {max_pixels:,}.",
            param=param,
            code="too_many_pixels",
        )
