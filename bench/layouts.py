"""`epd-bench layouts`: start each layout, load it at each rate, take it down; then draw what differs.

Layouts and baselines are measured one after the other on this machine, with the same requests, and compared per device.
Every rate is kept as it ends: the same command goes on where an interruption left off, and ends with 0 once every
deployment has a valid run of every rate. With --repeats all of it is measured again with the next seed, each time in a
folder of its own. See docs/measuring/layouts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.page import draw, missing_libraries
from bench.clients.flags import (
    QUICK_S,
    add_run_flags,
    add_shared_flags,
    check_shared,
    duration_of,
    parse_rates,
)
from bench.clients.measure import Rules
from bench.clients.sender import Bounds
from bench.record import Record, busy, environment, plain, write
from bench.record import add_arguments as add_record_arguments
from bench.served import scratch
from bench.sweep.compared import over_seeds
from bench.sweep.experiment import LATE_MS, Experiment, deployments
from bench.sweep.stages import SentRequests, Stages
from bench.sweep.store import EXPERIMENT, RESULT, SEED, ResultStore, opened, summary
from bench.workloads.images import Images
from bench.workloads.workload import workload
from deploy.options.engines import checked_profile
from epd_serve.demo.presets import PRESETS, builtin_model_dir, write_preset
from epd_serve.errors import ConfigError, StageError

LAYOUTS = "TP1x2,(E-PD)x2,EP-D,(E-P)-D,(E-D)-P,E-P-D"
RATES, QUICK_RATES = "0.4,0.8,1.2", "0.5,1"
QUICK_SAMPLES = 3
KNOBS = {"reuse": 0.0, "zipf": 1.0, "pictures_each": None, "output_tokens": None}
KNOBS |= {"tokenizer": None}
"""Flags of a workload with their defaults; an experiment keeps those that differ."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument("--layouts", default=LAYOUTS, help=f"with commas between (default {LAYOUTS})")
    what.add_argument(
        "--baselines",
        choices=("vllm", "none"),
        help="vllm: plain vLLM too, a server per device, at each device count (default none, quick vllm)",
    )
    what.add_argument("--vllm-flags", default="", metavar="TEXT", help="for plain vLLM: its best flags on this machine")
    what.add_argument("--serve-flags", default="", metavar="TEXT", help="more of `epd-serve serve`, for each layout")
    where = parser.add_argument_group("what serves them")
    where.add_argument("--model", default="", metavar="DIR", help="default: the preset")
    where.add_argument("--preset", default="bench", choices=PRESETS, help="a model made on the spot (default bench)")
    where.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    where.add_argument("--engine", default="vllm", choices=("vllm", "sim"), help="sim: simulated stages")
    where.add_argument("--sim-profile", default="", metavar="FILE", help="of simulated stages")
    _, when, judged = add_shared_flags(parser, late_ms=LATE_MS, timeout_s=120.0, workload="sharegpt4o-like")
    add_run_flags(when, judged)
    when.add_argument(
        "--rates", help=f"requests a second, as R,R,… or FROM-TO[:STEP] (default {RATES}, quick {QUICK_RATES})"
    )
    when.add_argument("--rates-per-device", action="store_true", help="--rates are of each device (EPD-Serve §4.1)")
    when.add_argument("--repeats", type=int, default=1, metavar="N", help="all of it with N seeds, from --seed on")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; a second call goes on there")
    quick = f"rates {QUICK_RATES}, {QUICK_S:g} s each: six layouts and plain vLLM within 16 minutes on two cores"
    add_record_arguments(parser, quick=quick)


def experiment_of(arguments: argparse.Namespace, stages: Stages, env: Mapping[str, Any]) -> Experiment:
    """What is asked, on the machine of `env`. Raises ConfigError naming the flag at fault, LayoutError with a caret."""
    quick = arguments.quick
    parsed = parse_rates(arguments.rates or (QUICK_RATES if quick else RATES), "--rates")
    if len(set(parsed)) < len(parsed):
        raise ConfigError(f"--rates names a rate twice: {arguments.rates}", param="--rates")
    knobs = {name: getattr(arguments, name) for name, usual in KNOBS.items() if getattr(arguments, name) != usual}
    return Experiment(
        kind=stages.kind,
        workload=arguments.workload,
        rates=tuple(parsed),
        per_device=arguments.rates_per_device,
        deployments=deployments(
            arguments.layouts,
            flags=_split(arguments, "serve_flags"),
            vllm=(arguments.baselines or ("vllm" if quick else "none")) == "vllm",
            vllm_flags=_split(arguments, "vllm_flags"),
        ),
        duration_s=duration_of(arguments),
        count=arguments.n,
        seed=arguments.seed,
        slos=arguments.slo,
        warm_up_s=arguments.warm_up,
        rules=Rules(arguments.min_samples or (QUICK_SAMPLES if quick else Rules().min_samples), arguments.late_ms),
        bounds=Bounds(limit_s=arguments.timeout),
        knobs={name: str(value.resolve()) if isinstance(value, Path) else value for name, value in knobs.items()},
        served=stages.served,
        machine={name: env["machine"][name] for name in ("arch", "cpu", "cores")},
        versions=env["versions"],
    )


@contextlib.contextmanager
def stages_of(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[Stages]:
    """How deployments are measured, with the model that they serve, for the time of the context.

    Raises:
        ConfigError: naming the flag at fault.
    """
    check_shared(arguments)
    requests = workload(arguments.workload, arguments)
    with scratch() as folder:
        profile = checked_profile(arguments.engine, arguments.sim_profile)
        sent = SentRequests(requests, Images(arguments.cache), arguments.seed)
        if arguments.engine == "sim":
            kind, words = "simulated", ["--engine", "sim", *(["--sim-profile", profile] if profile else [])]
            digest = hashlib.sha256(Path(profile).read_bytes()).hexdigest()[:16] if profile else ""
            served = {"engine": "sim", "sim_profile": digest}
        else:
            kind, words = "real", [_model(arguments, folder), "--device", arguments.device]
            name = str(Path(arguments.model).resolve()) if arguments.model else f"preset {arguments.preset}"
            served = {"engine": "vllm", "device": arguments.device, "model": name}
        yield Stages(kind, served, sent, tuple(words), argv, arguments)


def _model(arguments: argparse.Namespace, folder: Path) -> str:
    """The model's directory; a preset is made in `folder`."""
    if arguments.model or arguments.preset == "demo":
        return str(arguments.model or builtin_model_dir())
    write_preset(folder / arguments.preset, arguments.preset)
    return str(folder / arguments.preset)


def _split(arguments: argparse.Namespace, name: str) -> tuple[str, ...]:
    text, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}", param=flag) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure what is missing, keep it, draw it. Returns 0, 1 where something is missing or not valid, 128 + signal."""
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}: 1 or more", param="--repeats")
    if arguments.repeats == 1:
        code, _ = _sweep(arguments, argv)
        return code
    if (arguments.out / EXPERIMENT).exists():
        raise ConfigError(f"{arguments.out} holds an experiment of one seed; name another folder", param="--out")
    failed, each, rows = 0, [], []
    for seed in range(arguments.seed, arguments.seed + arguments.repeats):
        own = {"seed": seed, "out": arguments.out / f"{SEED}{seed}", "json": None}
        code, found = _sweep(argparse.Namespace(**{**vars(arguments), **own}), argv)
        if code >= 128:
            return code
        failed |= code
        each.append(found.figures)
        rows += [{"seed": seed, **row} for row in found.rows]
    env = {**found.env, "asked": plain(arguments), "seeds": arguments.repeats}
    for path, flag in ((arguments.out / RESULT, "--out"), (arguments.json, "--json")):
        write(path, over_seeds(each), env, rows, flag)
    if rows and not missing_libraries():
        draw(arguments.out)
    return failed


def _sweep(arguments: argparse.Namespace, argv: Sequence[str]) -> tuple[int, Record]:
    """One seed: the exit code, and what there is of it."""
    with stages_of(arguments, argv) as stages:
        env = environment(argv, stages.kind, arguments)
        experiment = experiment_of(arguments, stages, env)
        stages.check(experiment)
        if warning := busy(env):
            print(warning, file=sys.stderr)
        with opened(arguments.out, experiment) as stores:
            ended_by = _measure(experiment, stages, stores)
            found = summary(experiment, stores, env)
            for path, flag in ((arguments.out / RESULT, "--out"), (arguments.json, "--json")):
                write(path, found.figures, found.env, found.rows, flag)
            if missing := missing_libraries():
                print(f"not drawn: {missing}; then `epd-bench report {arguments.out}`", file=sys.stderr)
            elif found.rows and not ended_by:
                draw(arguments.out)
    if ended_by:
        print("epd-bench: interrupted; what was measured is kept, the same command goes on", file=sys.stderr)
        return 128 + ended_by, found
    return _report_gaps(experiment, stores), found


def _measure(experiment: Experiment, stages: Stages, stores: Sequence[ResultStore]) -> int:
    """All deployments, as far as they go. Returns the signal that ended it, else 0."""
    try:
        for at, store in enumerate(stores, 1):
            title, missing = f"[{at}/{len(stores)}] {store.deployment.label}", store.missing(experiment)
            print(f"\n{title}: {', '.join(run.label for run in missing) or 'measured already'}", flush=True)
            if not missing:
                continue
            try:
                stages.measure(experiment, store)
            except StageError as error:
                store.fail(error.message)
                print(f"{title}: {error.message}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return signal.SIGINT
    except SystemExit as ended:  # of a signal: `bench/cli.py`
        return int(ended.code or 0) - 128
    return 0


def _report_gaps(experiment: Experiment, stores: Sequence[ResultStore]) -> int:
    """What is missing or not valid, a line each; the exit code."""
    gaps: list[str] = []
    for store in stores:
        name, rows = store.deployment.name, store.rows
        gaps += [f"{name}, {run.label}: not measured. {store.failure}" for run in store.missing(experiment)]
        gaps += [f"{name}, {row['run']}: not valid. {row['objections'][0]}" for row in rows if not row["valid"]]
    for gap in gaps:
        print(f"epd-bench: {gap}", file=sys.stderr)
    return 1 if gaps else 0
