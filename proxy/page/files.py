"""The page's files and the demo's pictures, as they lie in the package: those that are there by name, and no others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import xxhash

import epd_serve

STATIC = Path(__file__).with_name("static")
SAMPLES = Path(epd_serve.__file__).with_name("demo") / "samples"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


class File(NamedTuple):
    """`tag`: changes with its content, for HTTP's `ETag`."""

    content: bytes
    media_type: str
    tag: str


@functools.cache
def files() -> dict[str, File]:
    """By name: those of the page as they are called, pictures as `samples/NAME`. Read once."""
    there = {path.name: path for path in STATIC.iterdir()}
    there |= {f"samples/{path.name}": path for path in SAMPLES.iterdir()}
    return {name: _read(path) for name, path in sorted(there.items()) if path.suffix in TYPES}


def samples() -> list[str]:
    """Names of the demo's pictures, as of `files`."""
    return [name for name in files() if name.startswith("samples/")]


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, TYPES[path.suffix], f'"{xxhash.xxh3_64_hexdigest(content)}"')
