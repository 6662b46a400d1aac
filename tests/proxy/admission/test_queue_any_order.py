"""The lines in front of the stages, whatever happens in whatever order: rules that hold, and nothing that stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, note
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd_serve.roles import Role
from proxy.admission.queue import LOOKS, MOST_PASSED, AdmissionQueue, Kind, Stage, Ticket
from proxy.config.limits import AdmissionLimits
from proxy.routing.credits import Credit, Need, Speeds, heads_with_room
from tests.proxy.admission.lines import LIMITS, RATE, Queue


class Life(RuleBasedStateMachine):
    """Requests that do, in any order, what the steps of the proxy do, in front of places that come and go."""

    @initialize(
        order=st.sampled_from(["deadline", "fcfs", "sjf"]), places=st.integers(1, 3), encoders=st.integers(1, 2)
    )
    def begin(self, order: str, places: int, encoders: int) -> None:
        limits = replace(LIMITS, order=order, encodes_per_instance=1)  # type: ignore[arg-type]
        self.queue = Queue(limits, places=places, encoders=encoders)
        self.queue.refuses = {777.0}
        self.here: list[Ticket] = []
        self.gone: list[Ticket] = []
        self.let_in = dict.fromkeys(Kind, 0)

    def any_of(self, data: st.DataObject, what: str = "") -> Ticket:
        return data.draw(st.sampled_from(self.here), label=what)

    @rule(
        kind=st.sampled_from(Kind),
        account=st.sampled_from("xyz"),
        tokens=st.sampled_from([1.0, 400.0, 777.0, 9000.0]),
        slo_s=st.sampled_from([0.0, 1.0, 50.0]),
        priority=st.integers(-5, 5),
    )
    def enters(self, kind: Kind, account: str, tokens: float, slo_s: float, priority: int) -> None:
        ticket = self.queue.enters(kind, account=account, tokens=tokens, slo_s=slo_s, priority=priority)
        self.here.append(ticket)
        self.let_in[kind] += 1

    @rule(seconds=st.sampled_from([0.0, 0.3, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.queue.now += seconds

    @rule(places=st.integers(0, 3), encoders=st.integers(0, 2))
    def instances_come_and_go(self, places: int, encoders: int) -> None:
        self.queue.places, self.queue.encoders = places, encoders
        self.queue.speeds = Speeds(RATE, RATE, max(1, encoders), max(1, places))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def stands(self, data: st.DataObject) -> None:
        ticket = self.any_of(data)
        if ticket.line is None and not ticket.served:
            encodes = ticket.kind is Kind.MEDIA and not ticket.encoding and data.draw(st.booleans())
            ticket.enqueue(Stage.ENCODE if encodes else Stage.SERVE)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), ahead=st.booleans())
    def tries_at_once(self, data: st.DataObject, ahead: bool) -> None:
        ticket, queue = self.any_of(data), self.queue
        encodes = ticket.kind is Kind.MEDIA and not ahead and not ticket.encoding and data.draw(st.booleans())
        stage = Stage.ENCODE if encodes else Stage.SERVE
        may = not ticket.served and ticket.line is None and not queue.all.lines[stage]
        may = may and queue.all.has_room(ticket, stage)
        assert ticket.goes_at_once(stage, ahead=ahead) is may

    @rule(most=st.integers(0, 5))
    def turns_come(self, most: int) -> None:
        """Plans are made at once, or some time later."""
        for number, ticket in enumerate(self.queue.all.grants()):
            assert ticket.line is None and ticket.owes
            if number < most:
                self.queue.leased(ticket)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), what=st.sampled_from(["encoded", "leave_encoders", "give_back", "prefilled", "step_back"]))
    def does(self, data: st.DataObject, what: str) -> None:
        ticket = self.any_of(data)
        getattr(ticket, what)()
        if not (ticket.encoding or ticket.served):
            for taken in self.queue.taken.values():
                taken.discard(ticket)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def is_leased(self, data: st.DataObject) -> None:
        self.queue.leased(self.any_of(data))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        ticket = self.any_of(data)
        self.here.remove(ticket)
        self.queue.ends(ticket)
        self.gone.append(ticket)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), what=st.sampled_from(["encoded", "leave_encoders", "give_back", "prefilled", "step_back"]))
    def is_told_afterwards(self, data: st.DataObject, what: str) -> None:
        getattr(data.draw(st.sampled_from(self.gone)), what)()

    @invariant()
    def counts_are_what_tickets_add_up_to(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, here = self.queue.all, self.here
        for kind in Kind:
            own = [one for one in here if one.kind is kind]
            assert queue.served(kind) == sum(one.served for one in own)
            assert queue.use[kind].encoding == sum(one.encoding for one in own)
            assert queue.waiting(kind) == sum(not one.served and not one.encoding for one in own)
            assert queue.arrived[kind] == self.let_in[kind]
        for stage in Stage:
            standing = {one for one in here if one.line is stage}
            lines = queue.lines[stage]
            assert {one for line in lines.values() for _, one in line.in_order(self.queue.now)} == standing
            assert {one.account for one in standing} == set(lines), "no line stays without anybody"
            assert queue.work_s[stage] == pytest.approx(sum(one.work_s(stage) for one in standing), abs=1e-6)
            assert queue.owed[stage] == sum(stage in one.owes for one in here)
        assert not any(one.ahead and not one.served for one in here)
        assert not any(one.line is not None and one.served for one in here)

    @invariant()
    def whoever_waits_and_has_room_is_behind_one_that_was_overtaken_enough(self) -> None:
        """After a look nobody among the first waits that has room."""
        if not hasattr(self, "queue"):
            return
        queue = self.queue.all
        for ticket in queue.grants():
            self.queue.leased(ticket)
        for stage in Stage:
            for ticket in [*queue._in_order(stage, queue.over_share(stage))][:LOOKS]:
                assert not queue.has_room(ticket, stage)
                if ticket.passed >= MOST_PASSED:
                    break

    def teardown(self) -> None:
        """Whoever is left gets through, and nothing stays of anybody."""
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        queue.places, queue.encoders, queue.refuses, queue.speeds = 1, 1, set(), Speeds(RATE, RATE)
        for _ in range(3 * len(self.here) + 1):
            queue.now += 1.0
            for ticket in list(self.here):
                if ticket.line is None and not ticket.served:
                    ticket.enqueue()
                if ticket.served:
                    queue.leased(ticket)
                    queue.ends(ticket)
                    self.here.remove(ticket)
            queue.grants()
        assert not self.here
        self.counts_are_what_tickets_add_up_to()
        assert not any(queue.all.work_s.values()) and not any(queue.all.owed.values())
        assert not any(queue.all.lines.values()) and not queue.all.anybody
        assert queue.all.use == {kind: type(use)() for kind, use in queue.all.use.items()}


TestLife = Life.TestCase
TestLife.settings = examples(max_examples=80, stateful_step_count=40, deadline=None)


STEPS = st.lists(
    st.tuples(st.sampled_from(list(Kind)), st.booleans(), st.sampled_from("xy"), st.sampled_from(["go", "end"])),
    max_size=30,
)


@examples(deadline=None, max_examples=100)
@given(STEPS)
def test_to_go_at_once_is_what_standing_in_an_empty_line_comes_to(steps: list[tuple[Kind, bool, str, str]]) -> None:
    """Two queues get the same requests; in one everybody stands, in the other whoever may goes at once."""
    stood, went = Queue(places=2), Queue(places=2)
    here: list[tuple[Ticket, Ticket]] = []
    for now, (kind, encode, account, what) in enumerate(steps):
        stood.now = went.now = float(now)
        if what == "end" and here:
            one, other = here.pop(0)
            stood.ends(one)
            went.ends(other)
        else:
            one, other = (queue.enters(kind, account=account, tokens=50.0) for queue in (stood, went))
            stage = Stage.ENCODE if encode and kind is Kind.MEDIA else Stage.SERVE
            one.enqueue(stage)
            if other.goes_at_once(stage):
                went.leased(other)
            else:
                other.enqueue(stage)
            here.append((one, other))
        stood.grants()
        went.grants()
        assert [(one.served, one.encoding) for one, _ in here] == [(one.served, one.encoding) for _, one in here]
        for kind in Kind:
            assert (stood.all.waiting(kind), stood.all.served(kind)) == (went.all.waiting(kind), went.all.served(kind))


# --- instances in small --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prefill:
    """An instance that computes prompts one after the other, and holds each one's KV until its answer has ended."""

    rate: float
    kv_tokens: float
    most: int
    left: dict[Ticket, float]
    decodes_until: dict[Ticket, float]

    def credit(self) -> Credit:
        there = [*self.left, *self.decodes_until]
        return Credit(
            Role.PD,
            sum(self.left.values()),
            self.rate,
            requests=len(there),
            sequences=self.most - len(there),
            kv_tokens=self.kv_tokens - sum(ticket.need.tokens for ticket in there),
        )

    def works(self, seconds: float, now: float) -> list[Ticket]:
        """What ends within so many seconds, after which it is `now`."""
        tokens = seconds * self.rate
        for ticket in list(self.left):
            done = min(tokens, self.left[ticket])
            tokens -= done
            self.left[ticket] -= done
            if self.left[ticket] <= 1e-9:
                del self.left[ticket]
                self.decodes_until[ticket] = now + 0.3
        ended = [ticket for ticket, until in self.decodes_until.items() if until <= now]
        for ticket in ended:
            del self.decodes_until[ticket]
        return ended


SHAPES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]),  # after the one before it
        st.sampled_from([10.0, 500.0, 3000.0, 32_000.0]),
        st.sampled_from(["deadline one", "deadline two"]),
        st.sampled_from([0.2, 2.0, 30.0]),
    ),
    min_size=1,
    max_size=40,
)


@examples(deadline=None, max_examples=100)
@given(SHAPES, st.integers(1, 4), st.sampled_from([4000.0, 40_000.0, math.inf]), st.integers(1, 6))
def test_no_instance_idles_while_work_that_fits_it_waits_and_all_get_through(
    shapes: list[tuple[float, float, str, float]], count: int, kv_tokens: float, most: int
) -> None:
    """Prompts from ten tokens to thirty thousand over instances of 10,000 a second, by the credits of the product. What
    has nothing to compute has no room for whoever waits, and what was given to one is bounded."""
    limits, now = AdmissionLimits(), 0.0
    instances = [Prefill(10_000.0, kv_tokens, most, {}, {}) for _ in range(count)]
    credits_of = {Role.PD: lambda: [one.credit() for one in instances]}

    def rooms(stage: Stage, need: Need, enough: int) -> int:
        all_of = lambda role: credits_of[role]() if role in credits_of else []  # noqa: E731
        return heads_with_room(all_of, need, limits, speeds(), enough)

    def speeds() -> Speeds:
        return Speeds(1.0, 10_000.0, 1, count, paths_there=True)

    queue = AdmissionQueue(limits, lambda: now, rooms, speeds)

    def fits(one: Prefill, ticket: Ticket) -> bool:
        credit = one.credit()
        only = lambda role: [credit] if role is Role.PD else []  # noqa: E731
        return heads_with_room(only, ticket.need, limits, speeds(), 1) > 0

    def planned(ticket: Ticket) -> None:
        """As the router does: where it would be computed soonest, of those with room."""
        with_room = [one for one in instances if fits(one, ticket)]
        assert with_room, "its turn came where it has room"
        chosen = min(with_room, key=lambda one: one.credit().tokens)
        chosen.left[ticket] = ticket.need.tokens
        ticket.leased(Stage.SERVE)

    due, served = [*shapes][::-1], 0
    next_at = due[-1][0]
    for _ in range(200_000):
        while due and next_at <= now:
            _, tokens, account, slo_s = due.pop()
            next_at = now + due[-1][0] if due else math.inf
            ticket = Ticket(queue, Kind.TEXT, account, 1.0, now, slo_s)
            ticket.enter()
            ticket.sized(Need(tokens))
            if ticket.goes_at_once():
                planned(ticket)
            else:
                ticket.enqueue()
        for ticket in queue.grants():
            planned(ticket)
        first = [*queue._in_order(Stage.SERVE, queue.over_share(Stage.SERVE))] if queue.anybody else []
        held_up = next((at for at, ticket in enumerate(first) if ticket.passed >= MOST_PASSED), LOOKS - 1)
        for ticket in first[: held_up + 1]:
            idle = sum(not one.left and fits(one, ticket) for one in instances)
            note(f"{now}: {idle} idle for {ticket.need} of {len(first)}")
            assert idle <= (queue._kept(Stage.SERVE) if ticket.is_long(Stage.SERVE) else 0)
        for one in instances:
            largest = max(one.left.values(), default=0.0)
            assert one.credit().tokens <= limits.prefill_s * one.rate + largest + 1e-6
        if not due and not queue.anybody and not any(one.left or one.decodes_until for one in instances):
            break
        now += 0.02
        for one in instances:
            for ticket in one.works(0.02, now):
                ticket.leave()
                served += 1
    assert served == len(shapes) and not any(queue.owed.values()) and not any(queue.work_s.values())
