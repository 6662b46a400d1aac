"""Content parts of chat messages: where the media items are, and how a part is rewritten for the stages.

Knows the part types that vLLM accepts and the ones a client must not send. vLLM infers a part's type from any media
key it finds, so a part may carry exactly one, or an unchecked URL could ride along. What `/v1/responses` calls its
parts is `proxy/fields/response_parts.py`'s. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epd_serve.errors import RequestError


class Modality(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


MEDIA_KEYS = {
    "image_url": Modality.IMAGE,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
    "video_url": Modality.VIDEO,
}
# `input_image` (Responses style) carries its URL under `image_url`.
KEY_OF_TYPE = {**{key: key for key in MEDIA_KEYS}, "input_image": "image_url"}


@dataclass(frozen=True)
class MediaRef:
    """Where one media item sits and what it refers to.

    Attributes:
        message, part: indices into the body's list of messages and into that message's list of parts.
        key: the part's media key, e.g. `image_url`.
        param: how errors name it, e.g. `messages[0].content[1].image_url`.
        source: URL, or for `input_audio` the base64 data.
        messages, parts: the names of the two lists: `input` and `content` or `output` in a Responses body.
    """

    message: int
    part: int
    key: str
    param: str
    source: str
    messages: str = "messages"
    parts: str = "content"

    @property
    def modality(self) -> Modality:
        return MEDIA_KEYS[self.key]


def media_refs(messages: list[Any]) -> tuple[MediaRef, ...]:
    """All media items of `messages`, in order. Raises RequestError naming the offending part."""
    return tuple(_refs(messages))


def rewritten_part(part: Mapping[str, Any], ref: MediaRef, *, source: object, uuid: str) -> dict[str, Any]:
    """`part` with its media replaced by `source` (a data URL, or base64 for `input_audio`) and its key as `uuid`."""
    value = part[ref.key]
    inner = dict(value) if isinstance(value, dict) else {}
    inner["data" if ref.key == "input_audio" else "url"] = source
    return {**part, "type": ref.key, ref.key: inner, "uuid": uuid}


def placeholder_part(ref: MediaRef, metadata: Mapping[str, Any], *, uuid: str) -> dict[str, Any]:
    """A part without media: the fields that size the item's place in the prompt, and the key of its feature.

    vLLM (0.32, `renderers/chat_utils.py`) takes `<modality>_embeds` with an object of flat numeric lists, and wants the
    tensor itself only where no connector brings it.
    """
    kind = f"{ref.modality.value}_embeds"
    return {"type": kind, kind: dict(metadata), "uuid": uuid}


def _refuse_embeds(part: Mapping[str, Any], where: str) -> None:
    """Refuse any `*_embeds` field: embeddings from outside reach the engine unchecked."""
    for name in part:
        if name.endswith("_embeds"):
            raise RequestError(f"{where}{name} is not accepted from clients.", param=f"{where}{name}")


def _refs(messages: list[Any]) -> Iterator[MediaRef]:
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{i}] must be an object.", param=f"messages[{i}]")
        if isinstance(message.get("tool_calls"), int | float):  # vLLM makes a list of it before it looks at types
            raise RequestError(f"messages[{i}].tool_calls must be a list.", param=f"messages[{i}].tool_calls")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise RequestError(
                f"messages[{i}].content must be a string or a list of parts.", param=f"messages[{i}].content"
            )
        for j, part in enumerate(content):
            ref = _ref(part, i, j)
            if ref is not None:
                yield ref


def checked_part(part: object, where: str) -> dict[str, Any] | None:
    """`part` if it is an object and carries nothing that no client may send, None for plain text.

    Raises RequestError naming the field.
    """
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object.", param=where)
    _refuse_embeds(part, f"{where}.")
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string.", param=f"{where}.type")
    if kind is not None and kind.endswith("_embeds"):
        raise RequestError(f"{where}: parts of type {kind} are not accepted from clients.", param=f"{where}.type")
    for name in ("image_pil", "uuid"):
        if part.get(name) is not None or (name == "image_pil" and name in part):
            raise RequestError(f"{where}.{name} is not accepted from clients.", param=f"{where}.{name}")
    return part


def _ref(raw: object, i: int, j: int) -> MediaRef | None:
    where = f"messages[{i}].content[{j}]"
    part = checked_part(raw, where)
    if part is None:
        return None
    kind = part.get("type")
    keys = [key for key in MEDIA_KEYS if key in part]
    if not keys and kind not in KEY_OF_TYPE:
        return None  # text, or a type that vLLM knows or refuses
    expected = KEY_OF_TYPE.get(kind, "") if kind is not None else keys[0]
    if keys != [expected]:
        carried = ", ".join(keys) or "none"
        raise RequestError(
            f"{where} of type {kind!r} must carry {expected or 'no media'}, found {carried}.", param=where
        )
    return MediaRef(i, j, expected, f"{where}.{expected}", _source(part[expected], expected, f"{where}.{expected}"))


def _source(value: object, key: str, param: str) -> str:
    field = "data" if key == "input_audio" else "url"
    if isinstance(value, dict):
        value = value.get(field)
    elif key == "input_audio":
        value = None
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}.{field} must be a non-empty string.", param=param)
    return value
