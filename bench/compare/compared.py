"""Two results, figure by figure: ratio B/A, and how sure it is. Pure.

Where the same requests ran in both, they are drawn together, so what a hard request costs both does not widen the
interval. An interval speaks of the requests or rounds of these two results. What differs between two runs of the same
thing (a machine's mood, a thermal limit) is in neither; only runs that are repeated in turns show that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.client.row import Row
from bench.compare.bootstrap import LEAST, draw, interval, whole
from bench.compare.direction import Direction, better
from bench.compare.requests import Requests, gives, key_of, requests_of, window_s
from bench.compare.results import Result
from bench.compare.rounds import least, resampled, samples_of
from epd_serve.errors import ConfigError

PAIRED = 0.9
"""Share of the requests of both runs that have to be in both for them to be drawn together."""
PER_DEVICE = ("output_tokens_per_s", "answered_rps", "offered_rps", "goodput_rps")
"""Figures of all devices together that have none per device beside them."""
Verdict = Literal["better", "worse", "no difference shown", "no interval", ""]


@dataclass(frozen=True)
class Compared:
    """One figure of both.

    Attributes:
        entry, run: of the figure; "" where there is none.
        ratio: B/A; None where A is 0, or one is below it.
        interval: 95 %; None where there are no samples, too few, or none that give the figure.
        over: what was resampled: `paired requests`, `requests`, `paired slices`, `slices`, `rows`, "".
        samples: in A and B. why: there is no interval.
    """

    entry: str
    run: str
    name: str
    a: float
    b: float
    ratio: float | None
    better: Direction
    interval: tuple[float, float] | None = None
    over: str = ""
    samples: tuple[int, int] = (0, 0)
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of B. Without a direction of the figure there is none but that no difference shows."""
        if self.interval is None or self.ratio is None:
            return "no interval" if self.better else ""
        low, high = self.interval
        if low <= 1 <= high:
            return "no difference shown"
        if not self.better:
            return ""
        return "better" if (low > 1) == (self.better == "higher") else "worse"

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval or (None, None)
        return {
            "entry": self.entry,
            "run": self.run,
            "figure": self.name,
            "a": self.a,
            "b": self.b,
            "ratio": self.ratio,
            "low": low,
            "high": high,
            "better": self.better,
            "verdict": self.verdict,
            "over": self.over,
            "samples": list(self.samples),
            "why": self.why,
        }


@dataclass(frozen=True)
class Drawing:
    """How intervals are made."""

    resamples: int = 2000
    seed: int = 0


def compared(a: Result, b: Result, drawing: Drawing) -> list[Compared]:
    """Every figure that both have, in the order of A.

    Raises:
        ConfigError: they have none in common.
    """
    found = list(_loads(a, b, drawing) if _is_load(a) and _is_load(b) else _others(a, b, drawing))
    if not found:
        raise ConfigError(f"{a.path} and {b.path} have no figure in common: {_told(a)} and {_told(b)}")
    return found


def _is_load(one: Result) -> bool:
    return bool(one.rows) and all({"run", "window_s"} <= row.keys() for row in one.rows)


def _told(one: Result) -> str:
    runs = [str(row["run"]) for row in one.rows if "run" in row]
    return ", ".join(runs or list(one.figures)[:5]) or "nothing"


def _loads(a: Result, b: Result, drawing: Drawing) -> Iterator[Compared]:
    for run, left, right in _runs(a, b):
        requests = _both(a, b, left, right)
        first, second = (_figures(one, label) for one, label in ((a, left), (b, right)))
        for name in first.keys() & second.keys() if requests is None else ():
            yield replace(_plain(a.name, run, name, first[name], second[name]), why="its requests were not kept")
        if requests is not None:
            for name in first:
                if name in second:
                    yield _of_requests(_plain(a.name, run, name, first[name], second[name]), *requests, drawing)
    runs = {str(row["run"]) for one in (a, b) for row in one.rows}
    for name, value in a.figures.items():
        if name.split("/")[0] not in runs and name in b.figures:
            yield replace(_plain(a.name, "", name, value, b.figures[name]), why="of a search, which has no samples")


def _runs(a: Result, b: Result) -> list[tuple[str, str, str]]:
    """(title, label in A, label in B) of the runs that both have: by rate, else by rate per device."""
    left, right = ([str(row["run"]) for row in one.rows] for one in (a, b))
    common = [(label, label, label) for label in left if label in right]
    if common or a.devices is None or b.devices is None or a.devices == b.devices:
        return common
    rates = [{_per_device(label, one.devices): label for label in labels} for one, labels in ((a, left), (b, right))]
    return [(title, label, rates[1][title]) for title, label in rates[0].items() if title and title in rates[1]]


def _per_device(label: str, devices: int | None) -> str:
    number, space, rest = label.partition(" rps")
    try:
        return f"{float(number) / (devices or 1):.6g} rps per device{rest}" if space else ""
    except ValueError:
        return ""


def _figures(one: Result, run: str) -> dict[str, float]:
    prefix = f"{run}/"
    return {name.removeprefix(prefix): value for name, value in one.figures.items() if name.startswith(prefix)}


def _plain(entry: str, run: str, name: str, a: float, b: float) -> Compared:
    ratio = b / a if a > 0 and b >= 0 else None
    return Compared(entry, run, name, a, b, ratio, better(name))


def _both(a: Result, b: Result, left: str, right: str) -> tuple[Requests, Requests, bool] | None:
    """The requests of a run in both, in one order where they are the same ones; None where one has none."""
    sides: list[tuple[Sequence[Row], Result, str]] = []
    for one, label in ((a, left), (b, right)):
        rows = sorted((row for row in one.requests if row.run == label), key=lambda row: row.due_s)
        if not rows:
            return None
        sides.append((rows, one, label))
    keys = [[key_of(row) for row in rows] for rows, _, _ in sides]
    shared = set(keys[0]) & set(keys[1])
    union = list(dict.fromkeys([*keys[0], *keys[1]]))
    paired = len(shared) >= PAIRED * len(union)
    if paired:
        union.sort(key=lambda key: key[1])
        keys = [union, union]
    made = [
        requests_of(rows, next(window_s(row) for row in one.rows if row["run"] == label), one.devices, own)
        for (rows, one, label), own in zip(sides, keys, strict=True)
    ]
    return made[0], made[1], paired


def _of_requests(plain: Compared, a: Requests, b: Requests, paired: bool, drawing: Drawing) -> Compared:
    """With its interval, or why it has none."""
    if plain.ratio is None:
        return replace(plain, why="one of them is 0")
    for one, value, side in ((a, plain.a, "A"), (b, plain.b, "B")):
        if one.figure(plain.name, whole(len(one.rows))) is None and one.sliced(plain.name, 1) is None:
            return replace(plain, why="not of single requests, or too few for this percentile")
        if not gives(one, plain.name, value):
            return replace(plain, why=f"the requests kept of {side} do not give it")
    if a.sliced(plain.name, 1) is not None:
        return _of_slices(plain, a, b, paired, drawing)
    counts = len(a.counted), len(b.counted)
    if min(counts) < LEAST:
        return replace(plain, why=f"{min(counts)} requests are too few")
    weights = draw(len(a.rows), drawing.resamples, drawing.seed)
    others = weights if paired else draw(len(b.rows), drawing.resamples, drawing.seed + 1)
    first, second = a.figure(plain.name, weights), b.figure(plain.name, others)
    assert first is not None and second is not None, "the whole sample gave the figure"
    over = "paired requests" if paired else "requests"
    return replace(plain, interval=interval(second, first), over=over, samples=counts)


def _of_slices(plain: Compared, a: Requests, b: Requests, paired: bool, drawing: Drawing) -> Compared:
    counts = a.slices, b.slices
    if paired:
        counts = min(counts), min(counts)
    if not min(counts):
        return replace(plain, why="the window is too short for its requests to be cut into slices")
    first, second = a.sliced(plain.name, counts[0]), b.sliced(plain.name, counts[1])
    assert first is not None and second is not None, "asked for before"
    weights = draw(counts[0], drawing.resamples, drawing.seed)
    others = weights if paired else draw(counts[1], drawing.resamples, drawing.seed + 1)
    found = interval(others @ second / counts[1], weights @ first / counts[0])
    return replace(plain, interval=found, over="paired slices" if paired else "slices", samples=counts)


def _others(a: Result, b: Result, drawing: Drawing) -> Iterator[Compared]:
    for name, value in a.figures.items():
        if name not in b.figures:
            continue
        plain = _plain(a.name, "", name, value, b.figures[name])
        if plain.ratio is None:
            yield replace(plain, why="one of them is 0 or below")
            continue
        found = samples_of(name, a.rows, b.rows, (value, b.figures[name]))
        if found is None:
            yield replace(plain, why="no column of the rows gives it")
            continue
        statistic, first, second = found
        counts = len(first), len(second)
        if min(counts) < least(statistic):
            yield replace(plain, why=f"{min(counts)} rows are too few", samples=counts)
            continue
        drawn = [
            resampled(statistic, sample, draw(len(sample), drawing.resamples, drawing.seed + place))
            for place, sample in enumerate((first, second))
        ]
        yield replace(plain, interval=interval(drawn[1], drawn[0]), over="rows", samples=counts)


def per_device(found: Compared, a: int, b: int) -> Compared:
    """A throughput of all devices together, as one of each of so many in A and in B."""
    if found.name.rsplit("/", 1)[-1] not in (*PER_DEVICE, "effective_tokens_per_s") or found.ratio is None:
        return found
    scale = a / b
    low_high = found.interval and (found.interval[0] * scale, found.interval[1] * scale)
    name = f"{found.name}_per_device"
    return replace(found, name=name, a=found.a / a, b=found.b / b, ratio=found.ratio * scale, interval=low_high)
