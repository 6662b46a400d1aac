"""Whether other groups would serve the work that comes better, by what the planner has answered. Pure.

Redeployment where the workload has changed (HydraInfer §4.4), and by what the SLO asks for (EPD-Serve §4.7): the
planner is asked only once the shares of work have moved, and its layout has to be worth the starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.change.types import Kind
from deploy.follow.moves import GAIN, ROOM, counts_of
from deploy.follow.types import Counts, Limits, Memory, Mix, Move, Observation, PlanQuestion
from deploy.planner.candidates import seconds_of
from deploy.planner.goodput import Interval
from deploy.planner.profile import DeviceProfile
from deploy.planner.workload import Work
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo

MOVED = 0.2
"""By so much of the time a share of work has moved, or the layout still suits it."""
STEADY = 0.1
"""By more from one decision to the next it is still moving, and nobody knows yet what to plan for."""
FEW = 3.0
"""Requests in a window, of which nobody can tell what kind of work comes."""
STRICT = 5.0
"""Times what a request alone takes: an objective below that is strict."""
PAYBACK_S = 600.0
"""In which a change has to bring as many requests as it costs."""
REMEMBERED = 8
STRICT_BOTH, STRICT_TTFT, THROUGHPUT = "(E-P)-D", "(E-D)-P", "(E-PD)"


@dataclass(frozen=True)
class Answer:
    """Of the planner.

    Attributes:
        goodputs: requests a second within the SLO, by layout, the best first; the present one is among them.
        trouble: why there are none.
    """

    question: PlanQuestion
    goodputs: Mapping[str, Interval] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Plans:
    """The last answers, for devices of this profile and this objective."""

    profile: DeviceProfile
    slo: Slo
    answers: tuple[Answer, ...] = ()

    def with_answer(self, answer: Answer) -> Plans:
        return replace(self, answers=(*self.answers, answer)[-REMEMBERED:])

    def answer(self, question: PlanQuestion) -> Answer | None:
        """The newest one for this layout and work that is much like this."""
        for one in reversed(self.answers):
            if one.question.layout == question.layout and alike(one.question.mix, question.mix):
                return one
        return None

    def mix(self, rates: Mapping[Kind, float], sizes: Mapping[Kind, Work]) -> Mix:
        """Of requests of these sizes, so many of each kind."""
        work = mean_work(rates, sizes)
        tp = min(self.profile.stages)
        seconds = seconds_of(self.profile, tp, work, tpot_s=self.slo.tpot_ms / 1e3)
        total_s = sum(seconds.values())
        shares = {kind: s / total_s if total_s else 0.0 for kind, s in seconds.items()}
        return Mix(shares, scenario(self.profile, self.slo, work))


def mean_work(rates: Mapping[Kind, float], sizes: Mapping[Kind, Work]) -> Work:
    total = sum(rates.values())

    def mean(name: str) -> float:
        return sum(rate * float(getattr(sizes[kind], name)) for kind, rate in rates.items()) / total

    return Work(mean("items"), mean("item_tokens"), mean("prompt_tokens"), mean("output_tokens"))


def scenario(profile: DeviceProfile, slo: Slo, work: Work) -> str:
    """The groups that EPD-Serve (§4.7) advises: with both objectives strict decoding is alone on its device, where
    first tokens come first prefill is, and for throughput neither. "" for text, which nobody encodes."""
    if not work.items:
        return ""
    tp = min(profile.stages)
    seconds = seconds_of(profile, tp, work)
    first_s = profile.front.seconds(work.item_tokens) + seconds["encode"] + seconds["prefill"]
    next_s = profile.stages[tp].decode_s(1, work.prompt_tokens)
    strict_ttft = slo.ttft_ms / 1e3 < STRICT * first_s
    strict_tpot = slo.tpot_ms / 1e3 < STRICT * next_s
    if strict_ttft:
        return STRICT_BOTH if strict_tpot else STRICT_TTFT
    return "" if strict_tpot else THROUGHPUT


def apart(one: Mix, other: Mix) -> float:
    """By how much of the time the share of some kind of work differs, at most."""
    return max(abs(share - other.shares[kind]) for kind, share in one.shares.items())


def alike(one: Mix, other: Mix) -> bool:
    return one.scenario == other.scenario and apart(one, other) < MOVED


def family_of(layout: Layout) -> frozenset[tuple[tuple[str, int], ...]]:
    """The kinds of groups that it has, whatever their counts and widths."""
    return frozenset(tuple((one.role.value, one.count) for one in group.members) for group in layout.groups)


@dataclass(frozen=True)
class Considered:
    """Attributes:
    move: None where the groups stay. why: that is so.
    question: that the planner should answer first.
    """

    memory: Memory
    why: str
    move: Move | None = None
    question: PlanQuestion | None = None

    @property
    def moves(self) -> tuple[Move, ...]:
        return (self.move,) if self.move is not None else ()


def consider(
    seen: Observation,
    memory: Memory,
    rates: Mapping[Kind, float],
    steady: Mapping[Kind, float],
    relieves: str,
    limits: Limits,
    plans: Plans | None,
) -> Considered:
    """Whether other groups are wanted.

    Args:
        rates: requests a second that are reckoned with. steady: that come, chance evened out.
        relieves: the group that is used most.
    """
    if plans is None:
        return Considered(memory, "the groups stay: there is no profile to plan by (--follow-profile), or no wish to")
    if sum(steady.values()) * seen.window_s < FEW:
        return Considered(replace(memory, mix=None), "the groups stay: too few requests come to plan for")
    mix = plans.mix(steady, seen.sizes)
    before, memory = memory.mix, replace(memory, mix=mix)
    if before is None or apart(before, mix) > STEADY:
        return Considered(memory, "the groups stay: what comes is changing")
    groups = frozenset(counts_of(seen.layout))
    suited = memory.suited.get(groups)
    planned = replace(memory, suited={**memory.suited, groups: mix})
    if suited is None:
        return Considered(planned, "the groups stay: they are taken to suit what came first")
    if alike(suited, mix):
        return Considered(memory, "the groups stay: they were chosen for such work")
    question = PlanQuestion(str(seen.layout), steady, seen.sizes, mix)
    answer = plans.answer(question)
    if answer is None:
        return Considered(memory, "the groups stay until the planner has answered", question=question)
    if answer.trouble:
        return Considered(memory, f"the groups stay: the planner found nothing: {answer.trouble}")
    layout, better = best_of(answer, limits)
    now = answer.goodputs[question.layout]
    if layout == question.layout:
        return Considered(planned, f"the groups stay: by plan none serve more than {layout}")
    if better.value < GAIN * now.value or better.meets(now):
        more = f"{better.value:.3g} requests/s, {question.layout} {now.value:.3g}"
        return Considered(planned, f"the groups stay: by plan {layout} serves {more}, which is not worth a change")
    return _worth_it(seen, memory, sum(rates.values()), relieves, (layout, better.value), now.value)


def best_of(answer: Answer, limits: Limits) -> tuple[str, Interval]:
    """Of those that the limits allow, the first one, or one of the scenario's groups whose goodput may be as good."""
    present = answer.question.layout
    able = [text for text in answer.goodputs if text == present or _allowed(counts_of(parse(text)), limits)]
    first = answer.goodputs[able[0]]
    as_good = [text for text in able if answer.goodputs[text].meets(first)]
    advised = answer.question.mix.scenario
    wanted = family_of(parse(advised)) if advised else frozenset()
    layout = next((text for text in as_good if family_of(parse(text)) == wanted), able[0])
    return layout, answer.goodputs[layout]


def _allowed(counts: Counts, limits: Limits) -> bool:
    enough = all(counts.get(name, 0) >= least for name, least in limits.least.items())
    return enough and all(counts.get(name, 0) <= most for name, most in limits.most.items())


def _worth_it(
    seen: Observation, memory: Memory, rate_rps: float, relieves: str, better: tuple[str, float], now_rps: float
) -> Considered:
    """The move, if what it serves more of what comes soon makes up for what half of the devices do not serve while one
    half after the other starts. A plan may be off, so of what it promises only `ROOM` counts."""
    layout, better_rps = better
    gained_rps = min(rate_rps, ROOM * better_rps) - min(rate_rps, ROOM * now_rps)
    lost = now_rps * seen.start_s
    said = f"by plan {layout} serves {better_rps:.3g} requests/s within the SLO, {seen.layout} {now_rps:.3g}"
    if gained_rps * PAYBACK_S <= lost:
        why = f"the groups stay: {said}, but of {rate_rps:.3g} that come too few more for a change to pay"
        return Considered(memory, why)
    before, after = (rate_rps / (ROOM * rps) if rps else float("inf") for rps in (now_rps, better_rps))
    move = Move("relayout", layout, counts_of(parse(layout)), relieves, before, after, said)
    return Considered(memory, said, move)
