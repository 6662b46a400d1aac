"""Media items of a chat request as simulated stages see them: key, tokens, metadata. Pure; nothing is decoded.

A picture has a token per 28x28 pixels, as with Qwen2-VL; its size is read from its file header. Items that came as
metadata say their size themselves, so every stage counts the same tokens. The bytes of a feature are made from its
key, so that whoever reads them can tell whose they are.
"""

from __future__ import annotations

import binascii
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from store.keys import part_of

PATCH_PIXELS = 14
MERGE = 2  # patches per token and side
_HEADER_BYTES = 64 << 10
_MEDIA = {"image_url": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}
_SUFFIX = "_embeds"


@dataclass(frozen=True)
class Item:
    """One item. `has_media`: it can be encoded here; else only its feature will do."""

    key: str
    tokens: int
    metadata: Mapping[str, Any]
    has_media: bool


def item_of(part: Mapping[str, Any], default_tokens: int) -> Item | None:
    """The item that a content part carries, None for text.

    Raises:
        ValueError: a media part without its media.
    """
    for name, modality in _MEDIA.items():
        if name in part:
            return _from_media(part, name, modality, default_tokens)
    kind = part.get("type")
    if kind == "input_image" and "image_embeds" in part:  # of /v1/responses
        kind = "image_embeds"
    if isinstance(kind, str) and kind.endswith(_SUFFIX) and isinstance(part.get(kind), dict):
        metadata = part[kind]
        return Item(str(part.get("uuid", "")), _tokens_in(metadata, default_tokens), metadata, has_media=False)
    return None


def _from_media(part: Mapping[str, Any], name: str, modality: str, default_tokens: int) -> Item:
    value = part[name]
    source = value.get("url", value.get("data")) if isinstance(value, dict) else value
    if not isinstance(source, str) or not source:
        raise ValueError(f"{name} needs a url")
    size = picture_size(source) if modality == "image" else None
    if size is None:
        high, wide = MERGE, MERGE * default_tokens
    else:
        high, wide = (MERGE * max(1, round(side / (PATCH_PIXELS * MERGE))) for side in size)
    metadata = {f"{modality}_grid_thw": [[1, high, wide]]}
    key = str(part.get("uuid") or xxhash.xxh3_128_hexdigest(source.encode()))
    return parted(Item(key, high * wide // MERGE**2, metadata, has_media=True), key)


def parted(item: Item, key: str) -> Item:
    """What of an item has this key: all of it, or one of its parts, as if each token were a tile."""
    part = part_of(key)
    return replace(item, key=key, tokens=len(part.of(item.tokens)) if part is not None else item.tokens)


def _tokens_in(metadata: Mapping[str, Any], default_tokens: int) -> int:
    for name, value in metadata.items():
        if name.endswith("_grid_thw"):
            sides = _flat(value)
            if sides is None or not sides or len(sides) % 3:
                break
            return int(sum(math.prod(sides[at : at + 3]) for at in range(0, len(sides), 3))) // MERGE**2
    return default_tokens


def _flat(value: object) -> list[float] | None:
    """The numbers of a grid: one list from the proxy, a list of lists from encoders. None of anything else."""
    if isinstance(value, int | float):
        return [value]
    if not isinstance(value, list | tuple):
        return None
    inner = [_flat(one) for one in value]
    return None if None in inner else [number for one in inner if one is not None for number in one]


def picture_size(source: str) -> tuple[int, int] | None:
    """(height, width) of a picture in a data URL, or None where it cannot be seen."""
    head, comma, data = source.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    for length in (_HEADER_BYTES // 3 * 4, len(data)):
        try:
            size = _size_in(binascii.a2b_base64(data[: length - length % 4]))
        except (binascii.Error, IndexError):
            size = None
        if size is not None or length >= len(data):
            return size
    return None


def _size_in(raw: bytes) -> tuple[int, int] | None:
    if raw.startswith(b"\x89PNG"):
        return int.from_bytes(raw[20:24]), int.from_bytes(raw[16:20])
    if raw.startswith(b"GIF8"):
        return int.from_bytes(raw[8:10], "little"), int.from_bytes(raw[6:8], "little")
    if raw.startswith(b"BM"):
        return abs(int.from_bytes(raw[22:26], "little", signed=True)), int.from_bytes(raw[18:22], "little")
    if raw.startswith(b"\xff\xd8"):
        return _jpeg_size(raw)
    if raw.startswith(b"RIFF") and raw[8:12] == b"WEBP":
        return _webp_size(raw)
    return None


def _jpeg_size(raw: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(raw):
        if raw[at] != 0xFF:
            return None
        marker = raw[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            return int.from_bytes(raw[at + 5 : at + 7]), int.from_bytes(raw[at + 7 : at + 9])
        at += 2 + int.from_bytes(raw[at + 2 : at + 4])
    return None


def _webp_size(raw: bytes) -> tuple[int, int] | None:
    kind = raw[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(raw[27:30], "little"), 1 + int.from_bytes(raw[24:27], "little")
    if kind == b"VP8 ":
        return int.from_bytes(raw[28:30], "little") & 0x3FFF, int.from_bytes(raw[26:28], "little") & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(raw[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    return None


DTYPE = "bfloat16"
_ITEM_BYTES = 2


def feature_bytes(key: str, nbytes: int) -> bytes:
    """`nbytes` of the feature of `key`."""
    digest = hashlib.blake2b(key.encode()).digest()
    return (digest * (-(-nbytes // len(digest))))[:nbytes]


def belongs_to(key: str, view: memoryview) -> bool:
    """Whether these are bytes of the feature of `key`: its beginning and its length say so."""
    digest = hashlib.blake2b(key.encode()).digest()
    return bytes(view[: len(digest)]) == digest[: len(view)] and len(view) > 0


def feature_shape(tokens: int, bytes_per_token: int) -> tuple[int, int]:
    """(tokens, hidden) of elements of `DTYPE`."""
    return tokens, max(1, bytes_per_token // _ITEM_BYTES)
