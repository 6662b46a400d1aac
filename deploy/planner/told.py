"""A plan for people: a table and what follows from it, a picture, and the file that serves its first choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

from deploy.memory.placement_table import table
from deploy.planner.choice import Choice, Plan
from deploy.planner.goodput import Interval
from epd_serve.slo import Slo

WIDTH, HEIGHT, EDGE = 640, 400, 60


def text(plan: Plan) -> str:
    """What was found, the verdict first."""
    question = plan.question
    head: tuple[str, ...] = (
        "layout",
        "devices",
        "requests/s per device",
        "90 %",
        "TTFT p50 / p90, ms",
        "TPOT p50 / p90, ms",
        "busiest",
    )
    head += (f"within {question.goal.slo}", "run with", *(["per 1,000"] if question.price else []))
    rows = [head]
    for one in plan.choices:
        each, times = one.per_device, one.times
        rows.append((
            str(one.layout), str(one.devices), f"{each.value:.3g}", f"{each.low:.3g} to {each.high:.3g}",
            f"{times.ttft_p50:.0f} / {times.ttft_p90:.0f}", f"{times.tpot_p50:.1f} / {times.tpot_p90:.1f}",
            busiest(one), f"{times.attained:.1%} at {one.rate_rps:.3g}/s", run_with(one),
            *([f"{one.cost:.3g}"] if question.price else []),
        ))  # fmt: skip
    lines = [verdict(plan), "", table(rows), ""]
    lines += reasons(plan)
    profile = f"profile of {question.profile.model} on {question.profile.device}, {question.profile.how}"
    lines.append(
        f"Simulated: {plan.looked_at} layouts, the best with {question.seeds} seeds; {profile}. {_trust(plan)}"
    )
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """What to do, in a sentence."""
    first, monolith = plan.first, plan.monolith
    if not first.enough:
        return (
            f"No layout of {plan.question.devices} devices serves {plan.question.rate_rps:g} requests/s within "
            f"{plan.question.goal.slo.text}: the best one, {first.layout}, serves {first.survived.value:.3g}."
        )
    if plan.monolith_will_do and monolith is not None:
        if monolith is first:
            as_well = "as well as anything" if plan.undecided else "best"
            return f"A monolith serves this {as_well}: {monolith.layout}."
        of = f"{monolith.per_device.value:.3g} against {first.per_device.value:.3g} requests/s per device"
        return f"A monolith serves this as well: {monolith.layout}, {of} of {first.layout}."
    if plan.undecided:
        others = " and ".join(str(one.layout) for one in plan.undecided)
        return f"Undecided: {first.layout} is ahead, but its interval meets that of {others}."
    return f"{first.layout} serves this best."


def reasons(plan: Plan) -> Iterator[str]:
    """Why the first is before the second, and what a monolith lacks."""
    others = list(plan.choices[1:2])
    if plan.monolith is not None and plan.monolith not in (plan.first, *others):
        others.append(plan.monolith)
    for other in others:
        first, second = plan.first.per_device.value, other.per_device.value
        more = (
            f"serves {first / second:.2f} times what {other.layout} does"
            if second
            else f"serves, {other.layout} does not"
        )
        yield (f"{plan.first.layout} {more}: there {held_by(other, plan)}; here {held_by(plan.first, plan)}.")


def held_by(one: Choice, plan: Plan) -> str:
    """What a layout's goodput ends at."""
    times = one.times
    if times.late > times.slow:
        limit = f"first tokens come late beyond that (p90 {times.ttft_p90:.0f} ms at {one.rate_rps:.3g}/s)"
    else:
        limit = (
            f"gaps between tokens grow too long beyond that (TPOT p90 {times.tpot_p90:.1f} ms at {one.rate_rps:.3g}/s)"
        )
    return f"{limit}, with {busiest(one)}"


def busiest(one: Choice) -> str:
    """The instance that works most, and what it does."""
    name, kinds = max(one.times.busy.items(), key=lambda pair: sum(pair[1].values()))
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in kinds.items() if share >= 0.01)
    return f"{name} {sum(kinds.values()):.0%} busy" + (f" ({shares})" if "," in shares else "")


def run_with(one: Choice) -> str:
    """Options that are not the usual ones."""
    said = ["budgets per step"] if one.options.budgets is not None else []
    said += [f"{role}: at most {count} at once" for role, count in one.options.max_running.items()]
    return "; ".join(said) or "-"


def _trust(plan: Plan) -> str:
    noise = plan.question.profile.noise
    if not noise.e2e:
        return "How far this profile is off was not measured (`epd-bench plan` does): intervals are of chance alone."
    return f"Measured beside it, TTFT was {noise.ttft:.0%} off, TPOT {noise.tpot:.0%}, end to end {noise.e2e:.0%}."


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values: what `--json` writes."""
    return {
        "verdict": verdict(plan),
        "workload": plan.question.goal.workload.name,
        "slo": str(plan.question.goal.slo),
        "profile": {"model": plan.question.profile.model, "device": plan.question.profile.device},
        "looked_at": plan.looked_at,
        "undecided": [str(one.layout) for one in plan.undecided],
        "choices": [
            {
                "layout": str(one.layout),
                "devices": one.devices,
                "goodput_rps": _interval(one.goodput),
                "goodput_per_device_rps": _interval(one.per_device),
                "survived_rps": _interval(one.survived),
                "enough": one.enough,
                "cost_per_1000": one.cost if plan.question.price else None,
                "step_budgets": one.options.budgets is not None,
                "max_running": dict(one.options.max_running),
                "rate_rps": one.rate_rps,
                "ttft_ms": {"p50": one.times.ttft_p50, "p90": one.times.ttft_p90},
                "tpot_ms": {"p50": one.times.tpot_p50, "p90": one.times.tpot_p90},
                "e2e_ms": {"p50": one.times.e2e_p50},
                "attained": one.times.attained,
                "busy": {name: dict(kinds) for name, kinds in one.times.busy.items()},
            }
            for one in plan.choices
        ],
    }


def _interval(one: Interval) -> dict[str, float]:
    return {"value": one.value, "low": one.low, "high": one.high}


def deployment(plan: Plan, model: str) -> str:
    """The first choice as a file for `epd-serve serve --config`, with what is expected of it."""
    first, slo, times = plan.first, plan.question.goal.slo, plan.first.times
    lines = [f"# Written by epd-serve plan: {verdict(plan)}"]
    lines.append(f"# Expected at {first.rate_rps:.4g} requests/s; the page, status and top show what comes of it.")
    if model:
        lines.append(f"model: {_quoted(model)}")
    lines.append(f"layout: {_quoted(str(first.layout))}")
    lines.append(f'step_budgets: "{_budgets(first)}"')
    if first.options.max_running:
        lines += ["stage_args:", *(f'  - "{words}"' for words in _stage_args(first))]
    lines += ["proxy:", f"  slo.ttft_s: {slo.ttft_ms / 1e3:g}", f"  slo.tpot_s: {slo.tpot_ms / 1e3:g}"]
    lines += [f"  slo.judge: {slo.judge}", f"  planned.rate_rps: {first.rate_rps:.6g}"]
    lines += [
        f"  planned.{name}_s: {ms / 1e3:.6g}" for name, ms in (("ttft", times.ttft_p50), ("tpot", times.tpot_p50))
    ]
    return "\n".join([*lines, f"  planned.attainment: {times.attained:.4g}"]) + "\n"


def options_of(one: Choice, slo: Slo) -> list[str]:
    """How it is run, as flags of `epd-serve serve`."""
    words = ["--step-budgets", _budgets(one), "--proxy", f"slo.ttft_s={slo.ttft_ms / 1e3:g}"]
    words += ["--proxy", f"slo.tpot_s={slo.tpot_ms / 1e3:g}"]
    return [*words, *(word for args in _stage_args(one) for word in ("--stage-args", args))]


def _budgets(one: Choice) -> str:
    return "on" if one.options.budgets is not None else "off"


def _stage_args(one: Choice) -> list[str]:
    return [f"{role}:--max-num-seqs {count}" for role, count in one.options.max_running.items()]


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def picture(plan: Plan) -> str:
    """SVG: goodput a device over the TTFT that nine in ten have, each with its interval. Those that nobody beats in
    both are filled."""
    points = [(one.times.ttft_p90, one.per_device, str(one.layout)) for one in plan.choices]
    right, top = (1.1 * max(values) or 1.0 for values in ([x for x, _, _ in points], [y.high for _, y, _ in points]))

    def at(ttft_ms: float, rps: float) -> tuple[float, float]:
        return EDGE + ttft_ms / right * (WIDTH - 2 * EDGE), HEIGHT - EDGE - rps / top * (HEIGHT - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="black"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 15}" text-anchor="middle">TTFT of nine in ten, ms</text>',
        f'<text x="15" y="{EDGE - 20}">requests/s per device within {escape(plan.question.goal.slo.text)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, _), (_, y) = at(share * right, 0.0), at(0.0, share * top)
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - EDGE + 16}" text-anchor="middle">{share * right:.0f}</text>')
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4:.0f}" text-anchor="end">{share * top:.3g}</text>')
    for ttft_ms, rps, name in points:
        (x, y), (_, low), (_, high) = at(ttft_ms, rps.value), at(ttft_ms, rps.low), at(ttft_ms, rps.high)
        best = not any(other.value > rps.value and ms < ttft_ms for ms, other, _ in points)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="#36c"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" stroke="#36c" fill="{"#36c" if best else "white"}"/>')
        parts.append(f'<text x="{x + 8:.1f}" y="{y - 6:.1f}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
