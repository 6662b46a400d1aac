"""Nobody waits for ever: P and D with too few blocks, a store with too little room, encoders slow or dead.

A world of the product's own decisions (features, spare blocks) between models of what they decide about: vLLM's
scheduler at P, D's reservations, an encoder, a store that evicts what nobody has pinned and nobody has used lately. Who
is next is drawn at random. A live encoder renews what it has, without end, so that no deadline resolves a circular
wait: only what was evicted has a deadline.

Why it ends: what has begun to run holds pins and blocks, and goes on unless it has begun before its features were
complete. There is one such request at most, and one that is ahead of D; beside the blocks of both any other request
fits: all others drain. Who waits pins nothing (`features.py`), so that the store has room for what is lacking, in time.
The one that has waited longest keeps what it has from being evicted. It has D's blocks if anybody who waits has, so
then it runs; and so on. Whoever is ahead of D runs, and keeps its blocks at P until D has some, which those give back
that D has blocks for: they can all run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from epd_serve.engine.ec.features import Failure, Features
from epd_serve.engine.ec.partial_prefill import SpareBlocks

TICK_S = 0.25
PATIENCE_TICKS = 4000
WAIT_S, SPARE_S, FOREVER_S = 3.0, 1.0, 1e9
BLOCK, IMAGE, TEXT = 2, 4, 2  # tokens: of a block, of an image, before each image


class Stored:
    """A feature in the store, pinned as often as somebody said so."""

    def __init__(self, now: float) -> None:
        self.pins = 0
        self.used_at = now


@dataclass
class Pinned:
    stored: Stored

    def release(self) -> None:
        self.stored.pins -= 1


@dataclass
class Request:
    """Images, each behind some text. `slots` are the KV blocks it holds at P."""

    name: str
    keys: list[str]
    computed: int = 0
    blocks: int = 0
    has_ready: bool = False

    @property
    def tokens(self) -> int:
        return len(self.keys) * (TEXT + IMAGE)

    def offset(self, index: int) -> int:
        return index * (TEXT + IMAGE) + TEXT

    def ahead(self) -> list[int]:
        return [index for index in range(len(self.keys)) if self.offset(index) + IMAGE > self.computed]


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class World:
    """What there is of everything. `together`: pins are taken all at once, else one by one, as features come. `spares`,
    `one_ahead`: whether those parts of the product are there at all. `ahead_tokens`: of a prompt that may go ahead of
    D."""

    requests: list[Request]
    room: int
    p_blocks: int
    d_blocks: int
    seats: int
    longest: int
    ahead_tokens: int
    chance: random.Random
    alive: bool = True
    early: bool = True  # D reserves when the first image is stored, else when all are
    together: bool = True
    spares: bool = True
    one_ahead: bool = True
    now: float = 0.0
    store: dict[str, Stored] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    kept: list[Request] = field(default_factory=list)  # computed, and still ahead of D
    at_d: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.features = Features(self._pin, recompute_limit=1, wait_s=WAIT_S, renew_limit_s=FOREVER_S)
        self.hoard: dict[str, list[Pinned]] = {}  # what a request has pinned while it waits, where it may
        beside = SpareBlocks.beside(self.longest, blocks=self.p_blocks, block_sizes=(BLOCK,))
        if self.spares and not beside.fit(self.ahead_tokens):
            self.ahead_tokens = 0
        left = SpareBlocks(beside.spare - blocks_of(self.ahead_tokens), (BLOCK,))
        self.spare = left if self.spares else SpareBlocks(self.p_blocks, (BLOCK,))
        queue = [key for request in self.requests for key in request.keys]
        self.queue = deque(sorted(queue, key=lambda _: self.chance.random()))
        self.d_queue = deque(self.requests)
        self.waiting = list(self.requests)

    # --- the actors -----------------------------------------------------------------------------------------------

    def encode(self) -> None:
        """One image, if the store has room for it, and word of what is still to come."""
        if not self.alive:
            return
        self.features.renew(list(self.queue), self.now)
        if not self.queue:
            return
        if len(self.store) >= self.room:
            old = self.now - SPARE_S
            loose = [key for key, stored in self.store.items() if not stored.pins and stored.used_at <= old]
            if not loose:
                return
            del self.store[self.chance.choice(loose)]
        key = self.queue.popleft()
        self.store[key] = Stored(self.now)
        self.announced.add(key)

    def listen(self) -> None:
        for key, row in list(self.features.to_look_for(self.now)):
            if key in self.store:
                self.features.found(key, self.now)
                if not self.together:
                    for request in sorted(row.requests):
                        self.hoard.setdefault(request, []).extend(self._pin(request, [key]) or ())
            else:
                self.features.missed(key)
                if row.last_look:
                    self.features.not_found(key)
        for key in self.features.protected():
            if key in self.store:
                self.store[key].used_at = self.now

    def _pin(self, request: str, keys: Collection[str]) -> Any:
        if not all(key in self.store for key in keys):
            return None
        for key in keys:
            self.store[key].pins += 1
        return [Pinned(self.store[key]) for key in keys]

    def reserve(self) -> None:
        """D's blocks for those in line whose features were announced, or will not be."""
        free = self.d_blocks - sum(blocks_of(request.tokens) for request in self.at_d)
        for request in list(self.d_queue):
            awaited = request.keys[:1] if self.early else request.keys
            if self.alive and not self.announced.issuperset(awaited):
                continue
            if blocks_of(request.tokens) > free:
                return
            free -= blocks_of(request.tokens)
            self.d_queue.remove(request)
            self.at_d.append(request)
            request.has_ready = True

    def step(self) -> None:
        """One step of P, as vLLM schedules it: first those that run, then those that wait, in order."""
        for request in [request for request in self.kept if request.has_ready]:
            self.kept.remove(request)
            self._send(request)
        for request in list(self.running):
            if request in self.running:
                self._run(request)
        while self.waiting and len(self.running) < self.seats:
            can = (one for one in self.waiting if self._may_run(one) and self._reach(one) > one.computed)
            request = next(can, None)
            if request is None or not self._admit(request):
                return

    def _drains(self, request: Request) -> bool:
        """Whether nobody has to give its blocks back first: it leaves P in the next step."""
        return request in self.kept and request.has_ready

    def _may_run(self, request: Request) -> bool:
        ahead = [one for one in (*self.running, *self.kept) if not one.has_ready]
        alone = not ahead or not self.one_ahead
        return request.has_ready or (alone and request.tokens <= self.ahead_tokens)

    def _run(self, request: Request) -> None:
        reach = self._reach(request)
        if reach <= request.computed:
            return
        while blocks_of(reach) - request.blocks > self._free():
            victim = self.running.pop()
            victim.computed = victim.blocks = 0
            self.waiting.insert(0, victim)
            if victim is request:
                return
        self._compute(request, reach)

    def _admit(self, request: Request) -> bool:
        reach = self._reach(request)
        if blocks_of(reach) > self._free():
            return False
        self.waiting.remove(request)
        self.running.append(request)
        self._compute(request, reach)
        return True

    def _compute(self, request: Request, reach: int) -> None:
        request.computed, request.blocks = reach, blocks_of(reach)
        if reach == request.tokens:
            self.running.remove(request)
            self.features.release([request.name])
            for pinned in self.hoard.pop(request.name, ()):
                pinned.release()
            if request.has_ready:
                self._send(request)
            else:
                self.kept.append(request)

    def _send(self, request: Request) -> None:
        self.at_d.remove(request)
        self.done.append(request)

    def _free(self) -> int:
        return self.p_blocks - sum(request.blocks for request in (*self.running, *self.kept))

    def _reach(self, request: Request) -> int:
        """Up to which token it may be computed now."""
        ahead = request.ahead()
        if not ahead:
            self.features.passed(request.name)
            return request.tokens
        keys = [request.keys[index] for index in ahead]
        worth = None
        if self.seats > 1 and self.spare.fit(request.tokens):
            worth_it = request.computed + self.spare.worth_tokens
            worth = next((at for at, index in enumerate(ahead) if request.offset(index) >= worth_it), None)
        here = self.features.may_run(request.name, keys, self.now, must_not_recompute=False, worth=worth)
        assert not isinstance(here, Failure), "it may recompute"
        if here is None:
            return 0
        return request.offset(ahead[here]) if here < len(keys) else request.tokens

    # --- time -----------------------------------------------------------------------------------------------------

    def ends(self) -> bool:
        """Whether all are done in the end. Most ticks everybody acts, in any order; some miss theirs."""
        actors = [self.encode, self.listen, self.reserve, self.step]
        for _ in range(PATIENCE_TICKS):
            for act in self.chance.sample(actors, self.chance.choice([3, 4, 4])):
                act()
            self._check()
            if len(self.done) == len(self.requests):
                return not any(stored.pins for stored in self.store.values())
            self.now += TICK_S
        return False

    def _check(self) -> None:
        assert self._free() >= 0 and len(self.running) <= self.seats
        begun = [request for request in self.running if request.name == self.features.partial or not request.has_ready]
        if self.spares and self.one_ahead:
            held = sum(request.blocks for request in (*begun, *self.kept) if not self._drains(request))
            assert not held or self.p_blocks - held >= blocks_of(self.longest)


def world(seed: int, **more: bool) -> World:
    """Everything just large enough for one request, or a little more."""
    chance = random.Random(seed)
    requests = [
        Request(f"r{number}", [f"{number}.{index}" for index in range(chance.randint(1, 4))])
        for number in range(chance.randint(2, 6))
    ]
    shared = chance.random() < 0.3
    if shared:
        requests[-1].keys[0] = requests[0].keys[0]
    images = max(len(request.keys) for request in requests)
    longest = max(request.tokens for request in requests)
    blocks = blocks_of(longest)
    return World(
        requests,
        room=images + chance.randint(0, 2),
        p_blocks=blocks + chance.randint(0, 2 * blocks),
        d_blocks=blocks + chance.randint(0, blocks),
        seats=chance.randint(1, 3),
        longest=longest,
        ahead_tokens=chance.randint(0, 2) * (TEXT + IMAGE),
        chance=chance,
        **{"alive": chance.random() < 0.8, "early": chance.random() < 0.7, **more},
    )


def hanging(seeds: range, **more: bool) -> Iterator[int]:
    return (seed for seed in seeds if not world(seed, **more).ends())


def test_all_requests_end_whatever_is_scarce() -> None:
    assert list(hanging(range(100))) == []


@pytest.mark.slow
def test_all_of_a_thousand_worlds_end() -> None:
    assert list(hanging(range(100, 1100))) == []


def test_they_would_not_if_who_waits_held_what_is_there() -> None:
    assert next(hanging(range(100), together=False, alive=True), None) is not None


def test_they_would_not_if_what_has_begun_could_take_all_blocks() -> None:
    assert next(hanging(range(400), spares=False, alive=True), None) is not None


def test_they_would_not_if_any_number_could_go_ahead_of_decode() -> None:
    assert next(hanging(range(400), one_ahead=False, alive=True), None) is not None
