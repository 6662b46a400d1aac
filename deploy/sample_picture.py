"""A small PNG for the curl that is printed at start: a red circle on white, drawn without any picture library."""

from __future__ import annotations

import base64
import struct
import zlib

SIDE_PX = 128
RADIUS_PX = 26
RED, WHITE = bytes((220, 40, 40)), bytes((255, 255, 255))


def sample_picture() -> bytes:
    """PNG file of 128 x 128 pixels, 8-bit RGB, about 400 bytes."""
    centre = (SIDE_PX - 1) / 2
    rows = b"".join(
        b"\0"
        + b"".join(
            RED if (x - centre) ** 2 + (y - centre) ** 2 < RADIUS_PX**2 else WHITE for x in range(SIDE_PX)
        )
        for y in range(SIDE_PX)
    )
    header = struct.pack(">IIBBBBB", SIDE_PX, SIDE_PX, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def sample_data_url() -> str:
    return "data:image/png;base64," + base64.b64encode(sample_picture()).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
