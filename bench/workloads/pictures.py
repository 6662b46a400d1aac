"""Bytes of the pictures that a workload refers to: drawn once and kept on disk, or the user's own files.

The cache may be shared by processes and runs: a file appears whole, under a name that follows from what is drawn.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from pathlib import Path

from bench.workloads import render
from bench.workloads.spec import MIME, PictureRef
from epd_serve.errors import ConfigError


def default_cache() -> Path:
    """`epd-serve/pictures` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd-serve" / "pictures"


class Pictures:
    """Gives each picture as bytes, as a file, or as a data URL."""

    def __init__(self, cache: Path | None = None) -> None:
        """
        Args:
            cache: directory, made when the first picture is drawn; None is `default_cache()`.
        """
        self._cache = cache or default_cache()

    def file(self, picture: PictureRef) -> Path:
        """An absolute path to the picture's bytes.

        Raises:
            ConfigError: the cache cannot be written (disk full, no permission).
        """
        if picture.path is not None:
            return picture.path
        name = f"{picture.key}-{render.VERSION}.{picture.format}"
        path = (self._cache / name[:2] / name).absolute()
        if not path.is_file():
            self._keep(path, _draw(picture))
        return path

    def data(self, picture: PictureRef) -> bytes:
        """The bytes, as they go on the wire.

        Raises:
            ConfigError: as `file`, or the user's picture is gone or unreadable.
        """
        path = self.file(picture)
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"picture {path} cannot be read: {error.strerror}", param="--pictures") from error

    def data_url(self, picture: PictureRef) -> str:
        """The same bytes, as an OpenAI `image_url` takes them."""
        return f"data:{MIME[picture.format]};base64,{base64.b64encode(self.data(picture)).decode()}"

    def _keep(self, path: Path, data: bytes) -> None:
        draft = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(draft, 0o644)  # exports may be read by the user of another process
            os.replace(draft, path)
        except OSError as error:
            if draft is not None:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
            raise ConfigError(
                f"the picture cache {self._cache} cannot be written: {error.strerror}: free some space, or name "
                "another directory with --cache",
                param="--cache",
            ) from error


def _draw(picture: PictureRef) -> bytes:
    assert picture.seed is not None
    return render.encode(render.render(picture.seed, picture.width, picture.height), picture.format)
