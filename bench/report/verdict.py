"""What an experiment says, in sentences computed from its figures: who is best at what, who wins and loses against the
monolith, and why (`bench/report/reasons.py`).

Only what is real wins or loses. Emulated and simulated figures have an order, and are said to have no more than that.
Deployments of the monolith's device count are set against each other; those of another are named with theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.batch_sizes import Sampled
from bench.report.breakdown import Found
from bench.report.experiment import Entry, Experiment
from bench.report.measures import Measure, ranked
from bench.report.ratios import Compared, Ratio, measures, monolith
from bench.report.reasons import Leader, reasons
from bench.report.sheet import shown


@dataclass(frozen=True)
class Verdict:
    """Sentences under headings. `caution`: what they are not; "" where they are a result."""

    caution: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]

    def text(self) -> str:
        """For a terminal."""
        lines = [self.caution] if self.caution else []
        for heading, sentences in self.parts:
            lines += ["", heading, *(f"  {sentence}" for sentence in sentences)]
        return "\n".join(lines).strip()


def verdict(experiment: Experiment, compared: Compared, phases: Found, sampled: Sampled) -> Verdict:
    """Of a whole experiment, or of what there is of it."""
    real, against = experiment.real, monolith(experiment)
    caution = "" if real else f"{experiment.kind}: ordering only. No device was measured, and nothing here is a win."
    if not any(run.valid for _, run in experiment.all_runs()):
        return Verdict(caution, (("Result", ("No run is valid: there is nothing to compare.",)),))
    best: list[str] = []
    leaders: list[Leader] = []
    for measure in measures(experiment.slos[0]):
        sentences, top = _best(experiment, measure, against, compared)
        best += sentences
        leaders += top
    if against is None:
        best.append("No monolith was measured: there are no ratios to one.")
    ratios = compared.to(against)
    ahead = "Wins against the monolith" if real else "Ordered before the monolith"
    behind = "Losses against the monolith" if real else "Ordered behind the monolith"
    parts = [
        ("Which is best at what" if real else "Which comes first at what", best),
        (ahead, _sides(experiment, ratios, against, better=True)),
        (behind, _sides(experiment, ratios, against, better=False)),
        ("Why", reasons(experiment, leaders, against, phases, sampled)),
    ]
    return Verdict(caution, tuple((heading, tuple(sentences)) for heading, sentences in parts if sentences))


def _best(
    experiment: Experiment, measure: Measure, against: Entry | None, compared: Compared
) -> tuple[list[str], list[Leader]]:
    """Sentences, and who leads each stretch of rates."""
    led: list[tuple[float, tuple[str, ...], Entry]] = []
    for rate in experiment.measured_rates:
        order = [one[0] for one in ranked(experiment, measure, rate) if against is None or _equal(one[0], against)]
        if len(order) > 1:
            ties = [entry for entry in order[1:] if _tied(compared.ratio(measure, rate, entry, order[0]))]
            names = tuple(entry.name for entry in experiment.entries if entry is order[0] or entry in ties)
            led.append((rate, names if len(names) < len(order) else (), order[0]))
    sentences: list[str] = []
    top: list[Leader] = []
    among = f" of those with {against.devices} devices" if against is not None else ""
    superlative = f"the {'lowest' if measure.lower else 'highest'} {measure.name}"
    for names, stretch in itertools.groupby(led, key=lambda one: one[1]):
        listed = list(stretch)
        at = f"At {listed_rates([rate for rate, *_ in listed])}"
        last, _, entry = listed[-1]
        if not names:
            sentences.append(f"{at}: no deployment differs from the best in {measure.name} beyond chance.")
        elif len(names) > 1:
            sentences.append(f"{at}: {listed_words(names)} share {superlative}{among}, not told apart beyond chance.")
        else:
            told = _beside(experiment, measure, entry, against, last, compared)
            sentences.append(f"{at}: {entry.name} has {superlative}{among}{told}.")
        if names:
            top.append(Leader(measure, entry, last, alone=len(names) == 1))
    return sentences, top


def _beside(
    experiment: Experiment, measure: Measure, entry: Entry, against: Entry | None, rate: float, compared: Compared
) -> str:
    """The best in figures, beside the monolith."""
    if against is None:
        return ""
    if entry is against:
        return "; it is the monolith"
    run, base = experiment.at(entry, rate), experiment.at(against, rate)
    value = None if run is None else measure.of(entry, run)
    reference = None if base is None or not base.valid else measure.of(against, base)
    if value is None or reference is None:
        return f" (the monolith {against.name} has no valid run at {rate:g} req/s)"
    words = f" ({shown(value)} against {shown(reference)} {measure.unit} of {against.name} at {rate:g} req/s"
    ratio = compared.ratio(measure, rate, entry, against)
    return f"{words}: {ratio})" if ratio is not None else f"{words})"


def _sides(experiment: Experiment, ratios: Sequence[Ratio], against: Entry | None, *, better: bool) -> list[str]:
    """A sentence per entry and measure in which it is better (worse) than the monolith beyond chance."""
    found = []
    for entry, measure in itertools.product(experiment.entries, measures(experiment.slos[0])):
        own = [one for one in ratios if one.entry is entry and one.measure == measure]
        sure = [one for one in own if one.sure and one.better == better]
        if not sure or against is None:
            continue
        most = max(sure, key=lambda one: abs(one.ratio - 1.0))
        devices = "" if _equal(entry, against) else f" ({entry.devices} devices against {against.devices})"
        every = "both rates" if len(own) == 2 else f"all {len(own)} rates"
        where = every if len(sure) == len(own) > 1 else listed_rates([one.rate for one in sure])
        end = f", most at {most.rate:g} req/s: {most}" if len(sure) > 1 else f": {most}"
        found.append(f"{entry.name}{devices}: {measure.name} at {where}{end}.")
    return found


def _tied(ratio: Ratio | None) -> bool:
    """With the best: its interval holds 1. Of too few requests nobody knows, and the better number leads."""
    return ratio is not None and ratio.low is not None and not ratio.sure


def _equal(one: Entry, other: Entry) -> bool:
    return one.devices == other.devices


def listed_rates(rates: Sequence[float]) -> str:
    return listed_words([f"{rate:g}" for rate in rates]) + " req/s"


def listed_words(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
