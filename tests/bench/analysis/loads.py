"""Results of loads that never were, as `epd-bench load` and `epd-bench layouts` leave them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.clients.measure import Plan, judged
from bench.clients.results import RequestRecord
from bench.clients.sender import Run
from bench.record import flatten, write
from bench.workloads.requests import ClosedLoop
from tests.bench.clients.made import row

ENV: dict[str, Any] = {
    "kind": "simulated",
    "command": "epd-bench load http://x",
    "commit": "abc",
    "uncommitted_changes": False,
    "machine": {"arch": "x", "cpu": "y", "cores": 4, "load_average_1min": 0.1},
    "versions": {"python": "3"},
    "load": {"workload": "w", "seed": 0, "slos": ["2000:50"], "devices": 2},
}


def requests(run: str = "1 rps", *, slower: float = 1.0, seed: int = 0, count: int = 120) -> list[RequestRecord]:
    """Due every half second; hard ones take longer in every result. `seed`: of what differs between results."""
    hard, own = random.Random(1), random.Random(f"own {seed}")
    found = []
    for n in range(count):
        ttft = 0.1 * slower * (1 + 5 * hard.random()) * (1 + 0.02 * own.random())
        gap = 0.01 * slower * (1 + 0.2 * own.random())
        found.append(row(n, 0.5 * n, ttft=ttft, gap=gap, tokens=8, run=run, spec=f"w-{n}"))
    return found


def result(path: Path, *runs: Sequence[RequestRecord], env: Mapping[str, Any] | None = None, devices: int = 2) -> Path:
    """Write it, with the rows of its requests beside it; `path` ends in `.json`, or is the folder of an entry."""
    figures: dict[str, float] = {}
    lines: list[dict[str, Any]] = []
    for rows in runs:
        ended = max(one.ended_s for one in rows)
        run = Run(rows[0].run, 0.0, max(one.due_s for one in rows), ended, rows=list(rows))
        measured = judged(run, Plan(ClosedLoop(1), count=1, devices=devices))
        figures |= flatten({run.label: measured.figures})
        lines.append(measured.row())
    folder = path.suffix != ".json"
    rows_path = path / "rows.jsonl" if folder else path.with_suffix(".rows.jsonl")
    given = {**ENV, **(env or {})}
    given["load"] = {**given["load"], "devices": devices}
    write(path / "result.json" if folder else path, figures, given, lines)
    rows_path.write_bytes(msgspec.json.Encoder().encode_lines([one for rows in runs for one in rows]))
    return path
