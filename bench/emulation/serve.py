"""Emulate a layout under a load: requests in, rows of the load generator out, as if a client had seen it.

So every figure that a measured run has, an emulated one has by the same code (`bench/client/measure.py: judged`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.client.row import Outcome, Row
from bench.client.run import Run
from bench.devices.serving import Serving
from bench.emulation.clock import Clock
from bench.emulation.deployment import Course, Deployment
from bench.phases import Milestone, groups, phases
from bench.workloads.spec import RequestSpec
from epd_serve.layout import Layout
from epd_serve.sim.items import MERGE, PATCH_PIXELS

SAMPLE_S = 0.5
"""Between two looks at the batches."""

MILESTONES = (
    Milestone("dispatched", "proxy and client", "front"),
    Milestone("encode_start", "encode queue", "encode"),
    Milestone("encoded", "encode", "encode"),
    Milestone("feature_ready", "E→P transfer", "E→P"),
    Milestone("prefill_start", "prefill queue", "prefill"),
    Milestone("prefill_end", "prefill", "prefill"),
    Milestone("kv_done", "P→D transfer", "P→D"),
    Milestone("decode_start", "decode queue", "decode"),
    Milestone("first_content", "decode, first step", "decode"),
)
"""Phases are named as `bench/report/breakdown.py` names them."""


@dataclass
class Emulated:
    """A run, and where its requests' times went.

    Attributes:
        phases, batches: lines of `phases.jsonl` and `batches.jsonl`.
    """

    run: Run
    phases: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


def emulate(
    layout: Layout, device: Serving, requests: Iterable[RequestSpec], label: str, *, details: bool = False
) -> Emulated:
    """Serve `requests`, each of which has an `arrival_s`. `details`: phases and batches, too.

    Raises:
        ConfigError: see `Deployment`.
    """
    clock = Clock()
    deployment = Deployment(layout, device, clock)
    courses = [course_of(spec) for spec in requests]
    run = Run(label, sent=len(courses), issued_s=max((course.due_s for course in courses), default=0.0))
    found = Emulated(run)

    def ended(course: Course) -> None:
        run.rows.append(row_of(course, label, len(run.rows)))
        if details:
            found.phases.append(phases_of(course, label))

    def look() -> None:
        for stage in deployment.stages:
            scheduler = stage.scheduler
            waiting = len(scheduler.waiting) + len(scheduler.held)
            found.batches.append({
                "run": label,
                "t_s": round(clock.now_s, 6),
                "instance": stage.name,
                "role": stage.role.value,
                "running": len(scheduler.running),
                "waiting": waiting,
            })  # fmt: skip
        if len(run.rows) < len(courses):
            clock.after(SAMPLE_S, look)

    for course in courses:
        deployment.expect(course, ended)
    if details:
        clock.after(0.0, look)
    clock.run()
    assert len(run.rows) == len(courses), f"{len(courses) - len(run.rows)} requests never ended"
    run.ended_s = max((row.ended_s for row in run.rows), default=0.0)
    return found


def course_of(spec: RequestSpec) -> Course:
    assert spec.arrival_s is not None
    return Course(spec.id, spec.arrival_s, spec.text_tokens, tuple(item_tokens(spec)), spec.max_tokens)


def item_tokens(spec: RequestSpec) -> Sequence[int]:
    """Of each picture, as simulated stages count them (`epd_serve/sim/items.py`): one per 28x28 pixels."""
    side = PATCH_PIXELS * MERGE
    return [max(1, round(one.width / side)) * max(1, round(one.height / side)) for one in spec.images]


def row_of(course: Course, label: str, number: int) -> Row:
    return Row(
        run=label,
        n=number,
        id=course.id,
        spec=course.id,
        due_s=course.due_s,
        ready_s=course.due_s,
        sent_s=course.due_s,
        ended_s=course.token_s[-1],
        outcome=Outcome.OK,
        token_s=tuple(course.token_s),
        last_s=course.token_s[-1],
        status=200,
        usage_tokens=len(course.token_s),
        prompt_tokens=course.prompt_tokens,
        finish_reason="length",
        path=course.path,
        instances=",".join(course.instances),
    )


def phases_of(course: Course, label: str) -> dict[str, Any]:
    """As `bench/client/joined.py` makes them of real stamps."""
    taken = phases(MILESTONES, {**course.stamps, "first_content": course.token_s[0]}, course.due_s)
    return {
        "id": course.id,
        "run": label,
        "path": course.path,
        "phases_ms": {name: round(seconds * 1e3, 3) for name, seconds in taken.items()},
        "groups_ms": {name: round(seconds * 1e3, 3) for name, seconds in groups(MILESTONES, taken).items()},
        "residual_ms": round((course.token_s[0] - course.due_s - sum(taken.values())) * 1e3, 3),
    }
