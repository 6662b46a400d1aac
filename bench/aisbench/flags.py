"""The flags of `epd-bench aisbench`, and what they ask for. Pure but for reading a key's file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.aisbench.environment import default_folder
from bench.clients.flags import add_shared_flags, check_shared, parse_rates, rules_of
from bench.clients.measure import Plan
from bench.clients.sender import Bounds
from bench.record import add_arguments as add_record_arguments
from bench.workloads.requests import Poisson, RequestSpec
from bench.workloads.workload import Workload, workload
from epd_serve.errors import ConfigError

QUICK_REQUESTS = 24


@dataclass(frozen=True)
class Asked:
    """What is to be measured.

    Attributes:
        plan: how a run is judged, and how long a request may take. api_key: "" for none.
    """

    rates: Sequence[float]
    workload: Workload
    plan: Plan
    api_key: str = ""

    def specs(self, rate_rps: float, number: int) -> list[RequestSpec]:
        """The requests of the run with that number: new ones each time, at times that the seed fixes."""
        wanted = self.workload.seeded(self.workload.knobs.seed + number)
        return list(wanted.at(Poisson(rate_rps)).requests())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT of an OpenAI server")
    what, when, judged = add_shared_flags(parser, late_ms=100.0, timeout_s=600.0)
    what.add_argument("--model", help="default: the one that the endpoint serves")
    what.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the endpoint's key")
    when.add_argument("--rates", required=True, metavar="R", help="requests a second: R, R,R,… or FROM-TO[:STEP]")
    judged.add_argument("--devices", type=int, help="that serve the endpoint; gives figures per device")
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--venv",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="environment with AISBench, made where there is none (default %(default)s)",
    )
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--out", type=Path, metavar="DIR", help="keep AISBench's own files there, a folder for each rate")
    kept.add_argument("--rows", type=Path, metavar="FILE", help="every request as a JSON line (default beside --json)")
    kept.add_argument("--kind", choices=("real", "emulated", "simulated"), default="real", help="what serves")
    add_record_arguments(parser, quick=f"{QUICK_REQUESTS} requests at each rate")


def asked(arguments: argparse.Namespace) -> Asked:
    """What the flags say. Raises ConfigError naming the flag at fault."""
    check_shared(arguments)
    if arguments.workload is None:
        raise ConfigError("say what to send: --workload NAME", param="--workload")
    if arguments.quick and arguments.n is None:
        arguments.n = QUICK_REQUESTS
    rates = parse_rates(arguments.rates, "--rates")
    if len(set(rates)) < len(rates):
        raise ConfigError(f"--rates {arguments.rates}: each rate once", param="--rates")
    wanted = workload(arguments.workload, arguments)
    return Asked(
        rates=rates,
        workload=wanted,
        plan=Plan(
            Poisson(1.0),  # each run has its own
            count=wanted.count,
            slos=arguments.slo,
            devices=arguments.devices,
            rules=rules_of(arguments),
            bounds=Bounds(limit_s=arguments.timeout),
        ),
        api_key=_key(arguments.api_key_file),
    )


def _key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}", param="--api-key-file") from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(f"--api-key-file {path}: one key on one line", param="--api-key-file")
    return key
