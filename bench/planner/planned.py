"""`epd-bench plan`: what the planner predicts, beside what real stages do.

Three workloads that were fixed before anything was measured, five layouts of two devices and plain vLLM, rates as
shares of what the monoliths are predicted to serve. First everything is predicted and written down, then seeds are
drawn, then each layout is measured as `epd-bench layouts` does it, once with each seed. Objectives are multiples of
what a request takes alone, by the profile; each workload names who judges the gaps.

A case is a workload with an objective. Goodput is requests a second within the objective, at the best rate.

    first_choice_over_best_worst  the planner's first choice over the best measured one, the worst case
    first_choice_held             cases in which it is within 5 % of the best, or their 90 % intervals meet
    constant_over_best_worst      the worst case of the best constant answer: one layout, whatever the case
    first_choice_over_monolith_worst  over TP1x2, the worst case
    best_layout_over_vllm         the best layout over plain vLLM, median of the cases
    best_layout_over_monolith     the same over TP1x2, of the largest case whose intervals are apart; 1 where none are
    …_error_median, …_error_p90   relative errors of medians and of P90s, below 0.9 of a layout's capacity
    …_repeat_median               of one seed's medians over another's: what no prediction can be better than
    goodput_rank_correlation      Kendall's, over pairs of layouts whose 90 % intervals are apart
    plan_s_8, plan_s_64           seconds of `epd-serve plan` for so many devices
    day_128_s                     seconds of a simulated day at 128 devices (with --quick only by --day)
"""

from __future__ import annotations

import argparse
import itertools
import math
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench import layouts as sweep
from bench.clients.results import RequestRecord, read_records
from bench.clients.slo import attains
from bench.micro.measurement import Goal, Row, goal_table
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, kept, write
from bench.served import scratch
from bench.statistic import percentile
from bench.sweep.experiment import deployments
from bench.sweep.store import ROWS
from bench.workloads.generate import Knobs
from bench.workloads.requests import Poisson, with_arrivals
from bench.workloads.traffic import Tokens, traffic_of
from bench.workloads.workload import Workload
from deploy.memory.placement_table import table
from deploy.memory.sizing import processor_configs
from deploy.planner.profile import DeviceProfile, read_device_profile
from deploy.planner.simulate import Simulated, simulate
from epd_serve.demo.presets import write_preset
from epd_serve.image_tokens import image_tokens
from epd_serve.layout_parser import parse
from epd_serve.slo import JUDGE, Slo
from epd_serve.traffic import Request

WORKLOADS = {"images-short-answers": "p90", "long-prompts": "p99", "long-answers": "p99"}
"""Who judges the gaps: short answers have hardly enough for a P99."""
LAYOUTS = ("TP1x2", "(E-PD)x2", "EP-D", "(E-P)-D", "E-PD")
MONOLITH, VLLM = "TP1x2", "plain vLLM x2"
FACTORS = (3.0, 5.0, 10.0)
"""Of what a request takes alone: an objective each."""
SHARES, QUICK_SHARES = (0.5, 0.8, 1.1), (0.9,)
"""Of what the monoliths are predicted to serve within the loosest objective: rates."""
DURATION_S, QUICK_S = 60.0, 25.0
LEAST_REQUESTS, QUICK_LEAST = 40, 24
"""A run is longer where that would be fewer requests."""
SEEDS, DRAWN, QUICK_DRAWN = 4, 2, 1
PLANNED = "images=1@802x652,text=32,output=128"
PLANNED_SLO = "4000:200"
"""Of the plans whose time is taken: objectives that a slow core keeps, too."""
BELOW = 0.9
"""Of a device's time, that a layout may be busy in a prediction whose error counts: beyond it queues grow for ever."""
WITHIN = 0.95
"""Of the best measured goodput, from which on a first choice counts as right."""
KINDS = ("ttft", "tpot", "e2e")
DRAWS, COVERED = 500, (5, 95)
GOALS = (
    Goal("first_choice_over_best_worst", ">=", 0.95),
    Goal("first_choice_held", ">=", 1.0),
    Goal("first_choice_over_monolith_worst", ">=", 0.98),
    Goal("best_layout_over_vllm", ">=", 1.3),
    Goal("best_layout_over_monolith", ">=", 1.1),
    Goal("ttft_error_median", "<=", 0.15),
    Goal("tpot_error_median", "<=", 0.15),
    Goal("e2e_error_median", "<=", 0.07),
    Goal("goodput_rank_correlation", ">=", 0.9),
    Goal("plan_s_8", "<=", 10),
    Goal("plan_s_64", "<=", 60),
    Goal("day_128_s", "<=", 600),
)


@dataclass(frozen=True)
class Case:
    """A workload with its rates and objectives, and how long its runs are."""

    workload: str
    rates: tuple[float, ...]
    slos: tuple[Slo, ...]
    duration_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help="of `epd-serve profile` here")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), metavar="NAMES", help="with commas between")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="with commas between; TP1x2 among them")
    parser.add_argument(
        "--duration", type=float, metavar="S", help=f"of a run (default {DURATION_S:g}, quick {QUICK_S:g})"
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"of a run at least, which may make it longer (default {LEAST_REQUESTS}, quick {QUICK_LEAST})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        help=f"of real requests (default: {DRAWN}, quick {QUICK_DRAWN}, drawn once all is predicted)",
    )
    parser.add_argument("--preset", default="bench", help="the model, as of `epd-bench layouts`")
    parser.add_argument("--vllm-flags", default="", metavar="TEXT", help="as of `epd-bench layouts`")
    parser.add_argument(
        "--serve-flags",
        default="",
        metavar="TEXT",
        help="as of `epd-bench layouts`: what the profile was made with, too",
    )
    parser.add_argument("--only", choices=("predict", "speed"), help="only predictions, or only how fast plans are")
    parser.add_argument("--day", action="store_true", help="the day at 128 devices with --quick, too")
    add_record_arguments(
        parser, quick=f"one rate, runs of {QUICK_S:g} s, no day at 128 devices: one seed, some 20 minutes"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Returns 0; 1 where a layout could not be measured."""
    env = environment(argv, "real stages beside simulated ones", arguments)
    profile = read_device_profile(arguments.profile)
    duration_s = arguments.duration or (QUICK_S if arguments.quick else DURATION_S)
    least = arguments.requests or (QUICK_LEAST if arguments.quick else LEAST_REQUESTS)
    figures: dict[str, float] = {}
    rows: list[Row] = []
    failed = 0
    with kept(arguments.json, env, rows), scratch() as folder:
        if arguments.only != "speed":
            write_preset(folder / arguments.preset, arguments.preset)
            model = Model.of(folder / arguments.preset)
            names = arguments.layouts.split(",")
            cases = [
                case_of(name, model, profile, duration_s, least, quick=arguments.quick)
                for name in arguments.workloads.split(",")
            ]
            for case in cases:
                rows += predicted(case, names, model, profile)
            print(_table(rows), flush=True)
            if arguments.json is not None:  # before anything is measured
                write(arguments.json.with_suffix(".predicted.json"), {"cases": float(len(cases))}, env, rows)
        if arguments.only is None:
            drawn = QUICK_DRAWN if arguments.quick else DRAWN
            seeds = arguments.seeds or [secrets.randbelow(1 << 31) for _ in range(drawn)]
            env["seeds_drawn"] = seeds
            for case in cases:
                failed += measured(case, model, rows, arguments, folder / case.workload, seeds)
            figures |= compared(rows)
        if arguments.only != "predict":
            timed = speed(arguments.profile, day=arguments.day or not arguments.quick)
            figures |= speed_figures(timed)
    print(f"{_table(rows)}\n\n{goal_table(figures, GOALS)}")
    write(arguments.json, figures, env, [*rows, *timed])
    return 1 if failed else 0


# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What requests become at it. template_tokens: of its chat template."""

    folder: Path
    tokens: Tokens
    template_tokens: int

    @classmethod
    def of(cls, folder: Path) -> Model:
        from transformers import AutoTokenizer  # with vLLM; takes seconds

        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "what"}], add_generation_prompt=True, tokenize=False
        )
        text = len(tokenizer("what", add_special_tokens=False).input_ids)
        whole = len(tokenizer(asked, add_special_tokens=False).input_ids)
        return cls(folder, image_tokens(processor_configs(folder)).tokens, whole - text)

    def traffic(self, workload: str, rate_rps: float, seed: int, duration_s: float) -> list[Request]:
        """What a run at this rate consists of."""
        endless = Workload(workload, 1, Knobs(seed), tokenizer=self.folder).endless()
        due = with_arrivals(endless, Poisson(rate_rps), seed)
        own = itertools.takewhile(lambda one: (one.arrival_s or 0.0) < duration_s, due)
        return [traffic_of(one, self.tokens, template_tokens=self.template_tokens) for one in own]


def case_of(workload: str, model: Model, profile: DeviceProfile, duration_s: float, least: int, *, quick: bool) -> Case:
    """Objectives from what requests take alone at a monolith; rates from what monoliths then serve of them."""
    alone = simulate(parse(MONOLITH), profile, model.traffic(workload, 1 / 60, 0, 3600.0))
    ttft_s, tpot_s, _ = (statistics.median(values) for values in times(alone).values())
    judge = WORKLOADS.get(workload, JUDGE)
    slos = tuple(Slo(round(1e3 * factor * ttft_s), max(1, round(1e3 * factor * tpot_s)), judge) for factor in FACTORS)
    low, high = 1 / 60, 1.0
    while _holds(workload, model, high, profile, slos[-1]):
        low, high = high, high * 2
    while high > low * 1.05:
        middle = (low + high) / 2
        low, high = (middle, high) if _holds(workload, model, middle, profile, slos[-1]) else (low, middle)
    rates = tuple(float(f"{share * low:.2g}") for share in (QUICK_SHARES if quick else SHARES))
    return Case(workload, rates, slos, max(duration_s, math.ceil(least / rates[0])))


def _holds(workload: str, model: Model, rate_rps: float, profile: DeviceProfile, slo: Slo) -> bool:
    requests = model.traffic(workload, rate_rps, 0, max(120.0, 200 / rate_rps))
    return simulate(parse(MONOLITH), profile, requests, slos=(slo,)).attained(0) >= BELOW


def times(run: Simulated) -> dict[str, list[float]]:
    """Seconds of each request by kind."""
    return {
        "ttft": [one.ttft_s for one in run.served],
        "tpot": [one.tpot_s for one in run.served if one.tpot_s is not None],
        "e2e": [one.e2e_s for one in run.served],
    }


def predicted(case: Case, names: Sequence[str], model: Model, profile: DeviceProfile) -> Iterator[Row]:
    """A row per layout and rate, over `SEEDS` seeds that no run will have."""
    for name, rate in itertools.product(names, case.rates):
        runs = [
            simulate(parse(name), profile, model.traffic(case.workload, rate, -seed, case.duration_s), slos=case.slos)
            for seed in range(1, SEEDS + 1)
        ]
        found = {kind: [s for run in runs for s in times(run)[kind]] for kind in KINDS}
        yield {
            "workload": case.workload,
            "layout": name,
            "rate_rps": rate,
            "slos": [str(slo) for slo in case.slos],
            "busy": round(max(sum(kinds.values()) for run in runs for kinds in run.busy.values()), 3),
            "attained": [round(statistics.fmean(run.attained(at) for run in runs), 4) for at in range(len(case.slos))],
            **_quantiles(found),
        }


def _quantiles(found: Mapping[str, Sequence[float]], of: str = "predicted") -> Row:
    return {
        f"{of}_{kind}_p{at}_ms": round(1e3 * percentile(values, at), 3)
        for kind, values in found.items()
        for at in (50, 90)
        if values
    }


# --- measurements -----------------------------------------------------------------------------------------------------


def measured(
    case: Case, model: Model, rows: list[Row], arguments: argparse.Namespace, folder: Path, seeds: Sequence[int]
) -> int:
    """Serve each layout and plain vLLM for real; adds to the rows of `case` what came of it. Returns what failed."""
    failed = 0
    for seed in seeds:
        words = ["--layouts", arguments.layouts, "--baselines", "vllm", "--model", str(model.folder)]
        words += ["--tokenizer", str(model.folder)]
        words += [f"--vllm-flags={arguments.vllm_flags}", f"--serve-flags={arguments.serve_flags}"]
        words += ["--workload", case.workload, "--rates", ",".join(map(str, case.rates)), "--seed", str(seed)]
        words += ["--duration", str(case.duration_s), "--slo", ",".join(map(str, case.slos)), "--min-samples", "3"]
        parser = argparse.ArgumentParser()
        sweep.add_arguments(parser)
        asked = parser.parse_args([*words, "--out", str(folder / str(seed))])
        code = sweep.run(asked, ["layouts", *words])
        if code >= 128:
            raise KeyboardInterrupt
        failed += code
    for one in deployments(arguments.layouts, vllm=True):
        paths = [folder / str(seed) / one.slug / ROWS for seed in seeds]
        by_seed = [read_records(path) if path.exists() else [] for path in paths]
        for rate in case.rates:
            own = [[record for record in records if record.run == f"{rate:g} rps"] for records in by_seed]
            about = {"workload": case.workload, "layout": one.name, "rate_rps": rate}
            row = next((each for each in rows if about.items() <= each.items()), None)
            if row is None:  # plain vLLM, which nobody predicts
                row = {**about, "slos": list(map(str, case.slos))}
                rows.append(row)
            row |= _measured_row(list(itertools.chain(*own)), case)
            row["repeats"] = [_quantiles(_times_of(each), "seed") for each in own]
    return failed


def _times_of(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of those that were answered whole, by kind."""
    good = [one for one in records if one.ok]
    return {
        "ttft": [one.ttft_s for one in good if one.ttft_s is not None],
        "tpot": [one.tpot_s for one in good if one.tpot_s is not None],
        "e2e": [one.e2e_s for one in good],
    }


def _measured_row(records: Sequence[RequestRecord], case: Case) -> Row:
    if not records:
        return {}
    kept_by = [[attains(one, slo) for one in records] for slo in case.slos]
    rng = np.random.default_rng(0)
    draws = [np.mean(np.array(one)[rng.integers(len(one), size=(DRAWS, len(one)))], axis=1) for one in kept_by]
    return {
        "requests": len(records),
        "measured_attained": [round(float(np.mean(one)), 4) for one in kept_by],
        "measured_attained_90": [[round(float(np.percentile(one, at)), 4) for at in COVERED] for one in draws],
        **_quantiles(_times_of(records), "measured"),
    }


# --- both -------------------------------------------------------------------------------------------------------------


def compared(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of rows that were predicted and measured."""
    figures: dict[str, float] = {}
    for at, kind in itertools.product((50, 90), KINDS):
        errors = [
            abs(row[f"predicted_{kind}_p{at}_ms"] / row[f"measured_{kind}_p{at}_ms"] - 1)
            for row in rows
            if row.get("busy", 2.0) <= BELOW and row.get(f"measured_{kind}_p{at}_ms")
        ]
        if errors:
            figures[f"{kind}_error_{'median' if at == 50 else 'p90'}"] = round(statistics.median(errors), 4)
    for kind in KINDS:
        spreads = [
            abs(one[name] / other[name] - 1)
            for row in rows
            for one, other in itertools.combinations(row.get("repeats", ()), 2)
            if (name := f"seed_{kind}_p50_ms") in one and name in other
        ]
        if spreads:
            figures[f"{kind}_repeat_median"] = round(statistics.median(spreads), 4)
    cases = [
        {name: _best(own, name, number) for name in dict.fromkeys(row["layout"] for row in own)}
        for workload in dict.fromkeys(row["workload"] for row in rows)
        if (own := [row for row in rows if row["workload"] == workload and "measured_attained" in row])
        for number in range(len(FACTORS))
    ]
    cases = [best for best in cases if any(one["measured"] for name, one in best.items() if name != VLLM)]
    return figures | _choices(cases) if cases else figures


def _choices(cases: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Figures of cases: by layout, what it serves and what was predicted."""
    figures: dict[str, float] = {}
    shares, held, over_vllm, over_monolith, choice_over_monolith = [], [], [], [1.0], []
    agreeing: list[float] = []
    by_layout: dict[str, list[float]] = {}
    for best in cases:
        ours = {name: one for name, one in best.items() if name != VLLM}
        choice = max(ours.values(), key=lambda one: one["predicted"])
        top = max(ours.values(), key=lambda one: one["measured"])
        shares.append(choice["measured"] / top["measured"])
        held.append(choice["measured"] >= WITHIN * top["measured"] or choice["high"] >= top["low"])
        for name, one in ours.items():
            by_layout.setdefault(name, []).append(one["measured"] / top["measured"])
        if best.get(VLLM, {}).get("measured"):
            over_vllm.append(top["measured"] / best[VLLM]["measured"])
        monolith = ours.get(MONOLITH)
        if monolith is not None and monolith["measured"]:
            choice_over_monolith.append(choice["measured"] / monolith["measured"])
            if top["low"] > monolith["high"]:
                over_monolith.append(top["measured"] / monolith["measured"])
        for one, other in itertools.combinations(ours.values(), 2):
            if one["low"] > other["high"] or other["low"] > one["high"]:
                gap = (one["measured"] - other["measured"]) * (one["predicted"] - other["predicted"])
                agreeing.append(1.0 if gap > 0 else -1.0)
    figures["first_choice_over_best_worst"] = round(min(shares), 4)
    figures["first_choice_over_best_median"] = round(statistics.median(shares), 4)
    figures["first_choice_held"] = round(statistics.fmean(held), 4)
    figures["constant_over_best_worst"] = round(max(min(one) for one in by_layout.values()), 4)
    figures["best_layout_over_monolith"] = round(max(over_monolith), 4)
    if choice_over_monolith:
        figures["first_choice_over_monolith_worst"] = round(min(choice_over_monolith), 4)
    if over_vllm:
        figures["best_layout_over_vllm"] = round(statistics.median(over_vllm), 4)
    if agreeing:
        figures["goodput_rank_correlation"] = round(statistics.fmean(agreeing), 4)
    return figures | {"cases": float(len(cases)), "pairs_apart": float(len(agreeing))}


def _best(rows: Sequence[Row], layout: str, number: int) -> dict[str, float]:
    """Goodput of a layout at its best rate, requests a second: measured, with its 90 % interval, and predicted."""
    own = [row for row in rows if row["layout"] == layout]
    top = max(own, key=lambda row: row["rate_rps"] * row["measured_attained"][number])
    low, high = (top["rate_rps"] * share for share in top["measured_attained_90"][number])
    predicted_rps = max((row["rate_rps"] * row["attained"][number] for row in own if "attained" in row), default=0.0)
    measured_rps = top["rate_rps"] * top["measured_attained"][number]
    return {"measured": measured_rps, "low": low, "high": high, "predicted": predicted_rps}


# --- how fast ---------------------------------------------------------------------------------------------------------

DAY_S, DAY_LAYOUT, DAY_RPS = 86_400.0, "48E-48P-32D", 12.0
DAY_PARTS, SETTLING_S = 2, 600.0
"""Of the day, a process each; what comes in so many seconds before one is simulated with it and not counted: queues are
those of a whole day after that."""
PLAN_WITHIN_S = 600.0


def speed(profile: Path, *, day: bool) -> list[Row]:
    """Seconds of plans for 8 and 64 devices, as a user asks for them; of a day at 128 devices where wanted."""
    rows: list[Row] = []
    for devices in (8, 64):
        words = ["plan", "--profile", str(profile), "--workload", PLANNED, "--slo", PLANNED_SLO]
        command = [sys.executable, "-m", "deploy.cli", *words, "--devices", str(devices)]
        begun = time.monotonic()
        subprocess.run(command, check=True, timeout=PLAN_WITHIN_S, stdout=subprocess.DEVNULL)
        rows.append({"timed": "plan", "devices": devices, "seconds": round(time.monotonic() - begun, 2)})
    if day:
        begun = time.monotonic()
        with ProcessPoolExecutor(DAY_PARTS, get_context("forkserver")) as pool:
            counts = list(pool.map(partial(_part_of_day, profile), range(DAY_PARTS)))
        seconds = round(time.monotonic() - begun, 2)
        devices = parse(DAY_LAYOUT).device_count
        rows.append({"timed": "day", "devices": devices, "seconds": seconds, "requests": sum(counts)})
    return rows


def speed_figures(rows: Sequence[Row]) -> dict[str, float]:
    figures = {}
    for row in rows:
        if row["timed"] == "plan":
            figures[f"plan_s_{row['devices']}"] = row["seconds"]
        else:
            figures[f"day_{row['devices']}_s"] = row["seconds"]
            figures[f"day_{row['devices']}_requests"] = float(row["requests"])
    return figures


def _part_of_day(profile: Path, part: int) -> int:
    """Draw and simulate it. Returns its requests."""
    begin_s, end_s = (DAY_S * each / DAY_PARTS for each in (part, part + 1))
    drawn = Workload("azure-bursty", 1, Knobs(0), sizes_alone=True).endless()
    due = itertools.takewhile(lambda one: (one.arrival_s or 0.0) < end_s, with_arrivals(drawn, Poisson(DAY_RPS), 0))
    requests = [traffic_of(one) for one in due if (one.arrival_s or 0.0) >= begin_s - SETTLING_S]
    run = simulate(parse(DAY_LAYOUT), read_device_profile(profile), requests)
    return sum(one.at_s >= begin_s for one in run.served)


def _table(rows: Sequence[Row]) -> str:
    names = [f"{kind}_p50_ms" for kind in KINDS]
    head = (
        "workload",
        "layout",
        "req/s",
        *(f"{name} predicted / measured" for name in names),
        "within, predicted",
        "measured",
    )
    lines = [head]
    for row in rows:
        cells = [
            f"{row.get(f'predicted_{name}', float('nan')):.4g} / {row.get(f'measured_{name}', float('nan')):.4g}"
            for name in names
        ]
        within = [" ".join(f"{share:.2f}" for share in row.get(name, ())) for name in ("attained", "measured_attained")]
        lines.append((row["workload"], row["layout"], f"{row['rate_rps']:g}", *cells, *within))
    return table(lines)
