"""What AISBench is told: its model entry as Python text, and its command line. Pure but for writing the entry.

Its configurations cannot read the environment, so each rate has one of its own, beside the workload's export
(`bench/workloads/export_aisbench.py`), whose folder is AISBench's `--config-dir`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bench.workloads.export_aisbench import DATASET
from epd_serve.errors import ConfigError

NAME = "epd_bench"
"""Of the model entry, and of the folder of its results."""
DATASET_NAME = "mm_custom"
"""Of the results' files: the `abbr` of the exported dataset entry."""
MOST_AT_ONCE = 500
"""`batch_size`: with more AISBench starts a second process, and beyond it requests wait outside of its clock."""


@dataclass(frozen=True)
class Entry:
    """A run against one endpoint.

    Attributes:
        url: with the base path, without `/v1`. model: as the endpoint calls it. tokenizer: a folder.
        rate_rps: at which AISBench draws Poisson arrivals where `timed` does not hold.
        timed: the rows' own times hold.
        requests: rows of the workload, without the warm-up's.
        api_key: "" for none.
    """

    url: str
    model: str
    tokenizer: Path
    rate_rps: float
    timed: bool
    requests: int
    api_key: str = ""

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
        use_timestamp={entry.timed!r},
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
