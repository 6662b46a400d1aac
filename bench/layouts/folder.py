"""The folder of an experiment: one experiment, one process at a time, and what is in it already.

experiment.json       what was asked (`bench/layouts/experiment.py`)
<slug>/               of each entry (`bench/layouts/book.py`)
result.json           the figures of all entries together
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.layouts.book import RESULT, Book, read_json, write_json
from bench.layouts.experiment import Experiment, difference
from epd_serve.errors import ConfigError

ASKED, LOCK = "experiment.json", ".lock"
DRAWN = ("*.png", "*.csv", "report.html")


class Folder:
    """Of an experiment, new or resumed."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path, self._experiment = path, experiment
        self.books: Sequence[Book] = [Book(path / entry.slug, entry) for entry in experiment.entries]

    def begin(self) -> None:
        """Say what is asked, where the folder is new."""
        if not (self.path / ASKED).exists():
            write_json(self.path / ASKED, self._experiment.to_json())


@contextlib.contextmanager
def opened(path: Path, experiment: Experiment, *, fresh: bool) -> Iterator[Folder]:
    """The folder, for this process alone until the context ends.

    Args:
        fresh: an experiment that is there is removed.

    Raises:
        ConfigError: it holds something else, another experiment (with the field that differs), or is in use.
    """
    with _locked(path):
        if (path / ASKED).exists():
            if fresh:
                _clear(path)
            elif differs := difference(read_json(path / ASKED), experiment.to_json()):
                raise ConfigError(
                    f"{path} holds another experiment: {differs}; name another --out, or begin anew with --fresh",
                    param="--out",
                )
        elif strangers := sorted(one.name for one in path.iterdir() if one.name != LOCK):
            raise ConfigError(
                f"{path} holds {strangers[0]} and no {ASKED}: name a new folder, or that of an experiment",
                param="--out",
            )
        yield Folder(path, experiment)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}", param="--out") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {path}: another epd-bench measures into it now", param="--out") from None
        yield
    finally:
        os.close(lock)


def _clear(path: Path) -> None:
    """Remove an experiment, and nothing that is not one's."""
    asked = read_json(path / ASKED)
    slugs = [str(entry.get("slug", "")) for entry in asked.get("entries", ())]
    for slug in filter(None, slugs):
        if Path(slug).name == slug:
            shutil.rmtree(path / slug, ignore_errors=True)
    for pattern in (ASKED, RESULT, *DRAWN):
        for found in path.glob(pattern):
            found.unlink(missing_ok=True)
