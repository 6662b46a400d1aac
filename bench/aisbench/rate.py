"""One rate through AISBench: export, configuration, run, what it left, and whether that says anything.

AISBench's configurations cannot read the environment, so each rate has one of its own, beside the workload's export
(`bench/workloads/export_aisbench.py`), whose folder is AISBench's `--config-dir`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.aisbench.details import NAME, own_figures, read_requests, results_folder, said
from bench.aisbench.environment import AisBench, run_command
from bench.aisbench.rows import Shape, run_of
from bench.clients.http import Endpoint
from bench.clients.measure import Measured, Plan
from bench.clients.measure import judged as by_plan
from bench.clients.sender import Run
from bench.workloads.export_aisbench import DATASET, export_aisbench
from bench.workloads.images import Images
from bench.workloads.requests import RequestSpec
from epd_serve.errors import ConfigError, StageError

MOST_AT_ONCE = 500
"""`batch_size`: with more AISBench starts a second process, and beyond it requests wait outside of its clock."""


@dataclass(frozen=True)
class Entry:
    """A run against one endpoint.

    Attributes:
        url: with the base path, without `/v1`. model: as the endpoint calls it. tokenizer: a folder.
        api_key: "" for none. requests: rows of the workload, without the warm-up's.
    """

    url: str
    model: str
    tokenizer: Path
    api_key: str = ""
    rate_rps: float = 1.0
    requests: int = 0

    @property
    def at_once(self) -> int:
        """As many as there are, up to the bound."""
        return min(MOST_AT_ONCE, self.requests + 1)


def model_entry(entry: Entry) -> str:
    """The Python text of `models/epd_bench.py`.

    `retry` counts attempts. The rate is stated for given times too: AISBench's pacing loop spins without one.
    """
    return f"""from ais_bench.benchmark.models import VLLMCustomAPIChat

models = [
    dict(
        attr="service",
        type=VLLMCustomAPIChat,
        abbr={NAME!r},
        path={str(entry.tokenizer)!r},
        model={entry.model!r},
        stream=True,
        request_rate={entry.rate_rps!r},
        use_timestamp=True,
        traffic_cfg=dict(burstiness=1.0),
        retry=1,
        api_key={entry.api_key!r},
        url={entry.url!r},
        max_out_len=64,
        batch_size={entry.at_once!r},
        trust_remote_code=False,
        generation_kwargs=dict(temperature=0.0, ignore_eos=True),
    )
]
"""


def write_entry(directory: Path, entry: Entry) -> None:
    """Put the entry into the export at `directory`; it may hold a key, so it is for its owner alone.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / "models" / f"{NAME}.py"
    try:
        path.parent.mkdir(exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(model_entry(entry))
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}", param="--out") from error


def command_line(program: Path, directory: Path, results: Path, requests: int) -> list[str]:
    """The command. AISBench sends row 0 of the export first, which is the warm-up's, so one more than `requests`."""
    flags = ["--config-dir", str(directory), "--models", NAME, "--datasets", DATASET.stem, "--mode", "perf"]
    return [str(program), *flags, "--num-prompts", str(requests + 1), "--work-dir", str(results)]


START_S, SUMMARY_S = 300.0, 120.0
"""For AISBench to begin and to compute its figures, on a busy machine; a request adds `ROW_S` to the second."""
ROW_S = 0.2


@dataclass(frozen=True)
class Rated:
    """A rate that was measured. `own`: AISBench's figures, as `details.own_figures` names them."""

    rate_rps: float
    measured: Measured
    own: Mapping[str, float]


def measure_rate(
    plan: Plan,
    entry: Entry,
    shape: Shape,
    bench: AisBench,
    specs: Sequence[RequestSpec],
    rate_rps: float,
    folder: Path,
    images: Images,
) -> Rated:
    """Run AISBench in `folder`, which is made.

    Args:
        entry: without rate and number of requests. specs: the requests.

    Raises:
        ConfigError: the folder cannot be written. StageError: AISBench measured nothing, with its own words.
    """
    export_aisbench(specs, images, folder)
    entry = replace(entry, rate_rps=rate_rps, requests=len(specs))
    write_entry(folder, entry)
    results, until_s = folder / "results", limit_s(specs, plan.bounds.limit_s)
    command = command_line(bench.command, folder, results, len(specs))
    code = run_command(command, folder, until_s, host=Endpoint.of(entry.url).host)
    stopped = f"AISBench did not end within {until_s:.0f} s and was ended" if code is None else ""
    log = said(*sorted(results.glob(f"*/logs/infer/{NAME}/*.out")), folder / "ais_bench.log")
    try:
        left = results_folder(results)
        sent, own = read_requests(left), own_figures(left)
    except StageError as error:
        why = stopped or log or f"{error.message} (exit code {code})"
        raise StageError(f"AISBench measured nothing at {label_of(rate_rps)}: {why}", stage="AISBench") from error
    run = run_of(label_of(rate_rps), sent, specs, shape)
    run.stopped = stopped
    if not stopped and len(run.rows) < len(specs):
        run.stopped = f"AISBench recorded {len(run.rows)} of {len(specs)} requests" + (f": {log}" if log else "")
    return Rated(rate_rps, judged(run, plan), own)


def judged(run: Run, plan: Plan) -> Measured:
    """The figures of a run by the definitions of `epd-bench load`, and why it is not valid where it is not."""
    found = by_plan(run, plan)
    late = {name: value for name, value in found.figures.get("generator", {}).items() if name.startswith("late_")}
    return replace(
        found, figures={**found.figures, "generator": {}, "aisbench_late": late}
    )  # its CPU time is not known


def limit_s(specs: Sequence[RequestSpec], timeout_s: float) -> float:
    """When a run must be over, whatever the endpoint does: AISBench itself waits for an answer without end."""
    return START_S + (specs[-1].arrival_s or 0.0) + timeout_s + SUMMARY_S + ROW_S * len(specs)


def label_of(rate_rps: float) -> str:
    """Of a run in tables, rows and figures, as `epd-bench load` calls it."""
    return f"{rate_rps:g} rps"
