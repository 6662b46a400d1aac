"""Media that stand in the body itself: data URLs and bare base64, read as strictly as vLLM reads them. Pure."""

from __future__ import annotations

import binascii

import pybase64

from epd_serve.errors import RequestError
from proxy.errors import media_too_large

MAX_HEAD = 256  # of a data URL, to its comma


def read_data_url(url: str, param: str, default_mime: str, max_bytes: int) -> tuple[str, bytes, memoryview]:
    """MIME type, bytes, and their base64 as it stands in `url`.

    Args:
        param: the field to name in errors. default_mime: where the URL names none.

    Raises:
        RequestError: 400, not a data URL of base64. PayloadTooLargeError: 413.
    """
    head, comma, _ = url[:MAX_HEAD].partition(",")
    mime, *attributes = head[len("data:") :].split(";")
    if not comma or "base64" not in (attribute.strip().lower() for attribute in attributes):
        raise RequestError(
            f"{param}: a data URL must read data:<type>;base64,<data>.", param=param, code="invalid_data_url"
        )
    plain = mime.replace("-", "").replace("+", "").replace(".", "").split("/")
    if not mime.isascii() or not all(part.isalnum() for part in plain):
        mime = ""  # would otherwise be copied into the URL that the stages parse
    payload = memoryview(_ascii(url, param))[len(head) + 1 :]  # of characters: a head that is not ASCII was refused
    return mime or default_mime, *_decoded(payload, param, max_bytes)


def read_base64(text: str, param: str, max_bytes: int) -> tuple[bytes, memoryview]:
    """The bytes that `text` stands for, and `text` as bytes. Raises as `read_data_url`."""
    return _decoded(memoryview(_ascii(text, param)), param, max_bytes)


def base64_bytes(size_bytes: int) -> int:
    """How long a data URL of so many bytes is, at most."""
    return -(-size_bytes // 3) * 4 + MAX_HEAD


def _ascii(text: str, param: str) -> bytes:
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise _invalid_base64(param, "characters that are not ASCII") from None


def _decoded(payload: memoryview, param: str, max_bytes: int) -> tuple[bytes, memoryview]:
    """What `payload` says, and `payload`. As strict as vLLM, which reads it with the same library."""
    if len(payload) * 3 // 4 > max_bytes + 2:
        raise media_too_large(param, max_bytes)
    try:
        return pybase64.b64decode(payload, validate=True), payload
    except (binascii.Error, ValueError) as error:
        raise _invalid_base64(param, str(error)) from None


def _invalid_base64(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: invalid base64 ({what}).", param=param, code="invalid_base64")
