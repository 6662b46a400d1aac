"""What was measured, as data: steps of engines, requests of a client, and what follows from when they were. Pure.

Steps are those of a trace (`epd_serve/trace.py`), requests those that `deploy/planner/sweep.py` sent; both by the
monotonic clock of one host.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deploy.planner.fit import medians
from deploy.planner.profile import DECODE, ENCODE, PREFILL, beside_name
from epd_serve.phases.stamps import read_stamps
from epd_serve.trace import STEP


class Step(Struct, frozen=True, array_like=True):
    """What one step of an engine did.

    Attributes:
        begun_s, ended_s: monotonic.
        prompt_tokens: computed in it; 0 at an encoder, whose engine counts prompts that it does not compute.
        item_tokens: encoded. decodes: requests that got a token after their first.
        item_pairs: sum, over those items, of their tokens squared.
        context_tokens: sum, over those prompt tokens, of those before each. kv_tokens: of the requests that decode.
    """

    instance: str
    begun_s: float
    ended_s: float
    prompt_tokens: int = 0
    item_tokens: int = 0
    decodes: int = 0
    item_pairs: int = 0
    context_tokens: int = 0
    kv_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def kind(self) -> str:
        """The one kind of work that it did, "" for a mixture."""
        done = {ENCODE: self.item_tokens, PREFILL: self.prompt_tokens, DECODE: self.decodes}
        kinds = [kind for kind, amount in done.items() if amount]
        return kinds[0] if len(kinds) == 1 else ""


class Sent(Struct, frozen=True, array_like=True):
    """A request that a client sent while no other was served, and when it had the whole answer. `tokens`: of that."""

    sent_s: float
    ended_s: float
    tokens: int = 1


class Part(Struct, frozen=True):
    """One launch that was measured.

    Attributes:
        layout, tp: what was served. start_s: until it was ready.
        steps: of all its instances, those for warming up left out. alone: requests that were served one at a time.
        kv_tokens, max_running, max_model_len: of its largest stage, 0 where no stage said.
        front_busy: CPU seconds of all that is no engine in some requests of `alone`, by the tokens of their items.
    """

    name: str
    layout: str
    tp: int
    start_s: float
    steps: list[Step]
    alone: list[Sent] = []
    front_busy: list[tuple[int, float]] = []
    kv_tokens: int = 0
    max_running: int = 0
    max_model_len: int = 0


def role_of(instance: str) -> str:
    return instance.rstrip("0123456789")


def read_steps(traces: Path, since_s: float = 0.0) -> list[Step]:
    """All that began after `since_s`, in the order of their beginnings.

    Where the next one of an engine follows at once, what the engine does in between is part of the step before: tokens
    are as far apart as steps begin.
    """
    found = []
    for stamp in read_stamps(traces):
        if stamp.event == STEP and (begun_s := float(stamp.more["t0"])) >= since_s:
            work = {name: int(value) for name, value in stamp.more.items() if name != "t0"}
            if role_of(stamp.instance) == "E":
                work |= {"prompt_tokens": 0, "context_tokens": 0}
            found.append(Step(stamp.instance, begun_s, stamp.t, **work))
    found.sort(key=lambda step: step.begun_s)
    next_s: dict[str, float] = {}
    for at, step in reversed(list(enumerate(found))):
        begins_s = next_s.get(step.instance, math.inf)
        if 0 < begins_s - step.ended_s < PAUSE * step.seconds:
            found[at] = replace(step, ended_s=begins_s)
        next_s[step.instance] = step.begun_s
    return found


PAUSE = 0.1
"""Of a step's time, up to which the next one follows at once."""


def within(steps: Sequence[Step], sent: Sent) -> list[Step]:
    """The steps of a request that was alone."""
    return [step for step in steps if sent.sent_s <= step.begun_s and step.ended_s <= sent.ended_s]


def fronts(part: Part) -> Iterator[tuple[int, float]]:
    """Of each request of one token: tokens of its items, and seconds before its first step and after its last one."""
    for sent in part.alone:
        steps = within(part.steps, sent)
        if steps and sent.tokens == 1:
            inside_s = max(step.ended_s for step in steps) - steps[0].begun_s
            yield sum(step.item_tokens for step in steps), sent.ended_s - sent.sent_s - inside_s


def handovers(part: Part) -> Iterator[tuple[int, float]]:
    """Of each item that one instance encoded and another computed: its tokens, and seconds in between."""
    for sent in part.alone:
        steps = within(part.steps, sent)
        encode = next((step for step in steps if step.kind == ENCODE), None)
        if encode is not None:
            taken = (step for step in steps if step.instance != encode.instance)
            if then := next((step for step in taken if step.prompt_tokens >= encode.item_tokens), None):
                yield encode.item_tokens, max(0.0, then.begun_s - encode.ended_s)


def kv_waits(part: Part) -> Iterator[tuple[int, float]]:
    """Of each prompt that one instance computed and another went on with: its tokens, and seconds in between."""
    for sent in part.alone:
        steps = within(part.steps, sent)
        prefills = [step for step in steps if role_of(step.instance) == "P"]
        then = next((step for step in steps if role_of(step.instance) == "D"), None)
        if prefills and then is not None:
            yield sum(step.prompt_tokens for step in prefills), max(0.0, then.begun_s - prefills[-1].ended_s)


def overlap_s(step: Step, others: Iterable[Step]) -> float:
    """Seconds of `step` in which any of `others` ran; they are one instance's, so that they do not overlap."""
    return sum(max(0.0, min(step.ended_s, other.ended_s) - max(step.begun_s, other.begun_s)) for other in others)


def slowdown(steps: Sequence[Step], kind: str, other: str) -> float | None:
    """How many times as long both kinds of work take side by side, of two instances of one device; None where they
    hardly met.

    Each step is held against the median of those like it that met nobody: work that takes `a` alone and was `o` of its
    `T` seconds beside the other had T - o + o / s = a.
    """
    one, two = ([step for step in steps if step.kind == name] for name in (kind, other))
    rest_s = met_s = 0.0
    for mine, theirs in ((one, two), (two, one)):
        met = [(step, overlap_s(step, near)) for step, near in _near(mine, theirs)]
        alone = medians((_like(step), step.seconds) for step, o in met if not o)
        for step, o in met:
            if o and (a := alone.get(_like(step))) is not None:
                met_s += o
                rest_s += a - (step.seconds - o)
    if met_s < LEAST_MET_S:
        return None
    return max(1.0, met_s / max(rest_s, met_s / TURNS))


LEAST_MET_S = 0.05
TURNS = 2.0
"""Of two kinds that take turns. What lies beyond is no neighbour's: on CPU it is the front's work for requests."""


WHOLE, LEAST_STEPS = 0.8, 4
"""Of a step's time, from which on it counts as beside what it met; of such steps, that tell something."""
_SAME_DEVICE = "same device"


def beside(steps: Sequence[Step]) -> dict[str, float]:
    """How many times as long a kind of work takes while another device does some kind, by `beside_name`: the median
    over steps that met that kind alone, each held against the median of those like it that met nobody.

    Instances of one number share a device; a step that met somebody there says nothing.
    """
    by_instance: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_instance[step.instance].append(step)
    met: list[tuple[Step, dict[str, float]]] = []
    for instance, mine in by_instance.items():
        seconds: list[dict[str, float]] = [defaultdict(float) for _ in mine]
        for other, theirs in by_instance.items():
            if other != instance:
                near = (own for _, own in _near(mine, theirs))
                for step, found, own in zip(mine, seconds, near, strict=True):
                    for one in own:
                        found[one.kind if _device(one) != _device(step) else _SAME_DEVICE] += overlap_s(step, [one])
        met += zip(mine, seconds, strict=True)
    alone = medians((_like(step), step.seconds) for step, found in met if not found)
    ratios: dict[str, list[float]] = defaultdict(list)
    for step, found in met:
        if step.kind and len(found) == 1 and _like(step) in alone:
            ((other_kind, seconds_beside),) = found.items()
            if other_kind not in ("", _SAME_DEVICE) and seconds_beside >= WHOLE * step.seconds:
                ratios[beside_name(step.kind, other_kind)].append(step.seconds / alone[_like(step)])
    return {name: max(1.0, statistics.median(own)) for name, own in ratios.items() if len(own) >= LEAST_STEPS}


def _device(step: Step) -> str:
    return step.instance[len(role_of(step.instance)) :]


def _like(step: Step) -> tuple[int, int, int]:
    return step.prompt_tokens, step.item_tokens, step.decodes


def _near(mine: Sequence[Step], theirs: Sequence[Step]) -> Iterator[tuple[Step, Sequence[Step]]]:
    """Each with those of the others that may have run at its time; both in order."""
    first = 0
    for step in mine:
        while first < len(theirs) and theirs[first].ended_s <= step.begun_s:
            first += 1
        last = first
        while last < len(theirs) and theirs[last].begun_s < step.ended_s:
            last += 1
        yield step, theirs[first:last]
