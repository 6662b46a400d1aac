"""Video and audio are judged by what their container says, before any stage decodes them.

Owns the limits on a clip's length, on its frames' size, and on how many of them a stage is asked to decode. What a
container says can be wrong, and some say nothing: then the limit on bytes is the bound. Reading containers is
`proxy/media/containers.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from epd_serve.errors import RequestError
from proxy.media.containers import read_clip

USUAL_FRAMES = 32
"""That vLLM samples where a request asks for no other number (`multimodal/media/video.py`)."""


def inspect_clip(data: bytes, *, param: str, max_s: float, max_pixels: int) -> int | None:
    """Check a clip.

    Args:
        data: the file. param: the field to name in errors. max_s: seconds. max_pixels: width x height of a frame.

    Returns:
        Pixels of a frame, where the container says.

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
    return clip.pixels


def frames_asked(options: Mapping[str, object], max_frames: int) -> int:
    """Frames of a video that a stage is to decode, by the request's `media_io_kwargs`. Loaders that sample by time
    (Qwen3-VL's) have a limit of their own and heed `max_frames`.

    Raises:
        RequestError: more than `max_frames`, or all of them (-1), of which nobody knows how many there are.
    """
    media = options.get("media_io_kwargs")
    video = media.get("video") if isinstance(media, Mapping) else None
    if not isinstance(video, Mapping):
        return min(USUAL_FRAMES, max_frames)
    for name in ("num_frames", "max_frames"):
        frames = video.get(name, 1)
        if not isinstance(frames, int) or isinstance(frames, bool) or not 0 < frames <= max_frames:
            where = f"media_io_kwargs.video.{name}"
            raise RequestError(f"{where} must be from 1 to {max_frames}.", param=where, code="too_many_frames")
    return int(video.get("num_frames", min(USUAL_FRAMES, max_frames)))
