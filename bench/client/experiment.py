"""What a load was asked to measure, as its result keeps it: what must be equal for two runs to belong together. Pure.

Owns the list of what counts: whatever changes the requests, when they are due, or how they are judged. Where results
go, which address serves, and how many runs there are does not.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.client.measure import Plan

FLAGS = (
    "workload",
    "reuse",
    "zipf",
    "pictures_each",
    "output_tokens",
    "seed",
    "same",
    "arrivals",
    "concurrency",
    "n",
    "timeout",
    "cancel",
    "min_samples",
    "late_ms",
    "kind",
)
FILES = ("bodies", "prompts", "tokenizer")


def experiment(arguments: argparse.Namespace, plan: Plan, model: str) -> dict[str, Any]:
    """By flag (`--warm-up` is `warm_up`). Files count by name and content, folders by name."""
    found: dict[str, Any] = {name: getattr(arguments, name) for name in FLAGS}
    found |= {name: None if (path := getattr(arguments, name)) is None else _file(path) for name in FILES}
    return {
        **found,
        "model": model,
        "duration": plan.seconds,
        "warm_up": plan.warm_up_s,
        "slo": [str(slo) for slo in plan.slos],
        "devices": plan.devices,
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field that differs, as `--flag was A, is B`; "" where they are the same experiment."""
    for name in dict.fromkeys([*now, *before]):
        if before.get(name) != now.get(name):
            return f"--{name.replace('_', '-')} was {_told(before.get(name))}, is {_told(now.get(name))}"
    return ""


def _told(value: Any) -> str:
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _file(path: Path) -> str:
    if not path.is_file():
        return path.name
    return f"{path.name} ({hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()})"
