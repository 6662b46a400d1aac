"""A plan for people: a table and what follows from it, and the file that serves its first choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from deploy.memory.placement_table import table
from deploy.planner.choice import Choice, Plan, Question
from epd_serve.slo import Slo


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
    if question.profile.encoder_free:
        lines.append(
            "With --encoder-free: P, D and PD load no encoder, and layouts in which EPD (TP) or EP encodes, or nobody "
            "apart, are left out."
        )
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
        "encoder_free": plan.question.profile.encoder_free,
        "looked_at": plan.looked_at,
        "undecided": [str(one.layout) for one in plan.undecided],
        "choices": [
            {
                "layout": str(one.layout),
                "devices": one.devices,
                "goodput_rps": asdict(one.goodput),
                "goodput_per_device_rps": asdict(one.per_device),
                "survived_rps": asdict(one.survived),
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


def deployment(plan: Plan, model: str) -> str:
    """The first choice as a file for `epd-serve serve --config`, with what is expected of it."""
    import yaml

    first, slo, times = plan.first, plan.question.goal.slo, plan.first.times
    config: dict[str, Any] = {"model": model} if model else {}
    config |= {"layout": str(first.layout), "step_budgets": _budgets(first)}
    if plan.question.profile.encoder_free:
        config["encoder_free"] = True
    if first.options.max_running:
        config["stage_args"] = _stage_args(first)
    expected = {"rate_rps": first.rate_rps, "ttft_s": times.ttft_p50 / 1e3, "tpot_s": times.tpot_p50 / 1e3}
    expected["attainment"] = times.attained
    config["proxy"] = _objectives(slo) | {f"planned.{name}": round(value, 6) for name, value in expected.items()}
    return (
        f"# Written by epd-serve plan: {verdict(plan)}\n"
        f"# Expected at {first.rate_rps:.4g} requests/s; the page, status and top show what comes of it.\n"
        + yaml.safe_dump(config, sort_keys=False)
    )


def options_of(one: Choice, question: Question) -> list[str]:
    """How it is run, as flags of `epd-serve serve`."""
    words = ["--step-budgets", _budgets(one), *["--encoder-free"] * question.profile.encoder_free]
    objectives = _objectives(question.goal.slo)
    words += [word for name, value in objectives.items() for word in ("--proxy", f"{name}={value}")]
    return [*words, *(word for args in _stage_args(one) for word in ("--stage-args", args))]


def _objectives(slo: Slo) -> dict[str, float | str]:
    """As settings of the proxy."""
    return {"slo.ttft_s": slo.ttft_ms / 1e3, "slo.tpot_s": slo.tpot_ms / 1e3, "slo.judge": slo.judge}


def _budgets(one: Choice) -> str:
    return "on" if one.options.budgets is not None else "off"


def _stage_args(one: Choice) -> list[str]:
    return [f"{role}:--max-num-seqs {count}" for role, count in one.options.max_running.items()]
