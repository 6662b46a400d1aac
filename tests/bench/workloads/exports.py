"""What the tests of exports share: a small workload, and its rows as they were written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.workloads.requests import ImageRef, RequestSpec

SHOWN = (ImageRef(32, 24, 11), ImageRef(24, 32, 12))

REQUESTS = (
    RequestSpec("w-0", "Which one is “left”?", SHOWN, 64, 4, arrival_s=0.25),
    RequestSpec("w-1", "No picture {here}", (), 64, 3, arrival_s=0.5004),
    RequestSpec("w-2", "Again", SHOWN[:1], 64, 1, arrival_s=1.75),
)
"""Two pictures, none, one that is a repeat."""

UNTIMED = tuple(replace(request, arrival_s=None) for request in REQUESTS)


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
