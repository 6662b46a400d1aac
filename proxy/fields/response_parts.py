"""Images in the `input` of `/v1/responses`: where they are, and how they are rewritten for the stages.

vLLM (0.32, `entrypoints/openai/responses`) takes media there as `input_image` with a URL and as nothing else. It hands
the parts of messages and of tool outputs on as they are, unknown fields included, so all of them are judged here, by
the rules of `proxy/fields/parts.py`. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from epd_serve.errors import RequestError
from proxy.fields.parts import MEDIA_KEYS, MediaRef, checked_part

LISTS = ("content", "output")
"""Fields of an input item that hold parts: of messages, and of what tools gave back."""
IMAGE_KEY = "image_url"


def response_refs(items: list[Any]) -> tuple[MediaRef, ...]:
    """All images of `input`, in order. Raises RequestError naming the offending part."""
    return tuple(_refs(items))


def rewritten_response_part(part: Mapping[str, Any], *, source: object, uuid: str) -> dict[str, Any]:
    """`part` with its image replaced by `source` (a data URL) and its key as `uuid`."""
    return {"detail": "auto", **part, "type": "input_image", IMAGE_KEY: source, "uuid": uuid}


def placeholder_response_part(metadata: Mapping[str, Any], *, uuid: str) -> dict[str, Any]:
    """A part without its image: vLLM judges its form by `type`, and by `uuid` reads it as what it carries."""
    return {"type": "input_image", "detail": "auto", "image_embeds": dict(metadata), "uuid": uuid}


def as_chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """What `rewritten_response_part` made, as a part of a chat message: how encoders are asked."""
    return {"type": IMAGE_KEY, IMAGE_KEY: {"url": part[IMAGE_KEY]}, "uuid": part["uuid"]}


def _refs(items: list[Any]) -> Iterator[MediaRef]:
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise RequestError(f"input[{i}] must be an object.", param=f"input[{i}]")
        for name in LISTS:
            parts = item.get(name)
            if parts is None or isinstance(parts, str):
                continue
            where = f"input[{i}].{name}"
            if not isinstance(parts, list):
                raise RequestError(f"{where} must be a string or a list of parts.", param=where)
            for j, part in enumerate(parts):
                url = _image_url(part, f"{where}[{j}]")
                if url is not None:
                    yield MediaRef(i, j, IMAGE_KEY, f"{where}[{j}].{IMAGE_KEY}", url, "input", name)


def _image_url(raw: object, where: str) -> str | None:
    part = checked_part(raw, where)
    if part is None:
        return None
    kind = part.get("type")
    if kind == "input_file":
        raise RequestError(f"{where}: files are not supported; send images as input_image.", param=f"{where}.type")
    if part.get("file_id") is not None:
        raise RequestError(f"{where}: this server stores no files; send image_url.", param=f"{where}.file_id")
    keys = [key for key in MEDIA_KEYS if key in part]
    if kind != "input_image":
        if keys:
            raise RequestError(f"{where} of type {kind!r} must carry no media, found {', '.join(keys)}.", param=where)
        return None
    url = part.get(IMAGE_KEY)
    if keys != [IMAGE_KEY] or not isinstance(url, str) or not url:
        raise RequestError(
            f"{where}.{IMAGE_KEY} must be a non-empty string, and the only media of its part.",
            param=f"{where}.{IMAGE_KEY}",
        )
    return url
