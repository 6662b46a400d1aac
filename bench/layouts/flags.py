"""The flags of `epd-bench layouts`, and the experiment that they ask for. Reads the machine, starts nothing."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.client.flags import arrivals_at, parse_rates
from bench.client.run import Bounds
from bench.client.slo import PAPER, parse_slos
from bench.client.validity import Rules
from bench.layouts.entry import How, entries
from bench.layouts.experiment import Experiment
from bench.layouts.judged import Judged
from bench.record import add_arguments as add_record_arguments
from bench.workloads.workload import add_content_arguments
from deploy.engines import checked_profile
from epd_serve.demo.presets import PRESETS
from epd_serve.errors import ConfigError

LAYOUTS = "TP1x2,(E-PD)x2,EP-D,(E-P)-D,(E-D)-P,E-P-D"
RATES, QUICK_RATES = "0.4,0.8,1.2", "0.5,1"
DURATION_S, QUICK_S = 60.0, 10.0
MIN_SAMPLES, QUICK_SAMPLES = 10, 3
LATE_MS = 100.0
"""More than `epd-bench load` allows: here the generator always shares the host of the stages."""
BASELINES = ("vllm",)
EMULATED_RATES, EMULATED_QUICK_RATES = "2-12:2", "10"
EMULATED_COUNT = 512  # EPD-Serve §4.1


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument("--layouts", default=LAYOUTS, help=f"with commas between (default {LAYOUTS})")
    what.add_argument(
        "--baselines", default="", metavar="NAMES", help="vllm: plain vLLM, a server per device, at each device count"
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
    sent.add_argument("--seed", type=int, default=0, help="another seed, other texts, pictures and arrivals")
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


def kind_of(arguments: argparse.Namespace) -> str:
    """What figures are (design §6)."""
    if arguments.emulate:
        return str(emulation(arguments.emulate).kind)
    return "real" if arguments.engine == "vllm" else "simulated"


def emulation(device: str, *more: Any) -> Any:
    """Returns the emulation's `backend`, looked up by name: it imports the types of an experiment from here."""
    return importlib.import_module("bench.papers.emulation.backend").backend(device, *more)


def experiment_of(arguments: argparse.Namespace, env: Mapping[str, Any]) -> Experiment:
    """What is asked, on the machine of `env`. Raises ConfigError naming the flag at fault, LayoutError with a caret."""
    quick, seconds = arguments.quick, arguments.duration
    for flag in ("duration", "n", "timeout", "min_samples", "late_ms"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}: above 0", param=f"--{flag}")
    if arguments.warm_up is not None and not 0 <= arguments.warm_up < float("inf"):
        raise ConfigError(f"--warm-up is {arguments.warm_up:g}: 0 or more", param="--warm-up")
    count, usual = arguments.n, QUICK_RATES if quick else RATES
    if arguments.emulate:
        usual = EMULATED_QUICK_RATES if quick else EMULATED_RATES
    if seconds is None and count is None:
        seconds, count = (None, EMULATED_COUNT) if arguments.emulate else (QUICK_S if quick else DURATION_S, None)
    rates = parse_rates(arguments.rates or usual, "--rates")
    if len(set(rates)) < len(rates):
        raise ConfigError(f"--rates names a rate twice: {arguments.rates}", param="--rates")
    at = arrivals_at(arguments.arrivals)
    at(rates[0])  # what is wrong with the form is said now
    judged = judged_of(arguments)
    return Experiment(
        kind=kind_of(arguments),
        workload=arguments.workload,
        rates=tuple(rates),
        per_device=arguments.rates_per_device,
        entries=entries(
            arguments.layouts,
            flags=_words(arguments, "serve_flags"),
            vllm="vllm" in _baselines(arguments.baselines),
            vllm_flags=_words(arguments, "vllm_flags"),
            peers=tuple(scripts_of(arguments)),
        ),
        at=at,
        arrivals=arguments.arrivals,
        seconds=seconds,
        count=count,
        seed=arguments.seed,
        slos=parse_slos(arguments.slo) if arguments.slo else PAPER,
        knobs=_knobs(arguments),
        served=_served(arguments),
        judged={
            "timeout_s": judged.bounds.limit_s,
            "warm_up_s": judged.warm_up_s,
            "min_samples": judged.rules.min_samples,
            "late_ms": judged.rules.late_ms,
        },
        machine={name: env["machine"][name] for name in ("arch", "cpu", "cores")},
        versions=env["versions"],
    )


def judged_of(arguments: argparse.Namespace) -> Judged:
    samples = arguments.min_samples or (QUICK_SAMPLES if arguments.quick else MIN_SAMPLES)
    return Judged(Rules(samples, arguments.late_ms), Bounds(limit_s=arguments.timeout), arguments.warm_up)


def scripts_of(arguments: argparse.Namespace) -> dict[How, Path]:
    """The example proxies that are given. Raises ConfigError where one cannot be read."""
    given = {How.PEER_VLLM: arguments.peer_vllm, How.PEER_ASCEND: arguments.peer_ascend}
    for how, path in given.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"--{how.value} {path}: there is no such file", param=f"--{how.value}")
    return {how: path for how, path in given.items() if path is not None}


def _baselines(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in BASELINES:
            raise ConfigError(
                f"--baselines {word}: {', '.join(BASELINES)} (EP-D is a layout, the example proxies are --peer-vllm "
                "and --peer-ascend)",
                param="--baselines",
            )
    return found


def _words(arguments: argparse.Namespace, name: str) -> tuple[str, ...]:
    text, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}", param=flag) from error


def _knobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the workload, those that are not as ever."""
    usual = {"reuse": 0.0, "zipf": 1.0}
    names = ("reuse", "zipf", "pictures_each", "output_tokens", "tokenizer", "pictures", "prompts")
    values = {name: getattr(arguments, name) for name in names}
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None and value != usual.get(name)
    }


def _served(arguments: argparse.Namespace) -> dict[str, Any]:
    """Engine, device, model; a profile by its content."""
    if arguments.emulate:
        return {"emulate": arguments.emulate, "constants": emulation(arguments.emulate).constants}
    if arguments.engine == "sim":
        profile = checked_profile("sim", arguments.sim_profile)
        return {"engine": "sim", "sim_profile": _digest(Path(profile)) if profile else ""}
    model = str(Path(arguments.model).resolve()) if arguments.model else f"preset {arguments.preset}"
    checked_profile("vllm", arguments.sim_profile)
    return {"engine": "vllm", "device": arguments.device, "model": model}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
