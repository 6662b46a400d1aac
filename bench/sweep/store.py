"""The folder of an experiment: one experiment, one process at a time, and of each deployment what is finished.

    experiment.json          what was asked (`bench/sweep/experiment.py`)
    <deployment>/result.json    figures, environment, a row per finished run (`bench/record.py`)
    <deployment>/rows.jsonl     every request; phases.jsonl where its time went
    <deployment>/answers.json   tokens of the requests that every deployment answers
    <deployment>/failed.json    why there are no more runs
    result.json              the figures of all deployments together

A run is finished when its row is in `result.json`, which is replaced whole. What an unfinished one left in the other
files stays until it is measured again.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.clients.results import Results
from bench.record import Record, flatten, read_json, write_whole
from bench.sweep.compared import compared
from bench.sweep.experiment import Deployment, Experiment, PlannedRun
from epd_serve.errors import ConfigError

EXPERIMENT, LOCK = "experiment.json", ".lock"
SEED = "seed-"
"""Of several seeds each has its experiment in a folder with that name and its number."""
RESULT, ROWS, PHASES = "result.json", "rows.jsonl", "phases.jsonl"
FAILED, ANSWERS = "failed.json", "answers.json"


SESSION = ("command", "commit", "uncommitted_changes", "date", "machine", "versions")
"""Of an environment, what may differ between the sessions in which the runs were measured."""


class ResultStore(Results):
    """What there is of one deployment."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        """Raises ConfigError where its result cannot be read."""
        super().__init__(folder / RESULT, "--out", {})
        self.folder, self.deployment = folder, deployment
        if (folder / RESULT).exists():
            found = read_json(folder / RESULT, Record)
            self.env, self.rows = found.env, [row for row in found.rows if not row.get("stopped")]
            self.figures = {name: own for name, own in found.figures.items() if name.split("/")[0] in self.finished}

    @property
    def finished(self) -> set[str]:
        """Labels of the runs that are."""
        return {str(row["run"]) for row in self.rows}

    def missing(self, experiment: Experiment) -> list[PlannedRun]:
        """The runs that are still to be made."""
        return [run for run in experiment.runs(self.deployment) if run.label not in self.finished]

    def begin(self, env: Mapping[str, Any]) -> None:
        """A session of measuring begins: what unfinished runs left goes, and why the last session failed."""
        for path in (self.folder / ROWS, self.folder / PHASES):
            if path.is_file():
                kept = [line for line in path.read_bytes().split(b"\n")[:-1] if _run_of(line) in self.finished]
                write_whole(path, b"".join(line + b"\n" for line in kept), "--out")
        session = {name: env.get(name) for name in SESSION} | {"finished_before": sorted(self.finished)}
        self.env = {**env, "sessions": [*self.env.get("sessions", ()), session]}
        (self.folder / FAILED).unlink(missing_ok=True)

    def fail(self, reason: str) -> None:
        """Keep why it has no more runs."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        _write_json(self.folder / FAILED, {"reason": reason, "date": date})

    @property
    def failure(self) -> str:
        """Of the last session; "" where there was none."""
        path = self.folder / FAILED
        return str(read_json(path, dict[str, str]).get("reason", "")) if path.exists() else ""

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of the requests that every deployment answers; empty before it has."""
        path = self.folder / ANSWERS
        return read_json(path, dict[str, list[list[int]]])["tokens"] if path.exists() else []

    def keep_answers(self, tokens: Sequence[Sequence[int]]) -> None:
        _write_json(self.folder / ANSWERS, {"tokens": [list(one) for one in tokens]})


@contextlib.contextmanager
def opened(path: Path, experiment: Experiment) -> Iterator[list[ResultStore]]:
    """The stores of the folder's deployments, for this process alone until the context ends.

    Raises:
        ConfigError: it holds something else, another experiment (with the field that differs), or is in use.
    """
    with _locked(path):
        if not (path / EXPERIMENT).exists():
            if others := sorted(one.name for one in path.iterdir() if one.name != LOCK):
                raise ConfigError(
                    f"{path} holds {others[0]} and no {EXPERIMENT}: name a new folder, or that of an experiment",
                    param="--out",
                )
        elif differs := difference(*map(_fields, (read_json(path / EXPERIMENT, dict[str, Any]), experiment.to_json()))):
            raise ConfigError(
                f"{path} holds another experiment: {differs}; name another --out, or remove the folder",
                param="--out",
            )
        _write_json(path / EXPERIMENT, experiment.to_json())
        yield [ResultStore(path / one.slug, one) for one in experiment.deployments]


def _fields(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """By their joined names, deployments by their own."""
    named = {str(one["name"]): one for one in experiment["deployments"]}
    return dict(flatten({**experiment, "deployments": named}))


def summary(experiment: Experiment, stores: Sequence[ResultStore], env: Mapping[str, Any]) -> Record:
    """The result of all deployments together, as far as the experiment has come.

    Figures are called `<deployment>/<rate> rps/…`; of a deployment itself `devices`, `ready_s`, `same_tokens` (the
    share of a few requests, asked alone, that it answers token for token as the first one did), `runs`, `valid_runs`;
    and what `bench.sweep.compared` says of them.
    """
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    first = next((answers for store in stores if (answers := store.answers)), [])
    for store in stores:
        one = store.deployment
        own = {"devices": one.devices, **store.figures, "runs": len(store.rows)}
        own["valid_runs"] = sum(bool(row["valid"]) for row in store.rows)
        if (ready_s := store.env.get("deployment", {}).get("ready_s")) is not None:
            own["ready_s"] = ready_s
        if answers := store.answers:
            own["same_tokens"] = statistics.fmean(mine == other for mine, other in zip(answers, first, strict=True))
        figures |= {f"{one.name}/{name}": value for name, value in own.items()}
        rows += [{"deployment": one.name, **row} for row in store.rows]
    failed = {store.deployment.name: store.failure for store in stores if store.failure}
    figures |= compared(experiment, figures)
    return Record(figures, {**env, "experiment": experiment.to_json(), "failed": failed}, rows)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n", "--out")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}", param="--out") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"--out {path}: another epd-bench measures into it now", param="--out") from None
    finally:
        os.close(lock)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field in which two experiments differ, with both values; "" where they are one."""

    def shown(value: Any) -> str:
        return "not given" if value is None else value if isinstance(value, str) else json.dumps(value)

    for name in dict.fromkeys([*now, *before]):
        if before.get(name) != now.get(name):
            return f"{name} was {shown(before.get(name))}, is {shown(now.get(name))}"
    return ""


def _run_of(line: bytes) -> object:
    """Of a line that is no row: None."""
    try:
        return json.loads(line)["run"]
    except (ValueError, KeyError, TypeError):
        return None
