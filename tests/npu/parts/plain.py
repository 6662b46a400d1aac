"""One plain vLLM of the installed version on one device: that it serves at all, and what is right for all layouts.

Its answers are kept with the report: every later part is held against them (`tests/npu/answers.py` says how).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.sweep.experiment import Deployment, ServedBy
from bench.sweep.running import plain_vllm
from deploy.cli.command import serve_config
from deploy.plan.blueprint import draw
from tests.e2e.serving import MODEL, Endpoint
from tests.npu.answers import ONE_AT_A_TIME, TOGETHER, Answer, answer_of, answered, near_tie_of, noise
from tests.npu.rig import Rig


@dataclass(frozen=True)
class Reference:
    """What it answered, one request at a time. `together`: in the order of `answers.TOGETHER`; near_tie: see there."""

    alone: dict[str, Answer]
    together: tuple[Answer, ...]
    near_tie: float


def run(rig: Rig) -> None:
    model = rig.card.model(rig.scratch)
    words = [model, "--device", rig.card.kind, "--layout", "TP1", "--served-model-name", MODEL]
    flags = ("--max-model-len", "8192", "--max-num-seqs", "32", *(("--enforce-eager",) if rig.card.eager else ()))
    with plain_vllm(Deployment("plain vLLM", "TP1", 1, ServedBy.VLLM, flags), draw(serve_config(words))) as running:
        rig.row("ready_s", round(running.ready_s, 1), layout="plain vLLM")
        endpoint = Endpoint(str(running.target.servers[0].endpoint))
        alone = {name: answered(endpoint, body)[0] for name, body in ONE_AT_A_TIME.items()}
        pictures = tuple(answered(endpoint, body)[0] for body in TOGETHER)
        with ThreadPoolExecutor(len(TOGETHER)) as pool:
            crowded = list(pool.map(lambda body: answered(endpoint, body)[0], TOGETHER))
    moved = [noise(one, other) for one, other in zip(pictures, crowded, strict=True)]
    near_tie = near_tie_of(moved)
    rig.row("logprob_noise", round(max(moved), 4), near_tie=near_tie)
    different = {tuple(place.id for place in answer) for answer in pictures}
    rig.check(len(different) > len(TOGETHER) / 2, "different pictures get different answers", f"{len(different)} do")
    kept = {"alone": alone, "together": pictures, "near_tie": near_tie}
    _file(rig).write_text(json.dumps(kept, default=vars))


def reference(rig: Rig) -> Reference | None:
    """What `run` has kept of the same mode; None where it has kept nothing."""
    try:
        found = json.loads(_file(rig).read_text())
    except (OSError, ValueError):
        return None
    alone = {name: answer_of(answer) for name, answer in found["alone"].items()}
    return Reference(alone, tuple(map(answer_of, found["together"])), found["near_tie"])


def _file(rig: Rig) -> Path:
    """With graphs and without them a card computes differently: each is held against its own."""
    return rig.report.folder / ("reference-eager.json" if rig.card.eager else "reference.json")
