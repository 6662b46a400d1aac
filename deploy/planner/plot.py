"""A profile as a picture (SVG): milliseconds of encode, prefill and decode by their amounts, a line per size. Pure."""

from __future__ import annotations

from collections.abc import Callable
from xml.sax.saxutils import escape

from deploy.planner.profile import DeviceProfile
from epd_serve.sim.profile import Profile

_WIDE, _HIGH, _LEFT, _TOP, _APART, _POINTS = 300, 200, 60, 50, 90, 40
_COLOURS = ("#2b5dab", "#c0572b", "#3a8a4d", "#7d4aa5")


def picture(profile: DeviceProfile) -> str:
    """The whole SVG file."""
    most = profile.stages[min(profile.stages)].capacity
    panels = (
        _panel(
            0,
            profile,
            "encode, by item tokens",
            most.encoder_tokens,
            lambda one, x: one.step_parts_s(round(x), 0, 0)[0],
        ),
        _panel(1, profile, "prefill, by prompt tokens of a step", most.step_tokens, _prefill),
        _panel(2, profile, "a decode step, by batch", most.max_running, lambda one, x: one.decode_s(round(x))),
    )
    name = escape(f"{profile.model} on {profile.device}, {profile.how} {profile.date}")
    box = f"0 0 {_LEFT + 3 * (_WIDE + _APART)} {_TOP + _HIGH + 40}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="11">',
            f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20">{name}</text>',
            *panels,
            "</svg>",
            "",
        )
    )


def _prefill(stage: Profile, tokens: float) -> float:
    return stage.step_parts_s(0, round(tokens), 0, context_tokens=tokens * (tokens - 1) / 2)[1]


def _panel(
    number: int, profile: DeviceProfile, title: str, most: int, seconds: Callable[[Profile, float], float]
) -> str:
    """One of three, from the left."""
    amounts = [max(1.0, most * step / _POINTS) for step in range(_POINTS + 1)]
    curves = {tp: [1e3 * seconds(stage, x) for x in amounts] for tp, stage in sorted(profile.stages.items())}
    x0, y0, top = _LEFT + number * (_WIDE + _APART), _TOP + _HIGH, max(map(max, curves.values())) or 1.0
    lines = [f'<text x="{x0}" y="{_TOP - 8}">{title}, ms</text>']
    lines.append(f'<path d="M{x0} {_TOP}V{y0}h{_WIDE}" fill="none" stroke="#888"/>')
    for share in (0.0, 0.5, 1.0):
        lines.append(f'<text x="{x0 + share * _WIDE}" y="{y0 + 15}" text-anchor="middle">{most * share:g}</text>')
        lines.append(f'<text x="{x0 - 5}" y="{y0 - share * _HIGH + 4}" text-anchor="end">{top * share:.3g}</text>')
    for row, (tp, values) in enumerate(curves.items()):
        colour = _COLOURS[row % len(_COLOURS)]
        spots = zip(amounts, values, strict=True)
        points = " ".join(f"{x0 + x / most * _WIDE:.1f},{y0 - ms / top * _HIGH:.1f}" for x, ms in spots)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{x0 + 8}" y="{_TOP + 12 + 14 * row}" fill="{colour}">tp{tp}</text>')
    return "\n".join(lines)
