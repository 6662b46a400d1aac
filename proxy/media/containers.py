"""How long a clip is and how large its frames are, by its container's headers. Pure; decodes nothing.

WAV, FLAC, Ogg, MP3 and AVI are read here, MP4 and its kin in `proxy/media/mp4.py`, Matroska and WebM in
`proxy/media/matroska.py`. Where a header and the bytes behind it both say how long a clip is, the longer counts.
"""

from __future__ import annotations

import struct

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
