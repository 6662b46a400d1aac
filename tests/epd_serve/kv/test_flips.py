"""Instances with both halves that change their part under load: nobody ever waits in a circle for blocks.

Both parts of an instance take their blocks from one pool. A D becomes P at once; a P becomes D when it owes nobody a
prompt any more. Without that wait two instances can reserve everything they have for prompts that each other owes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import key_of
from tests.epd_serve.kv.transfer_world import BEAT_S, Decode, Prefill, Prompt

BLOCKS = 6
WORLDS = 60
ROUNDS = 400  # until all of them are through, one after the other; no deadline ends a wait before


@dataclass
class Both:
    """One instance. `decodes`: the part it takes now. `owes`: prompts that it was given and has not handed over."""

    name: str
    decodes: bool
    leaving: bool = False
    owes: set[TransferKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.p, self.d = Prefill("p0", BLOCKS, 2, spare=1), Decode(BLOCKS, self.name)
        self.p.free = self.d.free

    def step(self, draw: random.Random, now: float) -> None:
        """One queue for both parts: who stands at its head and has no room keeps those behind it waiting."""
        if draw.random() < 0.5:
            self.p.step(6, now, admits=self.d.step(now))
        else:
            self.d.step(now, admits=self.p.step(6, now))
        self.owes &= self.p.requests.keys() | {key for key in self.owes if key not in self.p.came}


class World:
    """Some instances, a router that picks a pair for each request by the parts of the moment, and flips.

    Args:
        waits: a P becomes D only when it owes nothing.
    """

    def __init__(self, seed: int, *, waits: bool) -> None:
        self.draw, self.waits, self.now = random.Random(seed), waits, 0.0
        count = self.draw.randint(2, 4)
        self.all = {f"X{number}": Both(f"X{number}", decodes=bool(number % 2)) for number in range(count)}
        self.coming: list[tuple[Both, str, Prompt]] = []  # instance, part, what it will be asked
        self.where: dict[TransferKey, tuple[Both, Both]] = {}

    # --- what goes on ---------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """A request for a pair of the moment; it reaches either of them when it does."""
        senders = [one for one in self.all.values() if not one.decodes and not one.leaving]
        takers = [one for one in self.all.values() if one.decodes]
        if senders and takers:
            p, d = self.draw.choice(senders), self.draw.choice(takers)
            prompt = Prompt(key_of(str(len(self.where))), self.draw.randint(1, 20), 0, 0)
            self.where[prompt.key] = p, d
            p.owes.add(prompt.key)
            self.coming += [(p, "p", prompt), (d, "d", prompt)]

    def flip(self) -> None:
        """One instance is to take the other part, while there is another one of its own."""
        one = self.draw.choice(list(self.all.values()))
        alike = [other for other in self.all.values() if other.decodes is one.decodes and not other.leaving]
        if one.leaving or (len(alike) < 2 and len(self.all) > 2):
            return
        if one.decodes:
            one.decodes = False
        else:
            one.leaving = True

    def turn(self) -> None:
        for one in self.all.values():
            if one.leaving and (not self.waits or not one.owes):
                one.leaving, one.decodes = False, True
        self.draw.shuffle(self.coming)
        for _ in range(min(len(self.coming), 3)):
            instance, part, prompt = self.coming.pop()
            if part == "p":
                instance.p.arrive(prompt)
            else:
                instance.d.arrive(prompt, self.where[prompt.key][0].name)
        for one in self.draw.sample(list(self.all.values()), len(self.all)):
            one.step(self.draw, self.now)
            self.move(one)
        self.now += BEAT_S
        for one in self.all.values():
            one.p.desk.beat(self.now)
            one.d.desk.beat(self.now)
        self.deliver()

    def move(self, one: Both) -> None:
        """Its link sends what is queued."""
        while one.p.queue:
            job = one.p.queue.popleft()
            taker = self.where[job.key][1].d
            stale = job.run != one.p.requests[job.key].run
            if job.layers is None:
                one.p.said_last_word(job.key)
                taker.take_done(job.key, ok=job.ok and not stale)
            elif not stale:
                taker.take(job, one.p.memory)

    def deliver(self) -> None:
        for one in self.all.values():
            outbox, one.d.desk.outbox = one.d.desk.outbox, []
            for address, message in outbox:
                self.all[address].p.hear(message, self.now, one.name.encode())  # type: ignore[arg-type]
        for one in self.all.values():
            answers, one.p.desk.outbox = one.p.desk.outbox, []
            for peer, answer in answers:
                self.all[peer.decode()].d.desk.on_message(answer, self.now)

    # --- how it ends ----------------------------------------------------------------------------------------------

    def hangs(self) -> bool:
        """Whether somebody waits for ever, after a while of requests and flips."""
        for _ in range(40):
            self.ask()
            if self.draw.random() < 0.5:
                self.ask()
            if self.draw.random() < 0.4:
                self.flip()
            self.turn()
        for _ in range(ROUNDS):
            if not self.coming and not any(one.p.requests or one.d.requests for one in self.all.values()):
                return False
            self.turn()
        return True

    def outcomes(self) -> set[str]:
        return {outcome for one in self.all.values() for outcome in one.d.outcomes.values()}


def test_a_p_that_becomes_d_when_it_owes_nothing_closes_no_circle() -> None:
    for seed in range(WORLDS):
        world = World(seed, waits=True)
        assert not world.hangs(), seed
        assert world.outcomes() == {"received"}, seed


def test_without_the_wait_some_worlds_hang() -> None:
    assert any(World(seed, waits=False).hangs() for seed in range(WORLDS))


@pytest.mark.slow
def test_a_thousand_worlds() -> None:
    assert not [seed for seed in range(1000) if World(seed, waits=True).hangs()]
