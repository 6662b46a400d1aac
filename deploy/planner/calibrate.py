"""A profile that agrees with what a deployment did: by its steps, or by what its clients waited for. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from deploy.planner.assemble import step_s
from deploy.planner.fleet import Options
from deploy.planner.profile import DECODE, ENCODE, PREFILL, DeviceProfile, Noise
from deploy.planner.simulate import Served, simulate
from deploy.planner.steps import Step
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.sim.profile import Line, Profile
from epd_serve.traffic import Request

LEAST_STEPS = 20
KINDS = (ENCODE, PREFILL, DECODE)
LEAST_STREAMS = 40
ROUNDS, CLOSE = 8, 0.01
"""What steps take decides how long queues are, so that no factor is right at once."""


def by_steps(profile: DeviceProfile, steps: Sequence[Step]) -> DeviceProfile:
    """The profile whose encode, prefill and decode agree with steps that a deployment did: each is scaled by the median
    of measured over predicted; a kind of which fewer than `LEAST_STEPS` steps did nothing else stays as it is.

    Neighbours on its device slow a deployment's steps, and are in the factors; a profile that is to be used with
    `slowdown` is calibrated by a deployment without them.
    """
    factors = {kind: _factor(profile, [step for step in steps if step.kind == kind]) for kind in KINDS}
    stages = {tp: _scaled(stage, **factors) for tp, stage in profile.stages.items()}
    told = ", ".join(f"{kind} x {factor:.2f}" for kind, factor in factors.items())
    return _told(replace(profile, stages=stages), f"{len(steps)} steps: {told}")


def by_clients(
    profile: DeviceProfile, layout: Layout, traffic: Sequence[Request], options: Options = Options()
) -> DeviceProfile:
    """The profile with which a simulation of recorded traffic agrees with what its clients waited for: decode is scaled
    so that the medians of TPOT are equal, all that comes before a first token so that those of TTFT are. The earlier
    half of the recording decides; what is off in the later half becomes `noise`.

    Args:
        layout: that served it. options: how it was run.

    Raises:
        ConfigError: it has fewer than `LEAST_STREAMS` streams whose times are known, or the layout cannot be simulated.
    """
    known = [one.id for one in traffic if one.ttft_s and one.e2e_s > one.ttft_s and one.output_tokens > 1]
    if len(known) < LEAST_STREAMS:
        raise ConfigError(
            f"--from: the recording has the times of {len(known)} streams of several tokens; "
            f"{LEAST_STREAMS} are needed, and answers in one piece tell none",
            param="--from",
        )
    earlier, later = set(known[: len(known) // 2]), set(known[len(known) // 2 :])
    first = later_tokens = step = before = 1.0
    for _ in range(ROUNDS):
        fitted = _waits(profile, first, later_tokens)
        served = simulate(layout, fitted, traffic, options=options).served
        off = [_median(traffic, earlier, seen) / _median(served, earlier, seen) for seen in (_ttft_s, _tpot_s)]
        if all(abs(one - 1) < CLOSE for one in off):
            break
        if (off[0] < 1) is not (before < 1) and before != 1.0:
            step /= 2  # it went too far: what waits grows faster than what it waits for
        before, first, later_tokens = off[0], first * off[0] ** step, later_tokens * off[1]
    off = [abs(_median(served, later, one) / _median(traffic, later, one) - 1) for one in (_ttft_s, _tpot_s, _e2e_s)]
    ttft, tpot, e2e = (round(one, 4) for one in off)
    noise = Noise(ttft, tpot, e2e, fitted.noise.repeat)
    told = f"{len(known)} streams of {layout}: first token x {first:.2f}, decode x {later_tokens:.2f}"
    return _told(replace(fitted, noise=noise), told)


def _ttft_s(one: Request | Served) -> float:
    return one.ttft_s


def _e2e_s(one: Request | Served) -> float:
    return one.e2e_s


def _tpot_s(one: Request | Served) -> float:
    tokens = one.output_tokens if isinstance(one, Request) else one.tokens
    return (one.e2e_s - one.ttft_s) / (tokens - 1)


def _median(rows: Iterable[Request | Served], ids: set[str], seen: Callable[[Request | Served], float]) -> float:
    return statistics.median(seen(one) for one in rows if one.id in ids)


def _told(profile: DeviceProfile, by: str) -> DeviceProfile:
    comment = "; ".join(filter(None, (profile.comment, f"calibrated by {by}")))
    return replace(profile, how="calibrated", comment=comment)


def _factor(profile: DeviceProfile, steps: Sequence[Step]) -> float:
    stage = profile.stages[min(profile.stages)]
    ratios = [step.seconds / predicted for step in steps if (predicted := step_s(stage, step)) > 0]
    return statistics.median(ratios) if len(ratios) >= LEAST_STEPS else 1.0


def _waits(profile: DeviceProfile, first: float, later: float) -> DeviceProfile:
    stages = {tp: _scaled(stage, first, first, later) for tp, stage in profile.stages.items()}
    lines = {name: _times(getattr(profile, name), first) for name in ("front", "front_busy", "handover", "kv")}
    return replace(profile, stages=stages, **lines)


def _times(line: Line, factor: float) -> Line:
    return Line(line.setup_s * factor, line.per_unit_s * factor)


def _scaled(stage: Profile, encode: float, prefill: float, decode: float) -> Profile:
    return replace(
        stage,
        encode=_times(stage.encode, encode),
        encode_context_s=stage.encode_context_s * encode,
        prefill=_times(stage.prefill, prefill),
        prefill_context_s=stage.prefill_context_s * prefill,
        decode_step_s=tuple((batch, seconds * decode) for batch, seconds in stage.decode_step_s),
        decode_kv_s=stage.decode_kv_s * decode,
    )
