"""One transfer between both desks, every run there is: a message once said may arrive at any later time, any number of
times, or never; either request may leave at any moment, P may die, its request may go ahead of D's blocks, and end
before D has them. Not drawn at random: all of it is walked through."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from epd_serve import wire
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.lifecycle import Decode
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, key_of, ready

A = key_of("a")
PROMPT = PromptShape(10, "h", BLOCK_SIZE, 2)


@dataclass
class World:
    """Both desks, their workers, and all that was ever said between them. Time stands still but for P's silence."""

    p: PrefillDesk = field(default_factory=lambda: PrefillDesk("p0", 1000.0))
    d: DecodeDesk = field(default_factory=lambda: DecodeDesk(10.0))
    said: dict[str, Any] = field(default_factory=dict)  # by text; to either side
    at_p: str = "away"  # P's request: away, waits, runs, kept (it has ended, its KV is here), left
    at_d: str = "away"  # D's request: away, queued, holds, left
    told: bool = False  # P's worker knows
    writing: bool = False
    through: bool = False  # P's worker has sent all of it, DONE too
    token: bool = False  # D's worker knows the first token, without which it does not report that all has arrived
    done: tuple[bool, ...] = ()  # DONE on its way to D's worker: (ok,)
    ended: tuple[bool, ...] = ()  # D's worker has it
    given_back: bool = False
    lives: int = 1

    def name(self) -> str:
        p, d = self.p._entries.get(A), self.d._entries.get(A)
        over = (self.p._over.get(A), self.p._over.token(A))
        desks = (p and (p.state, p.token), over, d and (d.state, d.token), self.d._failures)
        workers = (self.told, self.writing, self.through, self.token, self.done, self.ended)
        rest = (self.at_p, self.at_d, workers, self.given_back, self.lives)
        return repr((desks, sorted(self.said), rest))

    def collect(self) -> None:
        for _, message in (*self.p.outbox, *self.d.outbox):
            self.said[repr(message)] = message
        self.p.outbox, self.d.outbox = [], []

    def stop(self) -> None:
        """P's scheduler was told that sending must stop."""
        if self.through:
            return
        if self.told:
            self.close(False)
        else:
            self.p.stopped_unsent(A)

    def close(self, ok: bool) -> None:
        self.writing, self.done = False, (ok,)
        self.p.closed(A)

    # --- what may happen next -------------------------------------------------------------------------------------

    def moves(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        for text, message in self.said.items():
            if isinstance(message, wire.ToPrefillScheduler):
                yield "P hears " + text, lambda w, m=message: w.prefill_hears(m)
            else:
                yield "D hears " + text, lambda w, m=message: w.decode_hears(m)
        if self.at_d == "away":
            yield "D queues", lambda w: (setattr(w, "at_d", "queued"), w.d.queued(A, "p"))
        if self.at_d == "queued":
            yield "D reserves", World.reserve
        if self.at_d in ("queued", "holds"):
            yield "D's request leaves", lambda w: (setattr(w, "at_d", "left"), w.d.gone(A, 0.0))
        if self.done:
            yield "DONE arrives", World.hear_done
            yield "DONE is lost", lambda w: setattr(w, "done", ())
        if self.d._failures or self.ended == (False,) or (self.ended and self.token):
            yield "D's worker reports", World.report
        if self.at_p in ("away", "waits"):
            yield "P's request asks", World.ask
            yield "P's request may go ahead", lambda w: w.ask(ahead=True)
        if self.at_p in ("waits", "runs"):
            yield "P's request leaves", World.leave_p
        if self.at_p == "runs" and not self.told and self.p.is_wanted(A):
            yield "P's request ends before anything is sent", World.keep
        if self.at_p == "kept" and self.p.ready(A):
            yield "P's worker sends what was kept", World.send_kept
        if self.at_p == "kept" and self.p.fate(A) is not None:
            yield "P's blocks are free", lambda w: setattr(w, "at_p", "left")
        if self.at_p == "runs" and self.p.ready(A) and not self.through:
            yield "P's worker writes", lambda w: (setattr(w, "told", True), setattr(w, "writing", True))
        if self.writing and self.at_p == "runs" and self.p.ready(A):
            yield "P's worker is through", World.send_last
        if self.through and self.at_p == "runs":
            yield "P samples", lambda w: (setattr(w, "at_p", "left"), w.p.sampled(A, 7))
        if self.through and self.at_p == "left" and A in self.p._entries:
            yield "P's worker is done", lambda w: w.p.closed(A)
        yield "P beats", lambda w: w.p.beat(0.0)
        if self.lives == 1:
            yield "P dies", World.die
        if self.d._leases.until and (self.lives == 2 or self.d._entries[A].state is Decode.SENT):
            yield "D hears nothing for too long", World.fall_silent

    def prefill_hears(self, message: Any) -> None:
        for _ in self.p.on_message(b"d", message, 0.0):
            self.stop()

    def decode_hears(self, message: Any) -> None:
        if not isinstance(message, wire.Alive | wire.FirstToken):
            assert not self.writing, "P said that it does not write"
        self.d.on_message(message, 0.0)
        self.token = self.token or self.d.take_tokens() == [(A, 7)]

    def send_last(self) -> None:
        self.writing, self.through, self.done = False, True, (True,)

    def reserve(self) -> None:
        self.at_d = "holds"
        self.d.reserved("p", ready(A, incarnation="p0"), 0.0)

    def hear_done(self) -> None:
        if not self.given_back:  # D's worker knows what it reported
            self.ended = self.ended or self.done
        self.done = ()

    def report(self) -> None:
        failed = self.d.take_failures()
        assert not self.given_back, "reported twice"
        assert not self.writing, "given back while P writes"
        self.given_back, self.ended = True, ()
        assert failed or not self.d._failures
        self.d.closed(A)

    def ask(self, *, ahead: bool = False) -> None:
        admission = self.p.admit(A, PROMPT, 0.0, ahead=ahead)
        self.at_p = {Admission.WAIT: "waits", Admission.SEND: "runs", Admission.ALONE: "left"}[admission]

    def keep(self) -> None:
        self.at_p = "kept"
        self.p.sampled(A, 7)

    def send_kept(self) -> None:
        """In one step: the worker hears of it, writes, and says its last word."""
        self.at_p, self.told = "left", True
        self.send_last()

    def leave_p(self) -> None:
        self.at_p = "left"
        if not self.through and self.p.gone(A, "aborted"):
            self.stop()

    def die(self) -> None:
        """Another life of P, which the request is not sent to again: a repeated attempt is another transfer."""
        self.lives, self.p = 2, PrefillDesk("p1", 1000.0)
        self.at_p, self.told, self.writing, self.through, self.done = "left", False, False, False, ()

    def fall_silent(self) -> None:
        quiet = copy.deepcopy(self.d)
        for key in quiet._leases.until:
            quiet._leases.until[key] = 0.0
        quiet.beat(0.0)
        self.d = quiet


def successors(world: World) -> Iterator[tuple[str, World]]:
    for label, move in world.moves():
        after = copy.deepcopy(world)
        move(after)
        after.collect()
        assert not (after.given_back and after.writing), label
        yield label, after


def test_no_run_writes_to_blocks_given_back_and_every_run_can_end() -> None:
    start = World()
    names, todo = {start.name()}, [start]
    into: dict[str, set[str]] = {}  # states from which a state is reached
    settled = set()
    while todo:
        world = todo.pop()
        here = world.name()
        if not world.p._entries and not world.d._entries and world.at_p == world.at_d == "left":
            settled.add(here)
        for _, after in successors(world):
            there = after.name()
            into.setdefault(there, set()).add(here)
            if there not in names:
                names.add(there)
                todo.append(after)
    ending, back = set(settled), list(settled)
    while back:
        new = into.get(back.pop(), set()) - ending
        ending |= new
        back += new
    assert ending == names
