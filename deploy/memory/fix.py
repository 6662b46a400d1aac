"""The one change that makes stages fit: flags are tried in the order in which they cost the least. Pure but for files.

Each is tried by working the need out anew with it, so what is recommended fits by the same estimate that refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from deploy.memory.plan import Neighbours
from deploy.memory.sizing import Sizing
from epd_serve.largest_items import picture_pixels
from epd_serve.placement import InstancePlan

_LENGTHS = (131072, 65536, 32768, 16384, 8192, 4096)
_PIXELS = (8_388_608, 4_194_304, 2_097_152, 1_048_576)
_BATCHED = (8192, 4096, 2048, 1024)
_NO_CLIPS = ("--limit-mm-per-prompt", json.dumps({"video": 0}))
_WIDTHS = (2, 4, 8, 16)


def first_fix(group: Neighbours, sizing: Sizing) -> str:
    """One line. Names flags with numbers; where no flag of the stages helps, another layout; else a smaller model."""
    flags = list(_flags(group, sizing))
    for text, words in flags:
        if _fits(sizing, group.plans, words):
            return text
    if sizing.inventory.kind == "cpu":
        return "fewer instances, a smaller or quantised model, or a machine with more memory"
    ids = ", ".join(plan.id for plan in group.plans)
    several = len(group.plans) > 1
    if several:
        for text, words in (("", ()), *flags):
            if all(_fits(sizing, [replace(plan, colocated_with=())], words) for plan in group.plans):
                also = f", with {text}" if text else ""
                return f"fewer stages per device: --layout without the parentheses around {ids}{also}"
    for tp in _WIDTHS:
        wider = [_at_width(plan, tp) for plan in group.plans if tp > plan.tp]
        if wider and all(_fits(sizing, [plan]) for plan in wider):
            each = f"each of {ids}" if several else ids
            return f"more devices per stage: {each} fits on {tp} devices of its own, in --layout with :tp{tp}"
    return "a quantised or smaller model; no flag and no width up to 16 makes this one fit"


def clip_fix(plan: InstancePlan, total: int, sizing: Sizing) -> str:
    """What bounds the clips of an encoder, or switches them off."""
    length = sizing.flags(plan, total).max_model_len or sizing.longest
    shorter = f"a --max-model-len below {length} in --stage-args bounds it, " if length else ""
    return shorter + _text(_NO_CLIPS, "no video at all").replace("--stage-args", "or --stage-args", 1)


def _flags(group: Neighbours, sizing: Sizing) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Text and flags, the cheapest first; the last is all of them together."""
    every = [sizing.flags(plan, group.division.total) for plan in group.plans]
    models = [one for plan, one in zip(group.plans, every, strict=True) if plan.role.has_language_model]
    takes = [sizing.takes(plan) for plan in group.plans]
    length = 0 if all(one.fitted_len for one in models) else max(one.max_model_len or sizing.longest for one in models)
    pixels = picture_pixels(sizing.processors()) if any(taken != frozenset() for taken in takes) else 0
    batched = max(one.max_num_batched_tokens for one in every)

    lengths = _below("--max-model-len", _LENGTHS, length)
    clips = [(_NO_CLIPS, "no video")] if any("video" in (taken or ()) for taken in takes) else []
    smaller = _below("--mm-processor-kwargs", _PIXELS, pixels or 0, '{{"max_pixels": {}}}')
    fewer = _below("--max-num-batched-tokens", _BATCHED, batched)
    for words, note in (*lengths, *clips, *smaller, *fewer):
        yield _text(words, note), words
    others = (*clips, *smaller[-1:], *_below("--max-num-batched-tokens", (2048,), batched))
    for change in lengths or [((), "")]:
        words = tuple(word for some, _ in (change, *others) for word in some)
        if words:
            yield _text(words, "all of it together"), words


def _below(flag: str, values: Sequence[int], now: int, spelled: str = "{}") -> list[tuple[tuple[str, ...], str]]:
    """The flag with each of the values that is less than what holds now, and a note that tells that."""
    return [((flag, spelled.format(one)), f"now {now}") for one in values if one < now]


def _text(words: Sequence[str], note: str) -> str:
    quoted = " ".join(f"'{word}'" if "{" in word else word for word in words).replace('"', '\\"')
    quote = '"' if "'" in quoted else "'"
    return f"--stage-args {quote}all:{quoted}{quote} ({note})"


def _fits(sizing: Sizing, plans: Sequence[InstancePlan], words: Sequence[str] = ()) -> bool:
    division = sizing.divided(plans, words)
    if division is None or division.missing:
        return False
    return all(grant.kv >= grant.need.kv_least for grant in division.grants)


def _at_width(plan: InstancePlan, tp: int) -> InstancePlan:
    # The same device over and over: what counts is its size.
    return replace(plan, tp=tp, devices=plan.devices[:1] * tp, colocated_with=())
