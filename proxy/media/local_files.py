"""`file://` URLs, read only from under one directory that the operator named."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from epd_serve.errors import RequestError
from proxy.errors import media_too_large


def read_local(url: str, *, root: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a regular file under the directory `root`; "": there is none.

    The file is opened first and judged by where the open descriptor really is, so that no symlink swapped in
    between leads out. Every refusal reads the same: it must not tell what exists outside.

    Raises:
        RequestError: no root configured, outside it, not there, or not a regular file. PayloadTooLargeError.
    """
    if not root:
        raise RequestError(f"{param}: this server does not read local files.", param=param, code="local_files_refused")
    refusal = RequestError(
        f"{param}: not a readable file under the allowed directory.", param=param, code="local_file_refused"
    )
    try:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or "\0" in path:
            raise refusal
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
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
