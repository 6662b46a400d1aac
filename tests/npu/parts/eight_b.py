"""An 8B model's proportions (EPD-Serve §4.3, §4.7): one card as a monolith and as two and three stages, at four rates.

Random weights in bfloat16, 720p pictures and text mixed, 64 tokens of answer: `epd-bench layouts`, which keeps every
rate as it ends, so that a second call goes on. The paper's `(E-PD)` over `TP1`: throughput +12.9 … 14.9 %, TPOT −70 %.
On CPU a small model and low rates, to rehearse the lines.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from epd_serve.demo.presets import write_preset
from tests.npu.parts.shares import mps
from tests.npu.rig import Rig

TP1 = "TP1"
LAYOUTS, SHARED = f"{TP1},(E-PD),(E-P-D)", "(E-PD),(E-P-D)"
CPU_SHARED = "(E-PD)"  # two cores are no three shares
RATES, CPU_RATES = "4,8,12,16", "1,1.5,2,2.5"
SECONDS, CPU_SECONDS = 10, 5
SLO = "2000:50"
ATTAINED = 0.9
LIMIT_S = 540.0  # of one call; what is missing then is the next call's
STAGE_FLAGS = "--load-format dummy --max-model-len 8192 --max-num-seqs 64"


def plain(rig: Rig) -> None:
    _measure(rig, LAYOUTS, ())


def shared(rig: Rig) -> None:
    with mps(rig):
        _measure(rig, CPU_SHARED if rig.card.kind == "cpu" else SHARED, ("--core-share", "auto"))


def model_of(rig: Rig) -> Path:
    """The model in proportion to the card; its folder is made once."""
    preset = "npu" if rig.card.kind == "cpu" else "8b"
    if not (folder := rig.scratch / preset).exists():
        write_preset(folder, preset)
    return folder


def stage_flags(rig: Rig, more: str = "") -> tuple[str, str]:
    """`--stage-args` for all stages."""
    words = "--max-model-len 8192" if rig.card.kind == "cpu" else STAGE_FLAGS
    eager = " --enforce-eager" if rig.card.eager else ""
    return "--stage-args", f"all:{words}{eager} {more}".rstrip()


def _measure(rig: Rig, layouts: str, more: tuple[str, ...]) -> None:
    on_cpu, out = rig.card.kind == "cpu", rig.folder / "layouts"
    seconds = CPU_SECONDS if on_cpu else SECONDS
    command = [sys.executable, "-m", "bench.cli", "layouts", "--layouts", layouts, "--device", rig.card.kind]
    command += ["--model", str(model_of(rig)), "--serve-flags", shlex.join([*stage_flags(rig), *more])]
    command += ["--workload", "visualwebinstruct-like", "--rates", CPU_RATES if on_cpu else RATES]
    command += ["--duration", str(seconds), "--warm-up", "1", "--min-samples", "2", "--slo", SLO, "--out", str(out)]
    command += [*(["--output-tokens", "16"] if on_cpu else [])]
    code = rig.run(command, LIMIT_S)
    result = out / "result.json"
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    for failed in sorted(out.glob("*/failed.json")):
        rig.check(False, f"{failed.parent.name} is measured", failed.read_text()[:2000])
    _say(rig, rows, more)
    rig.check(code == 0, "every layout has a valid run at every rate", "log.txt says which has not")


def _say(rig: Rig, rows: list[dict[str, Any]], more: tuple[str, ...]) -> None:
    monolith = {row["rate"]: row for row in rows if row["deployment"] == TP1}
    goodput: dict[str, float] = {}
    for row in rows:
        slo = row[f"slo_{SLO}:p90"]
        goodput.setdefault(row["deployment"], 0.0)
        if (slo["attainment"] or 0.0) >= ATTAINED:
            goodput[row["deployment"]] = max(goodput[row["deployment"]], row["rate"])
        told = {
            "ttft_ms_p50_p99": [row["ttft_ms"][name] for name in ("p50", "p99")] if row.get("ttft_ms") else None,
            "tpot_ms_p50_p99": [row["tpot_ms"][name] for name in ("p50", "p99")] if row.get("tpot_ms") else None,
            "output_tokens_per_s": row["output_tokens_per_s"],
            "attainment": slo["attainment"],
            "ok_of": [row["ok"], row["requests"]],
            "valid": row["valid"],
        }
        with rig.layout(row["deployment"]):
            rig.row(f"{row['deployment']} at {row['rate']:g}/s", told, flags=" ".join(more))
            base = monolith.get(row["rate"])
            if base is not None and row is not base and row.get("tpot_ms") and base.get("tpot_ms"):
                ratios = {
                    "throughput": _over(row["output_tokens_per_s"], base["output_tokens_per_s"]),
                    "ttft_p50": _over(row["ttft_ms"]["p50"], base["ttft_ms"]["p50"]),
                    "tpot_p50": _over(row["tpot_ms"]["p50"], base["tpot_ms"]["p50"]),
                }
                rig.row(f"{row['deployment']} over TP1 at {row['rate']:g}/s", ratios)
    for deployment, rate in goodput.items():
        with rig.layout(deployment):
            rig.row(f"{deployment}: highest rate with {ATTAINED:.0%} within {SLO} ms", rate, flags=" ".join(more))


def _over(value: float, base: float) -> float | None:
    return round(value / base, 3) if base else None
