"""The figures of all entries together: `DIR/result.json`. Pure but for reading the books."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.layouts.book import Book
from bench.layouts.experiment import Experiment

Whole = tuple[dict[str, float], dict[str, Any], list[dict[str, Any]]]


def whole(experiment: Experiment, books: Sequence[Book], env: Mapping[str, Any]) -> Whole:
    """(figures, env, rows) of an experiment, as far as it has come (`bench/record.py`).

    Figures are called `<entry>/<rate> rps/…`; of an entry itself `devices`, `ready_s`, `same_tokens` (the share of a
    few requests, asked alone, that it answers token for token as the first entry did), `runs`, `valid_runs`.
    """
    figures: dict[str, float] = {}
    for book in books:
        own: dict[str, float] = {"devices": book.entry.devices, **book.figures}
        if (ready_s := book.env.get("entry", {}).get("ready_s")) is not None:
            own["ready_s"] = ready_s
        own |= {"runs": len(book.rows), "valid_runs": sum(bool(row["valid"]) for row in book.rows)}
        figures |= {f"{book.entry.name}/{name}": value for name, value in own.items()}
    for name, share in same_tokens(books).items():
        figures[f"{name}/same_tokens"] = share
    failed = {book.entry.name: reason for book in books if (reason := book.failure)}
    rows = [{"entry": book.entry.name, **row} for book in books for row in book.rows]
    return figures, {**env, "experiment": experiment.to_json(), "failed": failed}, rows


def same_tokens(books: Sequence[Book]) -> dict[str, float]:
    """By entry: the share of answers that are the first entry's, token for token. Of the first that has answered."""
    answered = {book.entry.name: answers for book in books if (answers := book.answers)}
    if not answered:
        return {}
    first = next(iter(answered.values()))
    return {
        name: statistics.fmean(own == other for own, other in zip(answers, first, strict=True))
        for name, answers in answered.items()
    }


def unfinished(experiment: Experiment, books: Sequence[Book]) -> list[str]:
    """What is missing or not valid, in sentences; empty of an experiment that is whole."""
    found = []
    for book in books:
        missing = [run.label for run in book.missing(experiment.runs(book.entry))]
        if missing:
            why = f": {book.failure.splitlines()[0]}" if book.failure else ""
            found.append(f"{book.entry.name} has no {', '.join(missing)}{why}")
        for row in book.rows:
            if not row["valid"]:
                found.append(f"{book.entry.name}, {row['run']}, is not valid: {row['objections'][0]}")
    return found
