"""How the runs of an entry come about: by starting and loading it, or by whatever else fills its book the same way."""

from __future__ import annotations

from typing import Protocol

from bench.layouts.book import Book
from bench.layouts.experiment import Experiment


class Way(Protocol):
    """One way of measuring. What it leaves in a book is the same for all ways (`bench/layouts/book.py`)."""

    def check(self, experiment: Experiment) -> None:
        """Raises ConfigError where an entry cannot be measured this way; asked before anything starts."""

    def measure(self, experiment: Experiment, book: Book) -> None:
        """The missing runs of the book's entry, each kept as it ends.

        Raises:
            StageError: the entry cannot be measured (any more); the others can.
            ConfigError: nothing more can be kept.
        """
