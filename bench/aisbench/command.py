"""`epd-bench aisbench`: AISBench loads an OpenAI endpoint; its rows are judged as those of `epd-bench load`.

In an environment of its own (2.2 GB, made once), it writes its configurations, runs it at one rate after another and
reads what it recorded of each request: SLO attainment, effective throughput per device and goodput, which AISBench does
not know, beside the numbers that it prints itself. A rate that says nothing about the server ends with exit code 1 and
says why; Ctrl-C keeps the rates that were finished, with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.aisbench.environment import check_tokenizer, default_folder, environment
from bench.aisbench.rate import Entry, Rated, label_of, measure_rate
from bench.aisbench.rows import look
from bench.clients.flags import add_shared_flags, check_shared, parse_rates, rules_of
from bench.clients.measure import Plan
from bench.clients.metrics import faults
from bench.clients.results import RecordsFile, Results
from bench.clients.sender import Bounds
from bench.clients.slo import GOOD_SHARE
from bench.clients.sweep import run_text
from bench.clients.target import Target
from bench.record import add_arguments as add_record_arguments
from bench.record import environment as record_environment
from bench.record import flatten
from bench.workloads.images import Images
from bench.workloads.requests import Poisson
from bench.workloads.workload import workload
from deploy.plan.blueprint import DEMO_NAME
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError
from epd_serve.slo import Slo

QUICK_REQUESTS = 24


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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, or 1 where a rate is not valid.

    Raises:
        StageError: the endpoint is gone, or AISBench measured nothing at a rate; those before it are kept.
    """
    check_shared(arguments)
    if arguments.workload is None:
        raise ConfigError("say what to send: --workload NAME", param="--workload")
    if arguments.quick and arguments.n is None:
        arguments.n = QUICK_REQUESTS
    rates = parse_rates(arguments.rates, "--rates")
    if len(set(rates)) < len(rates):
        raise ConfigError(f"--rates {arguments.rates}: each rate once", param="--rates")
    wanted, key = workload(arguments.workload, arguments), _key(arguments.api_key_file)
    plan = Plan(
        Poisson(1.0),  # each run has its own
        count=wanted.count,
        slos=arguments.slo,
        devices=arguments.devices,
        rules=rules_of(arguments),
        bounds=Bounds(limit_s=arguments.timeout),
    )
    target = Target(arguments.url, {"authorization": f"Bearer {key}"} if key else {})
    model, tokenizer = _model(target, target.served(), arguments.model, arguments.tokenizer)
    shape = look(target, model)
    bench = environment(arguments.venv)
    check_tokenizer(bench, tokenizer)
    env = record_environment(argv, kind=arguments.kind, asked=arguments)
    env["load"] = {
        "client": f"AISBench {bench.version}",
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload,
        "requests_of_a_rate": wanted.count,
        "seed": arguments.seed,
        "devices": plan.devices,
        "slos": [str(slo) for slo in plan.slos],
        "chunks_before_content": shape.before,
    }
    results = Results(arguments.json, "--json", env)
    entry = Entry(str(target.endpoint), model, tokenizer, api_key=key)
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    rated: list[Rated] = []
    with _folder(arguments.out) as folder, RecordsFile(rows_path) if rows_path else contextlib.nullcontext() as rows:
        for number, rate in enumerate(rates):
            specs = list(wanted.seeded(wanted.knobs.seed + number).at(Poisson(rate)).requests())  # new ones each time
            own, images = folder / f"rate-{rate:g}", Images(arguments.cache)
            print(f"{label_of(rate)}: {wanted.count} requests by AISBench …", file=sys.stderr)
            rated.append(measure_rate(plan, entry, shape, bench, specs, rate, own, images))
            _keep(rated, plan, results, rows)
            if rated[-1].measured.run.stopped:
                break
            if "unreachable" in faults(rated[-1].measured.run.rows):
                target.served()
    wrong = [one.text for each in rated for one in each.measured.objections]
    if wrong:
        print(f"epd-bench: not valid: {wrong[0]}", file=sys.stderr)
    return int(bool(wrong))


def _keep(rated: Sequence[Rated], plan: Plan, results: Results, rows: RecordsFile | None) -> None:
    """The last rate told and written down, with the goodput of all so far."""
    last, measured = rated[-1], rated[-1].measured
    print("\n" + run_text(measured, plan.slos))
    if rows is not None:
        for row in measured.run.rows:
            rows.keep(row)
    for slo in plan.slos:
        goodput = goodput_rps(rated, slo)
        results.figures[f"goodput/slo_{slo}/rps"] = goodput
        print(f"  goodput so far for {GOOD_SHARE:.0%} within {slo}: {goodput:g} requests/s", flush=True)
        if plan.devices:
            results.figures[f"goodput/slo_{slo}/rps_per_device"] = goodput / plan.devices
    figures = {measured.run.label: {**measured.figures, "aisbench": last.own}}
    results.keep({**measured.row(), "aisbench": dict(last.own)}, flatten(figures))


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


def _model(
    target: Target, served: Sequence[tuple[str, str]], named: str | None, tokenizer: Path | None
) -> tuple[str, Path]:
    """The model to ask for, and where its tokenizer lies: AISBench needs one when all is over, so it is said before.

    Raises:
        ConfigError: there is none.
    """
    if named is None and not served:
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    model = named or served[0][0]
    root = next((root for name, root in served if name == model), "")
    if tokenizer is None and model == DEMO_NAME:
        tokenizer = Path(builtin_model_dir())
    if tokenizer is None:
        if not root or not Path(root).is_dir():
            raise ConfigError(
                f"say --tokenizer DIR: AISBench needs the model's tokenizer, and {target.endpoint} does not say where "
                f"{model!r} lies on this machine",
                param="--tokenizer",
            )
        tokenizer = Path(root)
    return model, tokenizer.absolute()


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where AISBench's files go: to be kept, or for as long as the context."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="epd-bench-aisbench-") as name:
            yield Path(name)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}", param="--out") from error
    if taken:
        raise ConfigError(f"--out {out} is not empty: old results would be taken for new ones", param="--out")
    yield out.absolute()


def goodput_rps(rated: Sequence[Rated], slo: Slo, target: float = GOOD_SHARE) -> float:
    """The highest rate of a valid and steady run in which enough requests attain `slo`; 0 for none."""
    met = [
        one.rate_rps
        for one in rated
        if one.measured.valid
        and not one.measured.grows
        and one.measured.figures.get(f"slo_{slo}", {}).get("attainment", 0.0) >= target
    ]
    return max(met, default=0.0)
