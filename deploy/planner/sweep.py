"""What is sent to which layouts so that their steps tell how long everything takes: the parts of a profile.

A part is one launch. In `alone` each kind of work has a device to itself; in the others two kinds share one, first by
turns, then at the same time. On one device all stages are neighbours, and do nothing while it is another's turn. In
`beside` two devices do the same side by side.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from deploy.planner.profile import DECODE, ENCODE, PREFILL
from deploy.planner.served import Launched
from deploy.planner.steps import Part, Sent, read_steps
from epd_serve.errors import ConfigError, StageError

ALONE, BESIDE = "alone", "beside"
PAIRS = {
    f"{ENCODE}+{PREFILL}": "(E-P)-D",
    f"{ENCODE}+{DECODE}": "(E-D)-P",
    f"{PREFILL}+{DECODE}": "E-(P-D)",
}
"""Layouts of two devices in which both share one, and what else a request needs has the other."""
TEXT_PAIRS = {f"{PREFILL}+{DECODE}": "(P-D)"}
ONE_DEVICE = "(E-P-D)"
TWO_DEVICES, TWO_DEVICES_TEXT = "(E-PD)x2", "TP1x2"
"""Of the part `beside`: instances of one number share a device."""

LONGEST, LONG_S = 32_768, 15.0
"""Prompts beyond so many tokens say nothing new, nor those beyond one that took so long, nor larger batches, and take
minutes."""
BESIDE_PROMPT, BESIDE_SIDE, BESIDE_BATCH = 512, 448, 4
LARGE_PROMPT, LARGE_SIDE = 1024, 768
"""Of what runs side by side: tokens of a prompt, pixels of a picture, sequences that decode. On two devices what is
larger, and no longer in a cache of its own."""


REPORT_S = 30.0


@dataclass(frozen=True)
class Extent:
    """How much of it is measured.

    Attributes:
        repeats: of each request, as long as that takes less than `repeat_s`. tokens: of an answer.
        beside_s: how long neighbours run at the same time.
        lengths: of prompts, as far as the model takes them. sides: of pictures. batches: that decode.
        contexts: shares of the longest prompt that are computed before another piece of it.
    """

    repeats: int = 6
    repeat_s: float = 3.0
    tokens: int = 32
    beside_s: float = 8.0
    lengths: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096, 16_384)
    sides: tuple[int, ...] = (112, 224, 336, 448, 640, 896, 1280)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[float, ...] = (0.25, 0.5, 0.9)


QUICK = Extent(3, 1.0, 16, 3.0, (16, 256, 1024), (112, 448, 896), (1, 4, 16, 64), (0.5,))


@dataclass(frozen=True)
class Launch:
    """A part that is to be measured."""

    name: str
    layout: str
    tp: int = 1


def launches(devices: int, sizes: Sequence[int], *, multimodal: bool, only: Sequence[str] = ()) -> list[Launch]:
    """The parts of a profile.

    Args:
        devices: 1 or more, that may be used. sizes: of tensor parallelism. only: names of parts; none is all.

    Raises:
        ConfigError: a size that the devices cannot hold, or an unknown name.
    """
    found = []
    for tp in sizes:
        if tp < 1 or tp > devices:
            raise ConfigError(f"--tp {tp} takes {tp} device(s), and there are {devices}", param="--tp")
        apart = multimodal and 2 * tp <= devices
        layout = f"E:tp{tp}-PD:tp{tp}" if apart else f"TP{tp}"
        found.append(Launch(ALONE if tp == 1 else f"{ALONE}-tp{tp}", layout, tp))
    if 1 in sizes:
        pairs = PAIRS if multimodal else TEXT_PAIRS
        found += [
            Launch(name, layout if devices > 1 or not multimodal else ONE_DEVICE) for name, layout in pairs.items()
        ]
        if devices > 1:
            found.append(Launch(BESIDE, TWO_DEVICES if multimodal else TWO_DEVICES_TEXT))
    names = [one.name for one in found]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"--parts has no {unknown[0]}; there are {', '.join(names)}", param="--parts")
    return [one for one in found if not only or one.name in only]


Action = tuple[str, Callable[[], None]]
"""A line for people, and what is sent meanwhile."""


class Sweep:
    """Sends one part's requests and collects what came of them."""

    def __init__(self, launch: Launch, served: Launched, extent: Extent, *, multimodal: bool) -> None:
        self._launch, self._served, self._extent, self._multimodal = launch, served, extent, multimodal
        self._alone: list[Sent] = []
        self._busy: list[tuple[int, float]] = []
        self._since_s = 0.0
        self._reach = LONGEST
        self._widest: dict[int, int] = {}  # batch by context
        self._models = self._reporting()
        self._longest = min(served.max_model_len or 4096, LONGEST) - 2 * extent.tokens

    def actions(self) -> list[Action]:
        """In order; each is one of what the progress bar counts."""
        name = self._launch.name
        if name.startswith(ALONE):
            found = self._alone_actions()
        elif name == BESIDE:
            found = self._two_devices_actions()
        else:
            found = self._one_device_actions()
        return [("warming up", self._warm_up), *found]

    def part(self) -> Part:
        """What was found, once all actions are done."""
        steps = read_steps(self._served.traces, self._since_s)
        return Part(
            self._launch.name,
            self._launch.layout,
            self._launch.tp,
            self._served.start_s,
            steps,
            self._alone,
            self._busy,
            max(one["kv_tokens"] for one in self._models),
            max(one["max_running"] for one in self._models),
            self._served.max_model_len,
        )

    def _reporting(self) -> list[dict[str, Any]]:
        """What stages with a language model report, once one of them does."""
        until = time.monotonic() + REPORT_S
        while not (found := [one for one in self._served.stages() if one["kv_tokens"]]):
            if time.monotonic() > until:
                raise StageError(f"{self._launch.layout}: no stage has reported for {REPORT_S:g} s", stage="proxy")
            time.sleep(0.05)
        return found

    def _warm_up(self) -> None:
        for length in (64, BESIDE_PROMPT):
            self._text(min(length, self._longest), 4)
        for side in (224, BESIDE_SIDE, BESIDE_SIDE) if self._multimodal else ():
            self._served.image(side, 2)
        self._since_s = time.monotonic()

    # --- one kind of work at a time ---------------------------------------------------------------------------------

    def _alone_actions(self) -> Iterator[Action]:
        served, extent, longest = self._served, self._extent, self._longest
        for length in sorted({*(one for one in extent.lengths if one < longest), longest}):
            yield f"prompts of {length}", partial(self._prompts, length)
        for share in extent.contexts:
            before = int(share * longest)
            for more in (one for one in (64, 512) if before + one <= longest):
                yield f"{more} after {before}", partial(self._context, before, more)
        for side in extent.sides if self._multimodal else ():
            yield f"pictures of {side}²", partial(self._repeat, partial(served.image, side))
        room = min(one["max_running"] for one in self._models)
        tokens = min(one["kv_tokens"] for one in self._models)
        for context in (32, min(1024, longest // 2)):
            for batch in extent.batches:
                if batch <= room and batch * (context + 2 * extent.tokens + batch) <= tokens * 0.8:
                    yield f"{batch} decode after {context}", partial(self._decode, batch, context)

    def _again(self) -> Iterator[None]:
        """As often as something is repeated, which what takes long is less often."""
        begun = time.monotonic()
        for number in range(self._extent.repeats):
            if number and time.monotonic() > begun + self._extent.repeat_s:
                return
            yield

    def _text(self, length: int, tokens: int = 1) -> Sent:
        return self._served.text(self._served.ids(length), tokens)

    def _prompts(self, length: int) -> None:
        if length <= self._reach:
            begun = time.monotonic()
            self._repeat(partial(self._text, length))
            if time.monotonic() > begun + LONG_S:
                self._reach = length

    def _repeat(self, send: Callable[[], Sent]) -> None:
        """With what of it is the front's work."""
        with self._served.cpu() as spent:
            sent = [send() for _ in self._again()]
        self._alone += sent
        steps = read_steps(self._served.traces, sent[-1].sent_s)
        self._busy.append((sum(one.item_tokens for one in steps), spent[0] / len(sent)))

    def _context(self, before: int, more: int) -> None:
        if before + more > self._reach:
            return
        known = self._served.ids(before)
        self._served.text(known)
        self._alone += [self._served.text([*known, *self._served.ids(more)]) for _ in self._again()]

    def _decode(self, batch: int, context: int) -> None:
        if batch > self._widest.get(context, batch):
            return
        tokens = 2 * self._extent.tokens + batch  # the larger the batch, the longer until all of it runs
        begun = time.monotonic()
        self._served.together([self._served.ids(context) for _ in range(batch)], tokens)
        if time.monotonic() > begun + LONG_S:
            self._widest[context] = batch

    # --- two kinds side by side -------------------------------------------------------------------------------------

    def _two_devices_actions(self) -> Iterator[Action]:
        """One request of each kind at a time, so that it keeps one device busy, and then two, half of which meet on one
        device."""
        kinds = (ENCODE, PREFILL, DECODE) if self._multimodal else (PREFILL, DECODE)
        works = {kind: self._work(kind, LARGE_PROMPT, LARGE_SIDE, 1) for kind in kinds}
        for kind, work in works.items():
            yield f"{kind} alone", partial(self._loop, work)
        for pair in itertools.combinations_with_replacement(kinds, 2):
            yield " beside ".join(pair), partial(self._beside, [works[kind] for kind in pair], times=2)

    def _one_device_actions(self) -> Iterator[Action]:
        kinds = self._launch.name.split("+")
        for kind in kinds:
            yield f"{kind} alone", partial(self._loop, self._work(kind))
        yield " beside ".join(kinds), partial(self._beside, [self._work(kind) for kind in kinds])
        if DECODE not in kinds or not self._multimodal:
            for length in (one for one in self._extent.lengths if one < self._longest):
                yield f"KV of {length}", partial(self._loop, partial(self._with_kv, length))

    def _with_kv(self, length: int) -> None:
        self._alone.append(self._text(length, 4))

    def _work(
        self, kind: str, prompt: int = BESIDE_PROMPT, side: int = BESIDE_SIDE, batch: int = BESIDE_BATCH
    ) -> Callable[[], object]:
        served = self._served
        if kind == ENCODE:
            return partial(served.image, side)
        if kind == PREFILL:
            return partial(self._text, min(prompt, self._longest))
        return lambda: served.together([served.ids(32) for _ in range(batch)], 2 * self._extent.tokens)

    def _loop(self, work: Callable[[], object]) -> None:
        for _ in self._again():
            work()

    def _beside(self, works: Sequence[Callable[[], object]], times: int = 1) -> None:
        """Each over and over, until the time is up, so many times the usual; an error of one ends all."""
        until, over = time.monotonic() + times * self._extent.beside_s, threading.Event()

        def run(work: Callable[[], object]) -> None:
            try:
                while time.monotonic() < until and not over.is_set():
                    work()
            finally:
                over.set()

        with ThreadPoolExecutor(len(works)) as pool:
            list(pool.map(run, works))
