"""Bytes of the images that a workload refers to: drawn once and kept on disk, or the user's own files.

The cache may be shared by processes and runs: a file appears whole, under a name that follows from what is drawn.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from bench.record import write_whole
from bench.workloads.render import VERSION, encode, render
from bench.workloads.spec import MIME, ImageRef
from epd_serve.errors import ConfigError


def default_cache() -> Path:
    """`epd-serve/pictures` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd-serve" / "pictures"


class Images:
    """Gives each image as bytes, as a file, or as a data URL.

    Args:
        cache: directory, made when the first image is drawn; None is `default_cache()`.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache()

    def file(self, image: ImageRef) -> Path:
        """An absolute path to the image's bytes.

        Raises:
            ConfigError: the cache cannot be written (disk full, no permission).
        """
        if image.path is not None:
            return image.path
        assert image.seed is not None, "an image without a path is drawn"
        name = f"{image.key}-{VERSION}.{image.format}"
        path = (self._cache / name[:2] / name).absolute()
        if not path.is_file():
            drawn = encode(render(image.seed, image.width, image.height), image.format)
            write_whole(path, drawn, "--cache")
        return path

    def data(self, image: ImageRef) -> bytes:
        """The bytes, as they go on the wire.

        Raises:
            ConfigError: as `file`, or the user's image is gone or unreadable.
        """
        path = self.file(image)
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"image {path} cannot be read: {error.strerror}", param="--pictures") from error

    def data_url(self, image: ImageRef) -> str:
        """The same bytes, as an OpenAI `image_url` takes them."""
        return f"data:{MIME[image.format]};base64,{base64.b64encode(self.data(image)).decode()}"
