"""Content parts with media, in a chat's `messages` and in the `input` of `/v1/responses`: where they are, and how they
are rewritten for the stages.

Knows the part types that vLLM accepts and the ones a client must not send. vLLM infers a part's type from any media
key it finds, so a part may carry exactly one, or an unchecked URL could ride along. In `/v1/responses` it takes media
as `input_image` with a URL and as nothing else, and hands the parts of messages and of tool outputs on as they are,
unknown fields included (0.32, `entrypoints/openai/responses`): so all of them are judged here. No I/O.
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
IMAGE_KEY, RESPONSE_IMAGE = "image_url", "input_image"
KEY_OF_TYPE = {**{key: key for key in MEDIA_KEYS}, RESPONSE_IMAGE: IMAGE_KEY}
PART_LISTS = {"messages": ("content",), "input": ("content", "output")}
"""Name of a body's list → fields of its objects that hold parts: of messages, and of what tools gave back."""


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

    @property
    def of_response(self) -> bool:
        """It is in a body of `/v1/responses`."""
        return self.messages == "input"


def media_refs(messages: list[Any], name: str = "messages") -> tuple[MediaRef, ...]:
    """All media items of a body's list of that name, in order. Raises RequestError naming the offending part."""
    return tuple(_refs(messages, name))


def rewritten_part(part: Mapping[str, Any], ref: MediaRef, *, source: object, uuid: str) -> dict[str, Any]:
    """`part` with its media replaced by `source` (a data URL, or base64 for `input_audio`) and its key as `uuid`."""
    if ref.of_response:
        return {"detail": "auto", **part, "type": RESPONSE_IMAGE, IMAGE_KEY: source, "uuid": uuid}
    value = part[ref.key]
    inner = {**(value if isinstance(value, dict) else {}), _inner_key(ref.key): source}
    return {**part, "type": ref.key, ref.key: inner, "uuid": uuid}


def placeholder_part(ref: MediaRef, metadata: Mapping[str, Any], *, uuid: str) -> dict[str, Any]:
    """A part without media: the fields that size the item's place in the prompt, and the key of its feature.

    vLLM (0.32, `renderers/chat_utils.py`) takes `<modality>_embeds` with an object of flat numeric lists, and wants the
    tensor itself only where no connector brings it. In a response it judges the form of a part by `type`, and by `uuid`
    reads it as what it carries.
    """
    kind = f"{ref.modality}_embeds"
    form = {"type": RESPONSE_IMAGE, "detail": "auto"} if ref.of_response else {"type": kind}
    return {**form, kind: dict(metadata), "uuid": uuid}


def as_chat_part(part: Mapping[str, Any], ref: MediaRef) -> Mapping[str, Any]:
    """What `rewritten_part` made, as a part of a chat message: how encoders are asked."""
    if not ref.of_response:
        return part
    return {"type": IMAGE_KEY, IMAGE_KEY: {"url": part[IMAGE_KEY]}, "uuid": part["uuid"]}


def _refs(messages: list[Any], holder: str) -> Iterator[MediaRef]:
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"{holder}[{i}]", " must be an object.")
        if isinstance(message.get("tool_calls"), int | float):  # vLLM makes a list of it before it looks at types
            raise _wrong(f"{holder}[{i}].tool_calls", " must be a list.")
        for name in PART_LISTS[holder]:
            parts = message.get(name)
            if parts is None or isinstance(parts, str):
                continue
            at = f"{holder}[{i}].{name}"
            if not isinstance(parts, list):
                raise _wrong(at, " must be a string or a list of parts.")
            for j, part in enumerate(parts):
                where = f"{at}[{j}]"
                if not isinstance(part, str) and (
                    found := _media(_checked(part, where), where, of_response=holder == "input")
                ):
                    key, source = found
                    yield MediaRef(i, j, key, f"{where}.{key}", source, holder, name)


def _checked(part: object, where: str) -> dict[str, Any]:
    """A part that is an object and carries nothing that no client may send: embeddings reach the engine unchecked."""
    if not isinstance(part, dict):
        raise _wrong(where, " must be an object.")
    for name in part:
        if name.endswith("_embeds") or name == "image_pil" or (name == "uuid" and part[name] is not None):
            raise _wrong(f"{where}.{name}", " is not accepted from clients.")
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        raise _wrong(f"{where}.type", " must be a string.")
    if kind is not None and kind.endswith("_embeds"):
        raise _wrong(f"{where}.type", f": parts of type {kind} are not accepted from clients.")
    return part


def _media(part: dict[str, Any], where: str, *, of_response: bool) -> tuple[str, str] | None:
    """Its media key and source; None of text, or of a type that vLLM knows or refuses."""
    kind, keys = part.get("type"), [key for key in MEDIA_KEYS if key in part]
    if of_response:
        if kind == "input_file":
            raise _wrong(f"{where}.type", ": files are not supported; send images as input_image.")
        if part.get("file_id") is not None:
            raise _wrong(f"{where}.file_id", ": this server stores no files; send image_url.")
        key = IMAGE_KEY if kind == RESPONSE_IMAGE else ""
    else:
        key = KEY_OF_TYPE.get(kind, "") if kind is not None else "".join(keys[:1])
    if not keys and not key:
        return None
    if keys != [key]:
        found = ", ".join(keys) or "none"
        param = f"{where}.{key}" if of_response and key else where
        raise RequestError(f"{where} of type {kind!r} must carry {key or 'no media'}, found {found}.", param=param)
    source, inner = part[key], _inner_key(key)
    if not of_response and (isinstance(source, dict) or inner == "data"):
        source = source.get(inner) if isinstance(source, dict) else None
    if not isinstance(source, str) or not source:
        raise RequestError(f"{where}.{key}.{inner} must be a non-empty string.", param=f"{where}.{key}")
    return key, source


def _inner_key(key: str) -> str:
    """Under which name an object below a media key has its source."""
    return "data" if key == "input_audio" else "url"


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(where + what, param=where)
