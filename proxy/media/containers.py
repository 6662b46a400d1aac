"""Video and audio are judged by what their container says, before any stage decodes them. Pure; decodes nothing.

Owns the limits on a clip's length, on its frames' size, and on how many of them a stage is asked to decode. What a
container says can be wrong, and some say nothing: then the limit on bytes is the bound. Where a header and the bytes
behind it both say how long a clip is, the longer counts. PyAV would do it, but vLLM brings it with an extra only, and
FFmpeg's parsers would meet what clients send in the process that serves all of them.

MP4 and its kin (ISO 14496-12), Matroska and WebM (RFC 9559), and WAV are made of parts, (name, size, content), some of
which hold others; they differ in how a part's head reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from epd_serve.errors import RequestError
from proxy.config.limits import MediaLimits
from proxy.errors import media_refused

MAX_PARTS = 20_000
"""Parts of one file that are looked at: a file of nothing but tiny parts must not keep a thread busy for seconds."""
MAX_ENTRIES = 200_000
"""Entries of an MP4's table of durations: one each for the frames of the longest clip at a varying rate."""
USUAL_FRAMES = 32
"""Frames that vLLM samples where a request asks for no other number (`multimodal/media/video.py`)."""


@dataclass(frozen=True)
class Clip:
    """What is known of a video or an audio.

    Attributes:
        duration_s: seconds, or None where the container does not say. pixels: width x height of its frames, likewise.
    """

    duration_s: float | None = None
    pixels: int | None = None


def inspect_clip(data: bytes, param: str, limits: MediaLimits, *, frames: int) -> None:
    """Check a clip.

    Args:
        data: the file. param: the field to name in errors. frames: of a video, that a stage is to decode; 0: an audio.

    Raises:
        RequestError: longer than the limit, of larger frames, or of more pixels in all.
    """
    clip = read_clip(data)
    most_s = limits.max_video_s if frames else limits.max_audio_s
    if (clip.duration_s or 0.0) > most_s:
        raise media_refused(param, f"{clip.duration_s:.1f} s long, the limit is {most_s:g} s", "media_too_long")
    for count, most in ((1, limits.max_pixels), (frames, limits.max_video_pixels)):
        if count * (clip.pixels or 0) > most:
            raise media_refused(param, f"{count} x {clip.pixels:,} pixels, the limit is {most:,}", "too_many_pixels")


def requested_frames(options: Mapping[str, object], max_frames: int) -> int:
    """Frames of a video that a stage is to decode, by the request's `media_io_kwargs`. Loaders that sample by time
    (Qwen3-VL's) have a limit of their own and heed `max_frames`.

    Raises:
        RequestError: more than `max_frames`, or all of them (-1), of which nobody knows how many there are.
    """
    media = options.get("media_io_kwargs")
    video = media.get("video") if isinstance(media, Mapping) else None
    if not isinstance(video, Mapping):
        video = {}
    for name in ("num_frames", "max_frames"):
        frames = video.get(name, 1)
        if not isinstance(frames, int) or isinstance(frames, bool) or not 0 < frames <= max_frames:
            where = f"media_io_kwargs.video.{name}"
            raise RequestError(f"{where} must be from 1 to {max_frames}.", param=where, code="too_many_frames")
    return int(video.get("num_frames", min(USUAL_FRAMES, max_frames)))


def read_clip(data: bytes) -> Clip:
    """What can be told of `data`; nothing of what is broken or unknown, which decoders refuse."""
    try:
        return next((read(data) for at, magic, read in FORMATS if data.startswith(magic, at)), Clip())
    except (struct.error, IndexError, ValueError, OverflowError, ZeroDivisionError):
        return Clip()


# --- what is made of parts ------------------------------------------------------------------------------------------

Head = Callable[[bytes, int, int], tuple[object, int, int]]
"""(name, where the content begins, its size) of the part at a place in something that ends at another place."""


def _parts(data: bytes, head: Head, holders: Container[object] = (), at: int = 0) -> Iterator[tuple[object, int, int]]:
    """(name, begin, end) of every part from `at` on and of those within the ones that hold others, in order. Ends at
    what is cut short, and after `MAX_PARTS`."""
    ends = [len(data)]
    for _ in range(MAX_PARTS):
        while ends and at >= ends[-1]:
            ends.pop()
        if not ends:
            return
        try:
            name, begin, size = head(data, at, ends[-1])
        except (struct.error, IndexError):
            return
        end = min(begin + size, ends[-1])
        yield name, begin, end
        at = end
        if name in holders:
            ends.append(end)
            at = begin


def _box(data: bytes, at: int, end: int) -> tuple[bytes, int, int]:
    """Of MP4. A size of 1 stands for one that follows, 0 and what is less than the head for the rest."""
    size, name = struct.unpack_from(">I4s", data, at)
    begin = at + 8
    if size == 1:
        (size,) = struct.unpack_from(">Q", data, begin)
        begin += 8
    return name, begin, at + size - begin if at + size >= begin else end


def _element(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Of Matroska: two numbers, of which an identifier keeps the mark of its length; a size of nothing but ones means
    the rest (a live stream)."""
    name, at, _ = _number(data, at)
    size, at, mark = _number(data, at)
    return name, at, end if size == 2 * mark - 1 else size - mark


def _number(data: bytes, at: int) -> tuple[int, int, int]:
    """(value with the mark of its length, where it ends, that mark): as many bytes as zeros lead it, and one more."""
    length = 9 - data[at].bit_length()
    return int.from_bytes(data[at : at + length], "big"), at + length, 1 << 7 * length


def _chunk(data: bytes, at: int, end: int) -> tuple[bytes, int, int]:
    """Of RIFF: of an even number of bytes."""
    name, size = struct.unpack_from("<4sI", data, at)
    return name, at + 8, size + size % 2


BOXES = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"mvex"})
FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")


def _mp4(data: bytes) -> Clip:
    durations: list[float] = []
    pixels: list[int] = []
    scale, movie_scale = 0, 0
    for name, at, end in _parts(data, _box, BOXES):
        if name in (b"mvhd", b"mdhd"):
            long = data[at] == 1
            scale, duration = struct.unpack_from(">IQ" if long else ">II", data, at + (20 if long else 12))
            movie_scale = scale if name == b"mvhd" else movie_scale
            if duration not in (0, (1 << (64 if long else 32)) - 1):
                durations.append(duration / scale)
        elif name == b"mehd":  # of a fragmented file, whose mvhd says 0
            duration = int.from_bytes(data[at + 4 : at + (12 if data[at] == 1 else 8)], "big")
            durations.append(duration / movie_scale)
        elif name == b"tkhd":  # width and height are the last fields, 16.16 each
            width, height = struct.unpack_from(">II", data, end - 8)
            pixels.append((width >> 16) * (height >> 16))
        elif name == b"stts":  # how long every sample lasts, (count, delta) each: what a decoder goes by
            (entries,) = struct.unpack_from(">I", data, at + 4)
            until = at + 8 + 8 * min(entries, (end - at - 8) // 8, MAX_ENTRIES)
            table = struct.iter_unpack(">II", memoryview(data)[at + 8 : until])
            durations.append(sum(count * delta for count, delta in table) / scale)
    return Clip(max(durations, default=None), max(pixels, default=0) or None)


CLUSTER, TIMESTAMP_SCALE, DURATION, WIDTH, HEIGHT, TIMESTAMP = 0x1F43B675, 0x2AD7B1, 0x4489, 0xB0, 0xBA, 0xE7
ELEMENTS = frozenset({0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE0})  # segment, info, tracks, track, video


def _matroska(data: bytes) -> Clip:
    known = {TIMESTAMP_SCALE: 1_000_000, WIDTH: 0, HEIGHT: 0}
    ticks: list[float] = [0.0]
    for name, at, end in _parts(data, _element, ELEMENTS):
        if name == DURATION:
            ticks += struct.unpack(">f" if end - at == 4 else ">d", data[at:end])
        elif name == CLUSTER:  # its first element says when it begins; a header may say less
            first, begin, size = _element(data, at, end)
            if first == TIMESTAMP:
                ticks.append(_unsigned(data, begin, begin + size))
        elif isinstance(name, int) and name in known:
            number = _unsigned(data, at, end)
            known[name] = number if name == TIMESTAMP_SCALE else max(known[name], number)
    seconds = max(ticks) * known[TIMESTAMP_SCALE] / 1e9
    return Clip(seconds if seconds > 0 else None, known[WIDTH] * known[HEIGHT] or None)


def _unsigned(data: bytes, at: int, end: int) -> int:
    """Of at most eight bytes, as the standard has it: one of millions of digits is more than anybody can print."""
    return int.from_bytes(data[at : min(end, at + 8)], "big")


def _wav(data: bytes) -> Clip:
    rate, frame_bytes = 0, 0
    for name, at, end in _parts(data, _chunk, at=12):
        if name == b"fmt ":
            rate, _, frame_bytes = struct.unpack_from("<IIH", data, at + 4)
        elif name == b"data":
            return Clip((end - at) / (rate * frame_bytes))
    return Clip()


# --- what is not ----------------------------------------------------------------------------------------------------


def _avi(data: bytes) -> Clip:
    at = data.index(b"avih", 12, 4096) + 8
    frame_us, _, _, _, frames, _, _, _, width, height = struct.unpack_from("<10I", data, at)
    return Clip(frame_us * frames / 1e6 or None, width * height or None)


def _flac(data: bytes) -> Clip:
    packed = int.from_bytes(data[18:26], "big")  # 20 bits of rate, 3 of channels, 5 of width, 36 of samples
    return Clip((packed & ((1 << 36) - 1)) / (packed >> 44) or None)


def _ogg(data: bytes) -> Clip:
    rate = 48_000 if data.startswith(b"OpusHead", 28) else 0  # behind a page header with one segment
    if data.startswith(b"\x01vorbis", 28):
        rate = int.from_bytes(data[40:44], "little")
    last = data.rfind(b"OggS")
    samples = int.from_bytes(data[last + 6 : last + 14], "little", signed=True)
    return Clip(samples / rate if samples > 0 else None)


LAYER_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
MP3_BITRATES = {  # kbit/s by (MPEG 1?, layer), ISO 11172-3 and 13818-3
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): LAYER_2,
    (False, 3): LAYER_2,
}
MP3_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}  # by version bits


def _mp3(data: bytes) -> Clip:
    at = 0
    if data[:3] == b"ID3":  # its length is written in bytes of seven bits
        at = 10 + (data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9])
    header = int.from_bytes(data[at : at + 4], "big")
    version, layer = header >> 19 & 3, 4 - (header >> 17 & 3)
    if header >> 21 != 0x7FF or version == 1 or layer == 4:
        return Clip()
    size_bits = 8 * (len(data) - at)
    tag = max(data.find(name, at, at + 64) for name in (b"Xing", b"Info"))
    if tag < 0 or not data[tag + 7] & 1:
        return Clip(size_bits / (1000 * MP3_BITRATES[version == 3, layer][header >> 12 & 15]))
    frames = int.from_bytes(data[tag + 8 : tag + 12], "big")
    samples = 384 if layer == 1 else 1152 if layer == 2 or version == 3 else 576
    # With a variable rate the first frame's says little; 320 kbit/s is the most, so this is the least.
    return Clip(max(frames * samples / MP3_RATES[version][header >> 10 & 3], size_bits / 320_000))


FORMATS: tuple[tuple[int, bytes, Callable[[bytes], Clip]], ...] = (
    (8, b"WAVE", _wav),
    (8, b"AVI ", _avi),
    (0, b"fLaC", _flac),
    (0, b"OggS", _ogg),
    (0, b"\x1a\x45\xdf\xa3", _matroska),
    *((4, name, _mp4) for name in FIRST_BOXES),
    (0, b"ID3", _mp3),
    (0, b"\xff", _mp3),
)
"""How to read a file that has these bytes at that place; the first that fits."""
