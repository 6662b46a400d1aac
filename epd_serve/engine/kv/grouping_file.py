"""The mode of grouping that a file names: how a measurement changes the mode of a running P. Not for production.

A mode is a flag of the launch, and a launch takes most of a minute on CPU. `--kv-grouping file:PATH` lets
`epd-bench transfer pd` compare modes in turns on one P: it replaces the file between two requests.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import Cuts, Grouping, LinkCost, Step, parse_grouping

PREFIX = "file:"
LOOK_EVERY_S = 0.05
"""So long after the file was replaced, every step follows it."""

logger = logging.getLogger(__name__)


def open_grouping(text: str, floor_bytes: int) -> Grouping:
    """What `parse_grouping` reads, or `file:PATH` of a file that holds such a text. Raises ConfigError."""
    if text.startswith(PREFIX):
        return GroupingFile(Path(text.removeprefix(PREFIX)), floor_bytes)
    return parse_grouping(text, floor_bytes)


class GroupingFile:
    """Groups as the file says, which is looked at every `LOOK_EVERY_S` and read when it was replaced.

    A replacement that cannot be read leaves the mode as it was: a step under way cannot be refused.

    Raises:
        ConfigError: at the start, that the file is missing or names no mode.
    """

    def __init__(self, path: Path, floor_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._floor_bytes = floor_bytes
        self._clock = clock
        self._seen = self._version()
        self._modes: dict[str, Grouping] = {}  # kept: a mode remembers what it has worked out
        self._mode = self._read()
        self._look_at = clock() + LOOK_EVERY_S

    @property
    def name(self) -> str:
        """The mode of the last cuts."""
        return self._mode.name

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._look()
        return self._mode.cuts(step, cost)

    def _look(self) -> None:
        try:
            version = self._version()
            if version != self._seen:
                self._seen = version
                self._mode = self._read()
        except ConfigError as error:
            logger.error("KV grouping stays %s: %s", self._mode.name, error)

    def _version(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise self._unreadable(error) from error
        return found.st_ino, found.st_mtime_ns

    def _read(self) -> Grouping:
        try:
            text = self._path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise self._unreadable(error) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{PREFIX}{self._path} is no text", param="--kv-grouping") from error
        if text not in self._modes:
            self._modes[text] = parse_grouping(text, self._floor_bytes)
        return self._modes[text]

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{PREFIX}{self._path} cannot be read: {error.strerror}", param="--kv-grouping")


def replace_mode(path: Path, mode: str) -> None:
    """Name another mode: the file is there whole at every moment."""
    written = path.with_name(path.name + ".new")
    written.write_text(mode, encoding="utf-8")
    written.replace(path)
