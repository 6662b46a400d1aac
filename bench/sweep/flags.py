"""The flags of `epd-bench layouts`, and the experiment that they ask for. Reads the machine, starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.clients.flags import arrivals_at, parse_rates
from bench.clients.slo import PAPER, parse_slos
from bench.record import add_arguments as add_record_arguments
from bench.scratch import scratch
from bench.sweep.backend import Backend, emulated
from bench.sweep.deployments import ServedBy, deployments
from bench.sweep.experiment import Experiment, RunLimits
from bench.sweep.requests import SentRequests
from bench.sweep.stages import Stages
from bench.workloads.images import Images
from bench.workloads.workload import add_content_arguments, workload
from deploy.engines import checked_profile
from epd_serve.demo.presets import PRESETS, builtin_model_dir, write_preset
from epd_serve.errors import ConfigError

LAYOUTS = "TP1x2,(E-PD)x2,EP-D,(E-P)-D,(E-D)-P,E-P-D"
RATES, QUICK_RATES = "0.4,0.8,1.2", "0.5,1"
EMULATED_RATES, EMULATED_QUICK_RATES = "2-12:2", "10"
DURATION_S, QUICK_S = 60.0, 10.0
MIN_SAMPLES, QUICK_SAMPLES = 10, 3
LATE_MS = 100.0
"""More than `epd-bench load` allows: here the generator always shares the host of the stages."""
EMULATED_COUNT = 512  # EPD-Serve §4.1
KNOBS = {"reuse": 0.0, "zipf": 1.0, "pictures_each": None, "output_tokens": None}
KNOBS |= {"tokenizer": None, "pictures": None, "prompts": None}
"""Flags of a workload with their defaults; an experiment keeps those that differ."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument("--layouts", default=LAYOUTS, help=f"with commas between (default {LAYOUTS})")
    what.add_argument(
        "--baselines", choices=("vllm",), help="plain vLLM too, a server per device, at each device count"
    )
    what.add_argument("--vllm-flags", default="", metavar="TEXT", help="for plain vLLM: its best flags on this machine")
    what.add_argument("--peer-vllm", type=Path, metavar="FILE", help="vLLM's example proxy, over layouts of E and PD")
    what.add_argument("--peer-ascend", type=Path, metavar="FILE", help="vllm-ascend's, likewise")
    what.add_argument("--serve-flags", default="", metavar="TEXT", help="more of `epd-serve serve`, for each layout")
    where = parser.add_argument_group("what serves them")
    where.add_argument("--model", default="", metavar="DIR", help="default: the preset")
    where.add_argument("--preset", default="bench", choices=PRESETS, help="a model made on the spot (default bench)")
    where.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    where.add_argument("--engine", default="vllm", choices=("vllm", "sim"), help="sim: simulated stages")
    where.add_argument("--sim-profile", default="", metavar="FILE", help="of simulated stages")
    where.add_argument(
        "--emulate", default="", metavar="DEVICE", help="910b: nothing runs, layouts on such devices in virtual time"
    )
    sent = parser.add_argument_group("what is sent")
    sent.add_argument("--workload", default="sharegpt4o-like", metavar="NAME", help="of `epd-bench workload --list`")
    add_content_arguments(sent)
    sent.add_argument(
        "--rates", help=f"requests a second, as R,R,… or FROM-TO[:STEP] (default {RATES}, quick {QUICK_RATES})"
    )
    sent.add_argument("--rates-per-device", action="store_true", help="--rates are of each device (EPD-Serve §4.1)")
    sent.add_argument("--arrivals", default="poisson", metavar="FORM", help="poisson, gamma:CV, trace:FILE")
    sent.add_argument("--duration", type=float, metavar="S", help=f"of a run (default {DURATION_S:g} s; none with --n)")
    sent.add_argument("--n", type=int, help="requests of a run, instead of or beside --duration")
    sent.add_argument("--seed", type=int, default=0, help="another seed, other texts, images and arrivals")
    sent.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of one request (default 120 s)")
    judged = parser.add_argument_group("how it is judged")
    judged.add_argument("--slo", help="TTFT:TPOT in ms, several with commas (default the papers' three)")
    judged.add_argument("--warm-up", type=float, metavar="S", help="of a run, not counted (default a tenth of it)")
    judged.add_argument("--min-samples", type=int, help=f"good answers that a run needs (default {MIN_SAMPLES})")
    judged.add_argument("--late-ms", type=float, default=LATE_MS, help="by which the generator may be late")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; a second call goes on there")
    kept.add_argument("--fresh", action="store_true", help="begin anew in --out: what it holds is removed")
    quick = f"rates {QUICK_RATES}, {QUICK_S:g} s each: six layouts within 8 minutes on two cores"
    add_record_arguments(parser, quick=quick)


def experiment_of(arguments: argparse.Namespace, backend: Backend, env: Mapping[str, Any]) -> Experiment:
    """What is asked, on the machine of `env`. Raises ConfigError naming the flag at fault, LayoutError with a caret."""
    quick, duration_s, count = arguments.quick, arguments.duration, arguments.n
    rates = EMULATED_QUICK_RATES if quick else EMULATED_RATES
    if not arguments.emulate:
        rates = QUICK_RATES if quick else RATES
    if duration_s is None and count is None:
        duration_s, count = (None, EMULATED_COUNT) if arguments.emulate else (QUICK_S if quick else DURATION_S, None)
    parsed = parse_rates(arguments.rates or rates, "--rates")
    if len(set(parsed)) < len(parsed):
        raise ConfigError(f"--rates names a rate twice: {arguments.rates}", param="--rates")
    arrivals_at(arguments.arrivals)(parsed[0])  # what is wrong with the form is said now
    knobs = {name: getattr(arguments, name) for name, usual in KNOBS.items() if getattr(arguments, name) != usual}
    return Experiment(
        kind=backend.kind,
        workload=arguments.workload,
        rates=tuple(parsed),
        per_device=arguments.rates_per_device,
        deployments=deployments(
            arguments.layouts,
            flags=_split(arguments, "serve_flags"),
            vllm=arguments.baselines == "vllm",
            vllm_flags=_split(arguments, "vllm_flags"),
            peers=tuple(_scripts(arguments)),
        ),
        arrivals=arguments.arrivals,
        duration_s=duration_s,
        count=count,
        seed=arguments.seed,
        slos=parse_slos(arguments.slo) if arguments.slo else PAPER,
        limits=RunLimits(
            arguments.timeout,
            arguments.warm_up,
            arguments.min_samples or (QUICK_SAMPLES if quick else MIN_SAMPLES),
            arguments.late_ms,
        ),
        knobs={name: str(value.resolve()) if isinstance(value, Path) else value for name, value in knobs.items()},
        served=backend.served,
        machine={name: env["machine"][name] for name in ("arch", "cpu", "cores")},
        versions=env["versions"],
    )


@contextlib.contextmanager
def backend_of(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[Backend]:
    """How deployments are measured, with the model that they serve, for the time of the context.

    Raises:
        ConfigError: naming the flag at fault.
    """
    for flag in ("duration", "n", "timeout", "min_samples", "late_ms"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}: above 0", param=f"--{flag}")
    if arguments.warm_up is not None and not 0 <= arguments.warm_up < float("inf"):
        raise ConfigError(f"--warm-up is {arguments.warm_up:g}: 0 or more", param="--warm-up")
    requests = workload(arguments.workload, arguments)
    if arguments.emulate:
        yield emulated(arguments.emulate, requests, arguments, argv)
        return
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
        yield Stages(kind, served, sent, tuple(words), _scripts(arguments), argv, arguments)


def _model(arguments: argparse.Namespace, folder: Path) -> str:
    """The model's directory; a preset is made in `folder`."""
    if arguments.model or arguments.preset == "demo":
        return str(arguments.model or builtin_model_dir())
    write_preset(folder / arguments.preset, arguments.preset)
    return str(folder / arguments.preset)


def _scripts(arguments: argparse.Namespace) -> dict[ServedBy, Path]:
    """The example proxies that are given. Raises ConfigError where one cannot be read."""
    scripts = {ServedBy.PEER_VLLM: arguments.peer_vllm, ServedBy.PEER_ASCEND: arguments.peer_ascend}
    given = {peer: path for peer, path in scripts.items() if path is not None}
    for peer, path in given.items():
        if not path.is_file():
            raise ConfigError(f"--{peer} {path}: there is no such file", param=f"--{peer}")
    return given


def _split(arguments: argparse.Namespace, name: str) -> tuple[str, ...]:
    text, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}", param=flag) from error
