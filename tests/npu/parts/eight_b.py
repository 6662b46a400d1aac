"""An 8B model's proportions (EPD-Serve §4.3, §4.7): one card as a monolith and as two and three stages, at some rates.

Random weights in bfloat16: `epd-bench layouts`, which keeps every rate as it ends, so that a second call goes on. 720p
images and text mixed, 64 tokens of answer, over `TP1`: the paper's `(E-PD)` has throughput +12.9 … 14.9 %, TPOT −70 %.
Five images in 9,000 tokens, over plain vLLM: Dynamo reports half the TTFT for E and PD on one device.
On CPU a small model and low rates, to rehearse the lines.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_serve.demo.presets import write_preset
from tests.npu.parts.shares import mps
from tests.npu.rig import Rig

SLO = "2000:50"
ATTAINED = 0.9
LIMIT_S = 540.0  # of one call; what is missing then is the next call's
HOLLOW = "--load-format dummy"
ROOM = 8192  # tokens of a sequence


@dataclass(frozen=True)
class Comparison:
    """Layouts over a `base` at some rates.

    Attributes:
        layouts, rates: with commas between. run: of a rate, how long or how many requests. cpu_*: of a rehearsal.
        more: flags of `epd-bench layouts`. serve: of `epd-serve serve`.
    """

    layouts: str
    cpu_layouts: str
    rates: str
    cpu_rates: str
    run: tuple[str, str]
    cpu_run: tuple[str, str]
    base: str = "TP1"
    workload: str = "visualwebinstruct-like"
    room: int = ROOM
    more: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()


_RATES = ("4,8,12,16", "1,1.5,2,2.5", ("--duration", "10"), ("--duration", "5"))
PLAIN = Comparison("TP1,(E-PD),(E-P-D)", "TP1,(E-PD),(E-P-D)", *_RATES)
SHARED = Comparison(
    "(E-PD),(E-P-D)", "(E-PD)", *_RATES, serve=("--core-share", "auto")
)  # two cores are no three shares
LONG = Comparison(
    "(E-PD),(E-P-D)",
    "(E-PD),(E-P-D)",
    "0.5,1",
    "0.2",
    ("--n", "12"),
    ("--n", "3"),
    base="plain vLLM",
    workload="five-images-9k",
    room=12288,
    more=("--baselines", "vllm"),
)


def plain(rig: Rig) -> None:
    _measure(rig, PLAIN)


def shared(rig: Rig) -> None:
    with mps(rig):
        _measure(rig, SHARED)


def long_prompts(rig: Rig) -> None:
    _measure(rig, LONG)


def model_of(rig: Rig) -> Path:
    """The model in proportion to the card; its folder is made once."""
    preset = "npu" if rig.card.kind == "cpu" else "8b"
    if not (folder := rig.scratch / preset).exists():
        write_preset(folder, preset)
    return folder


def engine_flags(rig: Rig, room: int = ROOM, more: str = "", *, weights: bool = False) -> str:
    """Of vLLM, for the model of `model_of` or one that has `weights`."""
    hollow = "" if weights or rig.card.kind == "cpu" else HOLLOW
    seqs = "" if rig.card.kind == "cpu" or "--max-num-seqs" in more else "--max-num-seqs 64"
    room = min(room, ROOM) if rig.card.kind == "cpu" else room  # the small model has no more positions
    dtype = "--dtype float32" if rig.card.kind == "cpu" else ""  # many have no instructions for bfloat16
    words = [f"--max-model-len {room}", hollow, seqs, dtype, "--enforce-eager" if rig.card.eager else "", more]
    return " ".join(filter(None, words))


def stage_flags(rig: Rig, more: str = "", room: int = ROOM, *, weights: bool = False) -> tuple[str, str]:
    """`--stage-args` for all stages."""
    return "--stage-args", f"all:{engine_flags(rig, room, more, weights=weights)}"


def _measure(rig: Rig, asked: Comparison) -> None:
    on_cpu, out = rig.card.kind == "cpu", rig.folder / "layouts"
    layouts, rates, run = (
        (asked.cpu_layouts, asked.cpu_rates, asked.cpu_run) if on_cpu else (asked.layouts, asked.rates, asked.run)
    )
    command = [sys.executable, "-m", "bench.cli", "layouts", "--layouts", layouts, "--device", rig.card.kind]
    model = str(model_of(rig))
    command += [
        "--model",
        model,
        "--tokenizer",
        model,
        "--workload",
        asked.workload,
        "--rates",
        rates,
        *run,
        *asked.more,
    ]
    command += ["--serve-flags", shlex.join([*stage_flags(rig, room=asked.room), *asked.serve])]
    command += [f"--vllm-flags={engine_flags(rig, asked.room)}"] if "--baselines" in asked.more else []
    command += ["--warm-up", "1", "--min-samples", "2", "--slo", SLO, "--out", str(out)]
    command += [*(["--output-tokens", "16"] if on_cpu else [])]
    code = rig.run(command, LIMIT_S)
    result = out / "result.json"
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    for failed in sorted(out.glob("*/failed.json")):
        rig.check(False, f"{failed.parent.name} is measured", failed.read_text()[:2000])
    _say(rig, rows, asked)
    rig.check(code == 0, "every layout has a valid run at every rate", "log.txt says which has not")


def _say(rig: Rig, rows: list[dict[str, Any]], asked: Comparison) -> None:
    bases = {row["rate"]: row for row in rows if row["deployment"] == asked.base}
    flags, goodput = " ".join(asked.serve), dict[str, float]()
    for row in rows:
        name = row["deployment"]
        goodput.setdefault(name, 0.0)
        if (row[f"slo_{SLO}:p90"]["attainment"] or 0.0) >= ATTAINED:
            goodput[name] = max(goodput[name], row["rate"])
        with rig.layout("TP1" if name == asked.base else name):
            rig.row(f"{name} at {row['rate']:g}/s", figures_of(row), flags=flags)
            base = bases.get(row["rate"])
            if base is not None and row is not base and row.get("tpot_ms") and base.get("tpot_ms"):
                ratios = {
                    "throughput": _over(row["output_tokens_per_s"], base["output_tokens_per_s"]),
                    "ttft_p50": _over(row["ttft_ms"]["p50"], base["ttft_ms"]["p50"]),
                    "tpot_p50": _over(row["tpot_ms"]["p50"], base["tpot_ms"]["p50"]),
                }
                rig.row(f"{name} over {asked.base} at {row['rate']:g}/s", ratios)
    for name, rate in goodput.items():
        with rig.layout("TP1" if name == asked.base else name):
            rig.row(f"{name}: highest rate with {ATTAINED:.0%} within {SLO} ms", rate, flags=flags)


def figures_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of a run of the load generator, what is shown."""
    spreads = {
        f"{name}_ms_p50_p99": [row[f"{name}_ms"][at] for at in ("p50", "p99")] if row.get(f"{name}_ms") else None
        for name in ("ttft", "tpot")
    }
    told = {"output_tokens_per_s": row["output_tokens_per_s"], "attainment": row[f"slo_{SLO}:p90"]["attainment"]}
    return {**spreads, **told, "ok_of": [row["ok"], row["requests"]], "valid": row["valid"]}


def _over(value: float, base: float) -> float | None:
    return round(value / base, 3) if base else None
