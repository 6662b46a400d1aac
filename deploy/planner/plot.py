"""Pictures (SVG) of a profile and of a plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from deploy.planner.choice import Plan
from deploy.planner.profile import DeviceProfile
from epd_serve.sim.profile import Profile

_LEFT, _TOP, _APART, _POINTS = 60, 50, 90, 40
_COLOURS = ("#2b5dab", "#c0572b", "#3a8a4d", "#7d4aa5")


@dataclass(frozen=True)
class _Panel:
    """Axes from 0 on. left: of it, in pixels, and wide, high. most_x, most_y: at the ends of its axes."""

    left: float
    most_x: float
    most_y: float
    wide: float = 300.0
    high: float = 200.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """In pixels."""
        return self.left + x / self.most_x * self.wide, _TOP + self.high - y / self.most_y * self.high

    def axes(self, title: str) -> Iterator[str]:
        yield f'<text x="{self.left}" y="{_TOP - 8}">{escape(title)}</text>'
        yield f'<path d="M{self.left} {_TOP}v{self.high}h{self.wide}" fill="none" stroke="#888"/>'
        for share in (0.0, 0.5, 1.0):
            x, y = self.at(share * self.most_x, share * self.most_y)
            yield f'<text x="{x}" y="{_TOP + self.high + 15}" text-anchor="middle">{share * self.most_x:.6g}</text>'
            yield f'<text x="{self.left - 5}" y="{y + 4}" text-anchor="end">{share * self.most_y:.3g}</text>'


def _svg(wide: float, high: float, head: str, parts: Iterable[str]) -> str:
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif"'
    white = f'font-size="11"><rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20">{head}</text>'
    return "\n".join((f"{begin} {white}", *parts, "</svg>", ""))


def picture_of_profile(profile: DeviceProfile) -> str:
    """Milliseconds of encode, prefill and decode by their amounts, a line per tensor-parallel size."""
    most = profile.stages[min(profile.stages)].capacity
    kinds: tuple[tuple[str, int, Callable[[Profile, float], float]], ...] = (
        ("encode, by item tokens, ms", most.encoder_tokens, lambda one, x: one.step_parts_s(round(x), 0, 0)[0]),
        ("prefill, by prompt tokens of a step, ms", most.step_tokens, _prefill_s),
        ("a decode step, by batch, ms", most.max_running, lambda one, x: one.decode_s(round(x))),
    )
    parts: list[str] = []
    for number, (title, largest, seconds) in enumerate(kinds):
        amounts = [max(1.0, largest * step / _POINTS) for step in range(_POINTS + 1)]
        curves = {tp: [1e3 * seconds(stage, x) for x in amounts] for tp, stage in sorted(profile.stages.items())}
        panel = _Panel(_LEFT + number * (300 + _APART), largest, max(map(max, curves.values())) or 1.0)
        parts += panel.axes(title)
        for row, (tp, values) in enumerate(curves.items()):
            colour = _COLOURS[row % len(_COLOURS)]
            places = (panel.at(x, ms) for x, ms in zip(amounts, values, strict=True))
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{panel.left + 8}" y="{_TOP + 12 + 14 * row}" fill="{colour}">tp{tp}</text>')
    head = escape(f"{profile.model} on {profile.device}, {profile.how} {profile.date}")
    return _svg(_LEFT + 3 * (300 + _APART), 290, head, parts)


def _prefill_s(stage: Profile, tokens: float) -> float:
    return stage.step_parts_s(0, round(tokens), 0, context_tokens=tokens * (tokens - 1) / 2)[1]


def picture_of_plan(plan: Plan) -> str:
    """Goodput a device over the TTFT that nine in ten have, each with its interval. Those that nobody beats in both are
    filled."""
    points = [(one.times.ttft_p90, one.per_device, str(one.layout)) for one in plan.choices]
    right, top = (1.1 * max(values) or 1.0 for values in ([x for x, _, _ in points], [y.high for _, y, _ in points]))
    panel = _Panel(_LEFT, right, top, 540.0, 320.0)
    parts = [*panel.axes("requests/s per device, over TTFT of nine in ten, ms")]
    for ttft_ms, rps, name in points:
        (x, y), (_, low), (_, high) = (panel.at(ttft_ms, one) for one in (rps.value, rps.low, rps.high))
        best = not any(other.value > rps.value and ms < ttft_ms for ms, other, _ in points)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="#36c"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" stroke="#36c" fill="{"#36c" if best else "white"}"/>')
        parts.append(f'<text x="{x + 8:.1f}" y="{y - 6:.1f}">{escape(name)}</text>')
    return _svg(_LEFT + 540 + _APART, 410, escape(f"within {plan.question.goal.slo.text}"), parts)
