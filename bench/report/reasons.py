"""Why a deployment is the best at something: the phase that differs most, what its decoding instances run. Pure.

A monolith stamps nothing between its stages. Beside it only the whole of them can be compared, and what of it the other
spends where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.batch_sizes import Sampled, batches_of
from bench.report.breakdown import Breakdown, Found, Part, Phase, comparable
from bench.report.experiment import Entry, Experiment
from bench.report.measures import TPOT, TTFT, Measure, ranked
from bench.report.ratios import is_monolith
from bench.report.sheet import shown


@dataclass(frozen=True)
class Leader:
    """The best at a measure in a stretch of rates, of which `rate` is the highest; `alone`: by more than chance."""

    measure: Measure
    entry: Entry
    rate: float
    alone: bool


def reasons(
    experiment: Experiment,
    leaders: Sequence[Leader],
    against: Entry | None,
    phases: Found,
    sampled: Sampled,
) -> list[str]:
    """Sentences on the leaders in TTFT and TPOT, each beside monoliths and, where it leads alone, the next best."""
    found: list[str] = []
    for leader in leaders:
        measure, entry, rate = leader.measure, leader.entry, leader.rate
        order = [one[0] for one in ranked(experiment, measure, rate) if one[0].devices == entry.devices]
        others = [one for one in order if one is not entry]
        monoliths = [one for one in others if one is against or is_monolith(one)]
        beside = dict.fromkeys([*monoliths, *(others[:1] if leader.alone else [])])
        for other in beside:
            if measure == TTFT:
                found.append(_of_ttft(entry, other, rate, phases))
            elif measure == TPOT:
                found.append(_of_tpot(experiment, entry, other, rate, sampled))
    told = [words for words in dict.fromkeys(found) if words]
    if told:
        return told
    if any(phases.values()):
        return ["No deployment leads in TTFT or TPOT with phases known of both sides: the report cannot say why."]
    return ["No request was traced: the figures do not say why."]


def _of_ttft(entry: Entry, other: Entry, rate: float, phases: Found) -> str:
    """ "" where the phases of one side are not known."""
    mine, theirs = phases.get(entry.name, {}).get(rate), phases.get(other.name, {}).get(rate)
    if mine is None or theirs is None:
        return ""
    parts = comparable(mine, theirs)
    most = max(parts, key=lambda part: abs(part.own_ms - part.other_ms), default=None)
    if most is None:
        return ""
    words = (
        f"TTFT of {entry.name} at {rate:g} req/s, {shown(theirs.ttft_ms - mine.ttft_ms)} ms sooner than {other.name}: "
        f"what differs most is {most.name}, {shown(most.own_ms)} against {shown(most.other_ms)} ms"
    )
    words += _inside(most, entry, mine) + _inside(most, other, theirs)
    dearer = [part for part in parts if part.own_ms > part.other_ms and part is not most]
    if dearer:
        worst = max(dearer, key=lambda part: part.own_ms - part.other_ms)
        words += f"; it pays with {worst.name}, {shown(worst.own_ms)} against {shown(worst.other_ms)} ms"
    return words + "."


def _inside(part: Part, entry: Entry, found: Breakdown) -> str:
    """What of a part that is several phases takes the most, where it is known."""
    if len(part.phases) == 1 or found.taken.get(Phase.WHOLE):
        return ""
    phase = max(part.phases, key=lambda one: found.taken.get(one, 0.0))
    ms = found.taken.get(phase, 0.0)
    return f" (of which {entry.name} has {shown(ms)} ms in {phase.value})" if ms else ""


def _of_tpot(experiment: Experiment, entry: Entry, other: Entry, rate: float, sampled: Sampled) -> str:
    """Decode is its one phase: what differs is what else an instance does, and how much it runs at once."""
    found = []
    for one in (entry, other):
        run = experiment.at(one, rate)
        decoding = [] if run is None else [b for b in batches_of(sampled.get(one.name, ()), run) if b.stage == "D"]
        value = None if run is None else TPOT.of(one, run)
        if not decoding or value is None:
            return ""
        batch = decoding[0]
        alone = "only decodes" if batch.role == "D" else f"also has {_duties(batch.role)} to do"
        sharing = " on a device that it shares" if _shares(one, batch.role) else ""
        runs = f"runs {shown(batch.mean)} sequences"
        found.append(f"{shown(value)} ms in {one.name}, whose {batch.role} {alone}{sharing} and {runs}")
    return f"TPOT at {rate:g} req/s: {found[0]}; {found[1]}."


def _duties(role: str) -> str:
    return " and ".join({"E": "encode", "P": "prefill"}[letter] for letter in role if letter != "D")


def _shares(entry: Entry, role: str) -> bool:
    """An instance of `role` lies in parentheses with others."""
    groups = [group.split(")")[0].split("-") for group in entry.layout.split("(")[1:]]
    return any(role in (member.lstrip("0123456789") for member in group) for group in groups)
