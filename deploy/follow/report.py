"""What a follower has decided, as JSON and as Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.follow.live import Entry, Follower
from deploy.follow.moves import counts_of
from deploy.follow.outcome import Gain, median_error
from deploy.follow.types import Move, Needs
from epd_serve.layout_parser import parse
from epd_serve.wire import StageReport
from proxy.registry.instance_state import InstanceView

Json = dict[str, Any]


def follow_json(follower: Follower, most: int | None = None) -> Json:
    """The mode, and decisions, the newest first, at most so many."""
    limits = follower.limits
    entries = [_entry_json(entry) for entry in islice(reversed(follower.entries), most)]
    return {
        "mode": follower.mode,
        "every_s": limits.every_s,
        "use": limits.use,
        "lacking": list(follower.lacking),
        "budgets": [_budget_json(view, view.stage) for view in follower.views if view.stage and view.stage.item_budget],
        "decisions": entries,
    }


def _budget_json(view: InstanceView, report: StageReport) -> Json:
    """What a stage does by itself at every step, before anything is moved (`epd_serve/budgets.py`)."""
    return {
        "instance": view.instance.id,
        "neighbours": list(view.neighbours),
        "prompt_tokens": report.token_budget,
        "item_tokens": report.item_budget,
        "held_steps": report.held_steps,
    }


def _entry_json(entry: Entry) -> Json:
    one = entry.decision
    there = counts_of(parse(one.layout))
    wanted = one.chosen.counts if one.chosen is not None else there
    return {
        "ago_s": round(time.monotonic() - one.at_s, 1),
        "times": entry.times,
        "outcome": entry.outcome,
        "layout": one.layout,
        "rates_rps": _rounded(one.rates),
        "groups": [
            {
                "group": name,
                "there": there.get(name, 0),
                "wanted": wanted.get(name, 0),
                "needed": round(one.need.get(name, 0.0), 3),
                "peak": round(one.peak.get(name, 0.0), 3),
            }
            for name in {**there, **wanted}
        ],
        "chosen": _move_json(one.chosen) if one.chosen is not None else None,
        "refused": [{**_move_json(move), "reason": why} for move, why in one.refused],
        "plan": one.plan,
        "gain": _gain_json(entry.gain) if entry.gain is not None else None,
    }


def _move_json(move: Move) -> Json:
    return {
        "what": move.what,
        "layout": move.layout,
        "core_share": move.core_share,
        "relieves": move.relieves,
        "before": round(move.before, 3),
        "after": round(move.after, 3),
        "why": move.why,
    }


def _gain_json(gain: Gain) -> Json:
    return {"group": gain.group, "predicted": round(gain.predicted, 3), "measured": round(gain.measured, 3)}


def _rounded(values: Needs) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


class FollowMetrics(Collector):
    """`epd_follow_*`: what is wanted of each group is there for an autoscaler of nodes (HPA, KEDA), too."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        entries = self._follower.entries
        last = entries[-1].decision if entries and self._follower.mode != "off" else None
        layout = (last.chosen.layout if last.chosen is not None else last.layout) if last is not None else ""
        desired = counts_of(parse(layout)) if layout else Counter[str]()
        use = {} if last is None else {
            name: last.need[name] / count for name, count in counts_of(parse(last.layout)).items()
        }  # fmt: skip
        yield _gauge("desired_copies", "Copies of a group that the follower of the load wants.", desired)
        yield _gauge("utilization", "Share of its time that a group is reckoned to be busy.", use)
        yield GaugeMetricFamily(
            "epd_follow_lacking_devices",
            "Devices that the follower wants beside those that there are.",
            sum(self._follower.lacking),
        )
        moves = CounterMetricFamily(
            "epd_follow_moves", "Changes that the follower has begun, by kind and outcome.", labels=("kind", "outcome")
        )
        for (kind, outcome), count in self._follower.moves.items():
            moves.add_metric((kind, outcome), count)
        yield moves
        error = GaugeMetricFamily(
            "epd_follow_prediction_error",
            "Median error of how busy moves were predicted to leave a group, relative to what was measured.",
        )
        if (value := median_error(self._follower.gains)) is not None:
            error.add_metric((), value)
        yield error


def _gauge(name: str, about: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"epd_follow_{name}", about, labels=("group",))
    for group, value in values.items():
        family.add_metric((group,), value)
    return family
