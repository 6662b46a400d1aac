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
from epd_serve.memory_shares import Division
from epd_serve.placement import InstancePlan

_LENGTHS = (131072, 65536, 32768, 16384, 8192, 4096)
_PIXELS = (8_388_608, 4_194_304, 2_097_152, 1_048_576)
_BATCHED = (8192, 4096, 2048, 1024)
_NO_CLIPS = ("--limit-mm-per-prompt", json.dumps({"video": 0}))
_WIDTHS = (2, 4, 8, 16)


def first_fix(group: Neighbours, sizing: Sizing) -> str:
    """One line. Names flags with numbers; where no flag of the stages helps, another layout; else a smaller model."""
    for text, words in _flags(group, sizing):
        if _fits(sizing.divided(group.plans, words)):
            return text
    if sizing.inventory.kind == "cpu":
        return "fewer instances, a smaller or quantised model, or a machine with more memory"
    if len(group.plans) > 1:
        alone = [replace(plan, colocated_with=()) for plan in group.plans]
        for text, words in (("", ()), *_flags(group, sizing)):
            if all(_fits(sizing.divided((plan,), words)) for plan in alone):
                also = f", with {text}" if text else ""
                return f"fewer stages per device: --layout without the parentheses around {_ids(group)}{also}"
    for tp in _WIDTHS:
        wider = [_at_width(plan, tp) for plan in group.plans if tp > plan.tp]
        if wider and all(_fits(sizing.divided((plan,))) for plan in wider):
            each = f"each of {_ids(group)}" if len(group.plans) > 1 else _ids(group)
            return f"more devices per stage: {each} fits on {tp} devices of its own, in --layout with :tp{tp}"
    return "a quantised or smaller model; no flag and no width up to 16 makes this one fit"


def clip_fix(plan: InstancePlan, total: int, sizing: Sizing) -> str:
    """What bounds the clips of an encoder, or switches them off."""
    found = sizing.flags(plan, total).max_model_len
    own = sizing.sizes()
    length = found or (own.language.max_positions if own is not None else 0)
    shorter = f"a --max-model-len below {length} in --stage-args bounds it, " if length else ""
    return shorter + _text(_quoted(_NO_CLIPS), "no video at all").replace("--stage-args", "or --stage-args", 1)


def _flags(group: Neighbours, sizing: Sizing) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Text and flags, the cheapest first; the last is all of them together."""
    total = group.division.total
    flags = [sizing.flags(plan, total) for plan in group.plans if plan.role.has_language_model]
    sizes = sizing.sizes()
    own = sizes.language.max_positions if sizes is not None else 0
    length = max((one.max_model_len or own for one in flags), default=own)
    lengths = [one for one in _LENGTHS if one < length and not all(flag.fitted_len for flag in flags)]
    clips = any("video" in (sizing.takes(plan) or ()) for plan in group.plans)
    pixels = picture_pixels(sizing.processors())
    pixels = pixels if pixels is not None and any(sizing.takes(plan) != frozenset() for plan in group.plans) else 0
    batched = max(sizing.flags(plan, total).max_num_batched_tokens for plan in group.plans)
    for one in lengths:
        yield _text(f"--max-model-len {one}", f"now {length}"), ("--max-model-len", str(one))
    if clips:
        yield _text(_quoted(_NO_CLIPS), "no video"), _NO_CLIPS
    for one in (bound for bound in _PIXELS if bound < pixels):
        words = ("--mm-processor-kwargs", json.dumps({"max_pixels": one}))
        yield _text(_quoted(words), f"now {pixels}"), words
    for one in (bound for bound in _BATCHED if bound < batched):
        yield _text(f"--max-num-batched-tokens {one}", f"now {batched}"), ("--max-num-batched-tokens", str(one))
    for one in lengths or [0]:
        every = (
            *(("--max-model-len", str(one)) if one else ()),
            *(_NO_CLIPS if clips else ()),
            *(("--mm-processor-kwargs", json.dumps({"max_pixels": _PIXELS[-1]})) if pixels > _PIXELS[-1] else ()),
            *(("--max-num-batched-tokens", "2048") if batched > 2048 else ()),
        )
        if every:
            yield _text(_quoted(every), "all of it together"), every


def _text(words: str, note: str) -> str:
    quote = '"' if "'" in words else "'"
    return f"--stage-args {quote}all:{words}{quote} ({note})"


def _quoted(words: Sequence[str]) -> str:
    return " ".join(f"'{word}'" if "{" in word else word for word in words).replace('"', '\\"')


def _fits(division: Division | None) -> bool:
    if division is None or division.missing:
        return False
    return all(grant.kv >= grant.need.kv_least for grant in division.grants)


def _at_width(plan: InstancePlan, tp: int) -> InstancePlan:
    # The same device over and over: what counts is its size.
    return replace(plan, tp=tp, devices=plan.devices[:1] * tp, colocated_with=())


def _ids(group: Neighbours) -> str:
    return ", ".join(plan.id for plan in group.plans)
