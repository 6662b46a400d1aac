"""A host of pictures: `/small/SEED.png` at once, `/large/SEED.bmp?rate=BYTES` of 32 MiB, so many bytes a second."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from urllib.parse import parse_qs, urlsplit

from PIL import Image

SIDE = 3342
PIECE_BYTES = 64 << 10
START_S = 60.0


def large_picture() -> bytearray:
    """A BMP of 24 bits, all zero."""
    row_bytes = (SIDE * 3 + 3) // 4 * 4
    size = 54 + row_bytes * SIDE
    head = struct.pack("<2sIHHI", b"BM", size, 0, 0, 54)
    head += struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, row_bytes * SIDE, 2835, 2835, 0, 0)
    return bytearray(head) + bytes(row_bytes * SIDE)


def small_picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (seed % 256, seed // 256 % 256, 7)).save(file, "PNG")
    return file.getvalue()


@contextmanager
def media_server() -> Iterator[str]:
    """Its URL. In a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_main, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(START_S), "the media server did not start"
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join(START_S)


def _main(pipe: Connection) -> None:
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    asyncio.run(_serve(pipe))


def _end_with(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


async def _serve(pipe: Connection) -> None:
    large = large_picture()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
            url = urlsplit(line)
            seed = int(url.path.rpartition("/")[2].partition(".")[0])
            if url.path.startswith("/small"):
                pieces, rate = (small_picture(seed),), float("inf")
            else:
                # A head of its own, the rest everybody's: copies of 32 MiB would stall whoever asks for a small one.
                head = bytearray(large[:PIECE_BYTES])
                head[54:62] = seed.to_bytes(8, "little")
                pieces, rate = (head, memoryview(large)[PIECE_BYTES:]), float(parse_qs(url.query)["rate"][0])
            size_bytes = sum(map(len, pieces))
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size_bytes)
            begun, sent = asyncio.get_running_loop().time(), 0
            for piece in pieces:
                for at in range(0, len(piece), PIECE_BYTES):
                    writer.write(piece[at : at + PIECE_BYTES])
                    await writer.drain()
                    sent += PIECE_BYTES
                    await asyncio.sleep(max(0.0, begun + sent / rate - asyncio.get_running_loop().time()))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever fetches has given up
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()
