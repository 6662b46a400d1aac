"""Media that are here already: in the body itself, as data URLs and bare base64, read as strictly as vLLM reads them;
and `file://` URLs, read only from under one directory that the operator named."""

from __future__ import annotations

import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64

from proxy.errors import media_refused, media_too_large

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
        raise media_refused(param, "a data URL must read data:<type>;base64,<data>", "invalid_data_url")
    plain = mime.replace("-", "").replace("+", "").replace(".", "").split("/")
    if not mime.isascii() or not all(part.isalnum() for part in plain):
        mime = ""  # would otherwise be copied into the URL that the stages parse
    return mime or default_mime, *read_base64(url, param, max_bytes, begin=len(head) + 1)


def read_base64(text: str, param: str, max_bytes: int, *, begin: int = 0) -> tuple[bytes, memoryview]:
    """The bytes that `text` stands for from `begin` on, and that as bytes. As strict as vLLM, which reads it with the
    same library. Raises as `read_data_url`."""
    try:
        payload = memoryview(text.encode("ascii"))[begin:]
        if len(payload) * 3 // 4 > max_bytes + 2:
            raise media_too_large(param, max_bytes)
        return pybase64.b64decode(payload, validate=True), payload
    except UnicodeEncodeError:
        what = "characters that are not ASCII"
    except (binascii.Error, ValueError) as error:
        what = str(error)
    raise media_refused(param, f"invalid base64 ({what})", "invalid_base64")


def base64_bytes(size_bytes: int) -> int:
    """How long a data URL of so many bytes is, at most."""
    return -(-size_bytes // 3) * 4 + MAX_HEAD


def read_local(url: str, *, root: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a regular file under the directory `root`; "": there is none.

    The file is opened first and judged by where the open descriptor really is, so that no symlink swapped in
    between leads out. Every refusal reads the same: it must not tell what exists outside.

    Raises:
        RequestError: no root configured, outside it, not there, or not a regular file. PayloadTooLargeError.
    """
    if not root:
        raise media_refused(param, "this server does not read local files", "local_files_refused")
    refusal = media_refused(param, "not a readable file under the allowed directory", "local_file_refused")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise refusal
        descriptor = os.open(unquote(parts.path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):  # a NUL in the path is a ValueError
        raise refusal from None
    try:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not where.is_relative_to(Path(root).resolve()) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refusal
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise media_too_large(param, max_bytes)
    return data
