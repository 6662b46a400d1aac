"""Video and audio are judged by what their container says, before any stage decodes them. Pure; decodes nothing.

Owns the limits on a clip's length, on its frames' size, and on how many of them a stage is asked to decode. What a
container says can be wrong, and some say nothing: then the limit on bytes is the bound. WAV, FLAC, Ogg, MP3 and AVI are
read here, MP4 and its kin in `proxy/media/mp4.py`, Matroska and WebM in `proxy/media/matroska.py`. Where a header and
the bytes behind it both say how long a clip is, the longer counts.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from epd_serve.errors import RequestError
from proxy.media import matroska, mp4
from proxy.media.clip import MAX_PARTS, Clip

MP3_BITRATES = {  # kbit/s by (MPEG 1?, layer), ISO 11172-3 and 13818-3
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
MP3_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}  # by version bits

USUAL_FRAMES = 32
"""Frames that vLLM samples where a request asks for no other number (`multimodal/media/video.py`)."""


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


def requested_frames(options: Mapping[str, object], max_frames: int) -> int:
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


def read_clip(data: bytes) -> Clip:
    """What can be told of `data`; nothing of what is broken or unknown, which decoders refuse."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError, ZeroDivisionError):
        return Clip()


def _read(data: bytes) -> Clip:
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return Clip(_wav_s(data))
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return _avi(data)
    if data[:4] == b"fLaC":
        packed = int.from_bytes(data[18:26], "big")  # 20 bits of rate, 3 of channels, 5 of width, 36 of samples
        return Clip((packed & ((1 << 36) - 1)) / (packed >> 44) or None)
    if data[:4] == b"OggS":
        return Clip(_ogg_s(data))
    if data[:4] == matroska.MAGIC:
        return matroska.read(data)
    if data[4:8] in mp4.FIRST_BOXES:
        return mp4.read(data)
    if data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1] & 0xE0 == 0xE0):
        return Clip(_mp3_s(data))
    return Clip()


def _wav_s(data: bytes) -> float | None:
    at, rate, frame_bytes = 12, 0, 0
    for _ in range(MAX_PARTS):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            rate, _, frame_bytes = struct.unpack_from("<IIH", data, at + 12)
        elif name == b"data":
            return min(size, len(data) - at - 8) / (rate * frame_bytes)
        at += 8 + size + size % 2
    return None


def _avi(data: bytes) -> Clip:
    at = data.index(b"avih", 12, 4096) + 8
    frame_us, _, _, _, frames, _, _, _, width, height = struct.unpack_from("<10I", data, at)
    return Clip(frame_us * frames / 1e6 or None, width * height or None)


def _ogg_s(data: bytes) -> float | None:
    first = data[28 : 28 + 64]  # the first packet, behind a page header with one segment
    if first[:7] == b"\x01vorbis":
        rate = int.from_bytes(first[12:16], "little")
    elif first[:8] == b"OpusHead":
        rate = 48_000
    else:
        return None
    last = data.rfind(b"OggS")
    samples = int.from_bytes(data[last + 6 : last + 14], "little", signed=True)
    return samples / rate if samples > 0 else None


def _mp3_s(data: bytes) -> float | None:
    at = 0
    if data[:3] == b"ID3":  # its length is written in bytes of seven bits
        at = 10 + (data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9])
    header = int.from_bytes(data[at : at + 4], "big")
    version, layer = header >> 19 & 3, 4 - (header >> 17 & 3)
    if header >> 21 != 0x7FF or version == 1 or layer == 4:
        return None
    bitrate = 1000 * MP3_BITRATES[version == 3, layer][header >> 12 & 15]
    rate = MP3_RATES[version][header >> 10 & 3]
    samples = 384 if layer == 1 else 1152 if layer == 2 or version == 3 else 576
    tag = next((at + data[at : at + 64].index(name) for name in (b"Xing", b"Info") if name in data[at : at + 64]), 0)
    by_bytes = 8 * (len(data) - at) / bitrate
    if tag and data[tag + 7] & 1:
        frames = int.from_bytes(data[tag + 8 : tag + 12], "big")
        # With a variable rate the first frame's says little; 320 kbit/s is the most, so this is the least.
        return max(frames * samples / rate, 8 * (len(data) - at) / 320_000)
    return by_bytes
