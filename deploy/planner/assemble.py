"""From measured parts to the profile: which steps tell what, and how well the profile tells them back. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from deploy.planner.fit import least_squares, line, residual, spread, table
from deploy.planner.profile import DECODE, ENCODE, PREFILL, DeviceProfile
from deploy.planner.steps import Part, Step, beside, fronts, handovers, kv_waits, role_of, slowdown
from deploy.planner.sweep import ALONE, BESIDE
from epd_serve.sim.profile import Capacity, Line, Profile


def assembled(about: DeviceProfile, parts: Sequence[Part], *, cpu: bool) -> DeviceProfile:
    """The profile of what was measured; what no part tells is as in `about`, one of whose stages is the default of all.

    Args:
        about: model, device, memory. cpu: the front's work takes cores from the stages.
    """
    (default,) = about.stages.values()
    apart = {part.tp: part for part in parts if part.name.startswith(ALONE)}
    stages = {tp: _stage(part, default) for tp, part in apart.items()}
    pairs = {part.name: slowdown(_of_pair(part), *part.name.split("+")) for part in parts if "+" in part.name}
    kv = line((row for part in parts for row in kv_waits(part)), relative=False)
    if default.kv_bytes_per_token:
        by_bytes = Line(kv.setup_s, kv.per_unit_s / default.kv_bytes_per_token)
        stages = {tp: replace(stage, kv=by_bytes) for tp, stage in stages.items()}
    one = apart.get(1)
    front = line(fronts(one)) if one else about.front
    # Its processes work beside each other, on other cores too: a core of the device is busy while it lasts at most.
    busy = [(x, min(s, front.setup_s + front.per_unit_s * x)) for x, s in one.front_busy] if one and cpu else []
    return replace(
        about,
        stages=stages or about.stages,
        front=front,
        front_busy=line(busy) if busy else about.front_busy,
        handover=line(handovers(one), relative=False) if one else about.handover,
        kv=kv,
        beside=next((beside(part.steps) for part in parts if part.name == BESIDE), about.beside),
        slowdown={**about.slowdown, **{name: found for name, found in pairs.items() if found is not None}},
        spread=spread(_decodes(one, stages[1])) if one else about.spread,
        start_s=max((part.start_s for part in parts), default=0.0),
        comment="; ".join(
            filter(None, (about.comment, *(f"tp{tp}: {_errors(apart[tp], stages[tp])}" for tp in stages)))
        ),
    )


def _stage(part: Part, default: Profile) -> Profile:
    steps = part.steps
    prefills = [step for step in steps if step.kind == PREFILL]
    fitted = least_squares(((1.0, one.prompt_tokens, one.context_tokens), one.seconds) for one in prefills)
    setup_s, token_s, context_s = fitted or (0.0, 0.0, 0.0)
    points, kv_s = table([(one.decodes, one.kv_tokens, one.seconds) for one in steps if one.kind == DECODE])
    known = replace(
        default,
        prefill=Line(setup_s, token_s),
        prefill_context_s=context_s,
        decode_step_s=points,
        decode_kv_s=kv_s,
    )
    most = max((one.prompt_tokens for one in prefills), default=0) or default.capacity.step_tokens
    largest = max((one.item_tokens for one in steps), default=0)
    capacity = Capacity(
        max_running=part.max_running or default.capacity.max_running,
        step_tokens=most,
        kv_tokens=part.kv_tokens or default.capacity.kv_tokens,
        block_tokens=default.capacity.block_tokens,
        max_model_len=part.max_model_len or default.capacity.max_model_len,
        encoder_tokens=max(most, largest),
    )
    # `known` takes no time to encode yet: what a step took beyond its prompts and decodes is its items'.
    items = [one for one in steps if one.item_tokens]
    fitted = least_squares(((1.0, one.item_tokens, one.item_pairs), one.seconds - step_s(known, one)) for one in items)
    setup_s, token_s, pair_s = fitted or (0.0, 0.0, 0.0)
    return replace(known, encode=Line(setup_s, token_s), encode_context_s=pair_s, capacity=capacity)


def step_s(profile: Profile, step: Step) -> float:
    work = step.item_tokens, step.prompt_tokens, step.decodes
    more = {"item_pairs": step.item_pairs, "context_tokens": step.context_tokens, "kv_tokens": step.kv_tokens}
    return sum(profile.step_parts_s(*work, **more))


def _decodes(part: Part, profile: Profile) -> list[tuple[float, float]]:
    """What each step of decodes alone was predicted to take, and took."""
    return [(step_s(profile, step), step.seconds) for step in part.steps if step.kind == DECODE]


def _of_pair(part: Part) -> list[Step]:
    """Steps of the two instances that share a device, by the roles of their kinds."""
    roles = {ENCODE: "E", PREFILL: "P", DECODE: "D"}
    kinds = part.name.split("+")
    return [step for step in part.steps if role_of(step.instance) in [roles[kind] for kind in kinds]]


def _errors(part: Part, profile: Profile) -> str:
    """How far the profile is from the medians that it was made from."""
    found = []
    for kind in (ENCODE, PREFILL, DECODE):
        steps = [step for step in part.steps if step.kind == kind]
        rows = [(step_s(profile, one), one.seconds) for one in steps]
        if rows:
            found.append(f"{kind} {residual(rows):.1%}")
    return f"median error of a step: {', '.join(found)}" if found else ""
