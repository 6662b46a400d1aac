"""Containers without an image or a sound in them: headers only, as their formats define them."""

from __future__ import annotations

import io
import struct
import wave


def wav(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(1)
        out.setframerate(rate)
        out.writeframes(bytes(int(seconds * rate)))
    return file.getvalue()


def flac(samples: int, rate: int) -> bytes:
    packed = rate << 44 | 1 << 41 | 15 << 36 | samples
    return b"fLaC" + b"\x80\x00\x00\x22" + bytes(10) + packed.to_bytes(8, "big") + bytes(16)


def ogg(samples: int, first_packet: bytes) -> bytes:
    def page(granule: int, packet: bytes) -> bytes:
        return b"OggS\0\0" + struct.pack("<qIIIBB", granule, 1, 0, 0, 1, len(packet)) + packet

    return page(0, first_packet) + page(samples, b"x")


def mp3(size: int, *, tag_frames: int | None = None, id3: int = 0) -> bytes:
    """MPEG 1 layer III, 44.1 kHz, 128 kbit/s."""
    prefix = b"ID3\4\0\0" + bytes([0, 0, id3 >> 7, id3 & 127]) + bytes(id3) if id3 else b""
    frame = b"\xff\xfb\x90\x00" + bytes(32)
    if tag_frames is not None:
        frame += b"Xing" + (1).to_bytes(4, "big") + tag_frames.to_bytes(4, "big")
    return prefix + frame + bytes(size - len(frame))


def avi(frames: int, frame_us: int, width: int, height: int) -> bytes:
    header = struct.pack("<14I", frame_us, 0, 0, 0, frames, 0, 1, 0, width, height, 0, 0, 0, 0)
    return b"RIFF" + bytes(4) + b"AVI LIST" + bytes(4) + b"hdrlavih" + struct.pack("<I", 56) + header


def box(kind: bytes, *content: bytes, long: bool = False) -> bytes:
    body = b"".join(content)
    if long:
        return struct.pack(">I4sQ", 1, kind, 16 + len(body)) + body
    return struct.pack(">I4s", 8 + len(body), kind) + body


def mp4(
    seconds: float, *, width: int = 64, height: int = 48, samples: tuple[tuple[int, int], ...] = (), wide: bool = False
) -> bytes:
    """A movie that claims `seconds`; `samples`: (count, milliseconds) pairs of its one track."""
    ms = int(1000 * seconds)
    if wide:
        clock = b"\1\0\0\0" + bytes(16) + struct.pack(">IQ", 1000, ms)
    else:
        clock = bytes(12) + struct.pack(">II", 1000, ms)
    table = bytes(4) + struct.pack(">I", len(samples)) + b"".join(struct.pack(">II", *pair) for pair in samples)
    media = box(b"mdia", box(b"mdhd", clock), box(b"minf", box(b"stbl", box(b"stts", table))))
    track = box(b"trak", box(b"tkhd", bytes(76) + struct.pack(">II", width << 16, height << 16)), media)
    content = box(b"mdat", bytes(40), long=wide)
    return box(b"ftyp", b"isom") + content + box(b"moov", box(b"mvhd", clock + bytes(80)), track)


def fragmented_mp4(seconds: float) -> bytes:
    clock = bytes(12) + struct.pack(">II", 1000, 0)
    length = box(b"mehd", bytes(4) + struct.pack(">I", int(1000 * seconds)))
    return box(b"ftyp", b"iso5") + box(b"moov", box(b"mvhd", clock), box(b"mvex", length)) + box(b"moof", bytes(8))


def element(kind: int, content: bytes, *, endless: bool = False) -> bytes:
    name = kind.to_bytes((kind.bit_length() + 7) // 8, "big")
    size = (1 << 56) - 1 if endless else len(content)
    return name + ((1 << 56) | size).to_bytes(8, "big") + content


def webm(
    ms: float,
    *,
    last_cluster_ms: int = 0,
    width: int = 64,
    height: int = 48,
    endless: bool = False,
    width_bytes: int = 2,
) -> bytes:
    info = element(0x2AD7B1, (1_000_000).to_bytes(3, "big")) + element(0x4489, struct.pack(">d", ms))
    video = element(0xE0, element(0xB0, width.to_bytes(width_bytes, "big")) + element(0xBA, height.to_bytes(2, "big")))
    cluster = element(0x1F43B675, element(0xE7, last_cluster_ms.to_bytes(4, "big")) + element(0xA3, bytes(9)))
    parts = element(0x1549A966, info) + element(0x1654AE6B, element(0xAE, video)) + cluster
    return element(0x1A45DFA3, b"") + element(0x18538067, parts, endless=endless)
