"""A layout in virtual time: `simulate` serves traffic on it, by the decisions of the real proxy and scheduler. Pure.

E encodes, hands over; then D reserves, P prefills, KV goes over, D decodes; fused stages do the same within one step.
Who gets a request or an image is the `Fleet`'s choice, whose instances may change meanwhile. No failures, and every
request is answered whole.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct

from deploy.planner.door import Turn
from deploy.planner.fleet import Counts, Fleet, Options, VirtualInstance
from deploy.planner.profile import FRONT, KINDS, DeviceProfile
from deploy.planner.stage import Clock
from epd_serve.core_shares import share_cores
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.model_support import check_encoder_free
from epd_serve.placement import check_servable, lower
from epd_serve.roles import Role
from epd_serve.sim.sequence import Sequence as Job
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request
from proxy.admission.queue import Stage
from proxy.routing.plan import Path
from proxy.routing.policy import place_items
from store.keys import Part, part_keys

MOST_IDLE_S = 3600.0
"""Of ticks with requests that wait for a path and nothing else due: then nobody makes one any more."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request. Times in seconds since the traffic's beginning.

    Attributes:
        gaps: between its tokens. within: of them within the limit of each SLO that was asked about, in its order.
        path, instances: that it took.
    """

    id: str
    at_s: float
    first_s: float
    last_s: float
    tokens: int
    gaps: int
    within: tuple[int, ...]
    path: str = ""
    instances: tuple[str, ...] = ()

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean; None of one token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.at_s


@dataclass(frozen=True)
class Simulated:
    """A run.

    Attributes:
        slos: that were asked about. served: in the order of arrival.
        span_s: from the first arrival to the last token.
        busy: by instance and kind of work, the share of the time in which it was there that it computed.
        device_s: for which devices were held until the last token, summed.
    """

    slos: tuple[Slo, ...]
    served: Sequence[Served]
    span_s: float
    busy: Mapping[str, Mapping[str, float]]
    device_s: float = 0.0

    def attained(self, number: int, since: int = 0) -> float:
        """The share of requests, from that one on, that attained `slos[number]`; 1 of none."""
        slo = self.slos[number]
        kept = [slo.attained(one.ttft_s, one.tpot_s, one.gaps, one.within[number]) for one in self.served[since:]]
        return sum(kept) / len(kept) if kept else 1.0


def check_simulated(layout: Layout, profile: DeviceProfile) -> None:
    """Raises ConfigError: it cannot be served, with stages as the profile has them, or has a tensor-parallel size that
    the profile does not know."""
    check_servable(layout)
    if profile.encoder_free:
        check_encoder_free("", layout, None)
    if unknown := sorted({member.tp for member in layout.members()} - profile.stages.keys()):
        known = ", ".join(map(str, sorted(profile.stages)))
        raise ConfigError(f"layout {layout} has tp{unknown[0]}; the profile has sizes {known}", param="--profile")


def simulate(
    layout: Layout,
    profile: DeviceProfile,
    requests: Sequence[Request],
    *,
    slos: Sequence[Slo] = (),
    options: Options = Options(),
    until: Callable[[Served], bool] = lambda one: False,
    tick: tuple[float, Callable[[Fleet], None]] | None = None,
) -> Simulated:
    """Serve `requests`, in the order of their arrival, on devices that all are the profile's.

    Args:
        until: called with each request that ends; once it is true nobody wants to know more, and the rest counts as
            never served.
        tick: seconds, and what is called each time they have passed while requests are to come or under way; it may
            change the fleet. What it leaves without a path for ever counts as never served.

    Raises:
        ConfigError: see `check_simulated`.
    """
    check_simulated(layout, profile)
    first_s = requests[0].at_s if requests else 0.0
    clock = Clock(first_s)
    plans = share_cores(options.core_share, lower(layout, range(layout.device_count)))
    fleet = Fleet(plans, profile, clock, slos, options)
    served: dict[str, Served] = {}
    device_s = 0.0
    left = iter(requests)

    def arrivals() -> None:
        """One at a time: a day of them need not be on the clock at once."""
        if (request := next(left, None)) is not None:
            clock.after(max(0.0, request.at_s - clock.now_s), lambda: arrive(request))

    def arrive(request: Request) -> None:
        under_way.arrive(request)
        arrivals()

    def ended(one: Served) -> None:
        nonlocal device_s
        served[one.id], device_s = one, fleet.device_s
        if until(one):
            clock.stopped = True

    def ticks(every_s: float, call: Callable[[Fleet], None], idle_s: float) -> None:
        if len(served) < len(requests) and idle_s < MOST_IDLE_S:
            call(fleet)
            idle_s = idle_s + every_s if clock.idle else 0.0
            clock.after(every_s, lambda: ticks(every_s, call, idle_s))

    under_way = _Requests(fleet, profile, slos, options, ended)
    arrivals()
    if tick is not None:
        clock.after(tick[0], lambda: ticks(*tick, 0.0))
    clock.run()
    assert tick or clock.stopped or len(served) == len(requests), f"{len(requests) - len(served)} requests never ended"
    end_s = max((one.last_s for one in served.values()), default=first_s)
    never = math.inf
    found = [
        served.get(one.id) or Served(one.id, one.at_s, never, never, one.output_tokens, 1, (0,) * len(slos))
        for one in requests
    ]
    return Simulated(tuple(slos), found, end_s - first_s, _busy(fleet, end_s), device_s)


def _busy(fleet: Fleet, end_s: float) -> Mapping[str, Mapping[str, float]]:
    """By name, which several may have had, one after the other."""
    lives: dict[str, list[VirtualInstance]] = defaultdict(list)
    for one in fleet.ever:
        lives[one.stage.name].append(one)
    busy = {}
    for name, had in lives.items():
        there_s = sum(max(0.0, min(end_s, one.removed_s) - one.stage.begun_s) for one in had)
        busy[name] = {kind: sum(one.stage.busy_s[kind] for one in had) / there_s if there_s else 0.0 for kind in KINDS}
    return busy


@dataclass(eq=False, slots=True)
class _Underway:
    """One request.

    Attributes:
        counts: of its kind. turn: its place at the door. path: through the layout. head: that takes its prompt.
        decoder: that answers. priority: at the stages. instances: that it met, in order.
        encoded: its items are, and P can have them.
        first_s: when its first token was there. second_s: when the stage where it decodes had made one for it.
        step_s: of that stage, then. steps, within: of its `Gaps`, then.
    """

    request: Request
    counts: Counts
    turn: Turn
    path: Path = field(init=False)
    head: VirtualInstance = field(init=False)
    decoder: VirtualInstance = field(init=False)
    priority: int = 0
    instances: dict[str, None] = field(default_factory=dict)
    encoded: bool = False
    first_s: float = 0.0
    second_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    within: tuple[int, ...] = ()
    ended: bool = False


class Piece(Struct, frozen=True):
    """An item of a request as it goes to an encoder, or a part of it.

    Attributes:
        item: its index in the request. tokens, tiles: see `Encodable`. encodes: tokens that an encoder computes.
    """

    item: int
    key: str
    tokens: float
    tiles: int
    encodes: int

    @classmethod
    def of(cls, item: Item, index: int, request: str) -> Piece:
        return cls(index, item.key or f"{request}/{index}", float(item.tokens), item.tiles, item.tokens)

    def cut(self, count: int) -> Sequence[Piece]:
        """Into so many parts at most."""
        count = min(self.tiles, count)
        if count == 1:
            return [self]
        each = self.encodes // self.tiles
        return [
            Piece(self.item, key, self.tokens / count, 1, each * len(Part(self.key, index, count).of(self.tiles)))
            for index, key in enumerate(part_keys(self.key, count))
        ]


class _Requests:
    """What becomes of requests on the instances of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        profile: DeviceProfile,
        slos: Sequence[Slo],
        options: Options,
        ended: Callable[[Served], None],
    ) -> None:
        self._fleet, self._profile, self._slos, self._options, self._tell = fleet, profile, slos, options, ended
        self._clock = fleet.clock
        self._at: dict[str, VirtualInstance] = {}  # who served a session last
        self._encoded: dict[
            str, list[Callable[[], None]] | None
        ] = {}  # by key: who waits for it, None once it is there

    def arrive(self, request: Request) -> None:
        """It has come, and waits for its turn."""
        counts = self._fleet.counts["media" if request.items else "text"]
        counts.came += 1
        counts.items += len(request.items)
        counts.item_tokens += request.item_tokens
        counts.prompt_tokens += request.prompt_tokens
        self._goes_on(_Underway(request, counts, self._fleet.door.enter(request)))

    def _goes_on(self, one: _Underway) -> None:
        """To encoders, or to where it is served."""
        if one.encoded or not self._fleet.encodes_apart(one.request):
            self._fleet.door.wait(one.turn, Stage.SERVE, partial(self._place, one))
        else:
            self._to_encoders(one)

    def _to_encoders(self, one: _Underway) -> None:
        """It needs no turn where others are having all of its items encoded, or had."""
        if any(not item.key or item.key not in self._encoded for item in one.request.items):
            self._fleet.door.wait(one.turn, Stage.ENCODE, partial(self._encode, one))
        else:
            self._encode(one)

    def _place(self, one: _Underway) -> None:
        """Its turn has come: who prefills and who decodes is chosen. It counts as pending there from now on, though the
        front takes its time (`proxy/registry/instance_state.py`)."""
        request, fleet = one.request, self._fleet
        one.path, one.head = fleet.route(request, self._at.get(request.session))
        if one.path.encode and not one.encoded:
            one.turn.give_back()
            self._to_encoders(one)
            return
        one.decoder = fleet.chosen(one.path.tail) if one.path.tail is not None else one.head
        one.priority = round(one.turn.due() * 1e3)
        one.decoder.unseen_kv += request.prompt_tokens
        if one.decoder is not one.head:
            one.decoder.answers += 1
            one.decoder.unseen += 1
            one.decoder.stage.changed()
        if one.encoded:
            self._generate(one)
        else:
            self._through_front(one.head, request.item_tokens, request.prompt_tokens, lambda: self._generate(one))
        one.turn.leased(Stage.SERVE)

    def _through_front(self, one: VirtualInstance, item_tokens: int, pending: float, then: Callable[[], None]) -> None:
        """HTTP and preprocessing, of which the stage's scheduler knows nothing yet."""
        one.prompts += 1
        one.unseen += pending
        self._fleet.picked(one)
        one.stage.changed()
        amount = item_tokens or 1e-9  # a text has the setup
        busy_s = self._profile.front_busy.seconds(amount)
        idle_s = max(0.0, self._profile.front.seconds(amount) - busy_s)

        def seen() -> None:
            one.unseen -= pending
            then()
            one.prompts -= 1
            one.stage.changed()
            one.stage.gave()

        def computed() -> None:
            self._clock.after(idle_s, seen)

        if busy_s > 0:
            one.front.append((busy_s, computed))
            if len(one.front) == 1:
                self._next_front(one)
        else:
            computed()

    def _next_front(self, one: VirtualInstance) -> None:
        """An API server computes for one request at a time, on whichever device of its host does least."""

        def done() -> None:
            busy_s, then = one.front.popleft()
            one.stage.busy_s[FRONT] += busy_s
            then()
            if one.front:
                self._next_front(one)

        device = min(one.front_devices, key=lambda device: device.under_way)
        device.run({FRONT: 1.0}, one.front[0][0], done)

    def _encode(self, one: _Underway) -> None:
        """All items, spread over the encoders, each key once; it goes on when P can have them all, or at once where the
        encoders have gone since it asked for them."""
        items = one.request.items
        left = len(items)

        def handed_over() -> None:
            nonlocal left
            left -= 1
            if not left:
                one.encoded = True
                self._goes_on(one)

        encoders = self._fleet.candidates(Role.E)
        if not encoders:
            one.turn.give_back()
            self._goes_on(one)
            return
        own: list[int] = []
        for index, item in enumerate(items):
            if item.key and item.key in self._encoded:
                waiting = self._encoded[item.key]
                if waiting is None:
                    self._clock.after(self._profile.front.setup_s, handed_over)
                else:
                    waiting.append(handed_over)
            else:
                own.append(index)
                if item.key:
                    self._encoded[item.key] = []
        if not own:
            one.turn.leave_encoders()
            return
        pieces, workers, shares = place_items(
            [Piece.of(items[index], index, one.request.id) for index in own],
            encoders,
            Piece.cut,
            self._fleet.device_of,
            self._options.image_parts,
        )
        parts_left = Counter(piece.item for piece in pieces)

        def stored(index: int) -> None:
            parts_left[index] -= 1
            if parts_left[index]:
                return
            key = items[index].key
            waiting = self._encoded.get(key) if key else None
            if key:
                self._encoded[key] = None
            for each in (handed_over, *(waiting or ())):
                each()

        for worker, share in zip(workers, shares, strict=True):
            if share:
                several = [pieces[at] for at in share]
                encoder = self._fleet.instances[worker.id]
                self._through_front(
                    encoder,
                    sum(items[piece.item].tokens for piece in several),  # of a part the whole image is processed
                    sum(piece.encodes for piece in several),
                    partial(self._encode_at, encoder, one, several, stored),
                )
        one.turn.leased(Stage.ENCODE)

    def _encode_at(
        self, encoder: VirtualInstance, one: _Underway, pieces: Sequence[Piece], stored: Callable[[int], None]
    ) -> None:
        sequence = Job(0, 1, lambda number, last: None, tuple(piece.encodes for piece in pieces))
        encoder.prompts += len(pieces)

        def encoded(index: int) -> None:
            self._clock.after(self._profile.handover.seconds(pieces[index].encodes), lambda: there(pieces[index].item))

        def there(item: int) -> None:
            encoder.prompts -= 1
            stored(item)

        sequence.on_encoded = encoded
        self._submit(one, encoder, sequence)

    def _generate(self, one: _Underway) -> None:
        request, head, decoder = one.request, one.head, one.decoder
        decoder.unseen_kv -= request.prompt_tokens
        has_features = one.encoded and head.stage.role.takes_features
        own_items = () if has_features else tuple(item.tokens for item in request.items)
        cached = request.cached_tokens if self._at.get(request.session) is head else 0
        if request.session:
            self._at[request.session] = head
        head.prompts += 1
        if decoder is head:
            whole = Job(request.prompt_tokens, request.output_tokens, self._tokens(one, head), own_items)
            whole.cached = cached
            self._submit(one, head, whole)
            return
        decoder.unseen -= 1
        answer = Job(request.prompt_tokens, request.output_tokens, self._tokens(one, decoder))

        def transferred() -> None:
            head.prompts -= 1
            head.stage.scheduler.free(prompt)
            head.stage.wake()
            head.stage.gave()
            decoder.stage.scheduler.loaded(answer)
            decoder.stage.wake()

        def prefilled(number: int, last: bool) -> None:
            one.turn.prefilled()
            if self._options.first_token == "prefill":
                one.first_s = self._clock.now_s
                if request.output_tokens == 1:
                    self._ended(one, 0, ())
            self._clock.after(self._profile.kv.seconds(request.prompt_tokens), transferred)

        def reserved() -> None:
            head.stage.scheduler.release(prompt)
            head.stage.wake()

        prompt = Job(request.prompt_tokens, 1, prefilled, own_items, keeps_kv=True, cached=cached)
        answer.on_reserved = lambda: self._clock.after(0.0, reserved)
        self._submit(one, head, prompt, held=True)
        self._submit(one, decoder, answer)

    def _tokens(self, one: _Underway, instance: VirtualInstance) -> Callable[[int, bool], None]:
        """What is done with tokens that the instance makes for it. Of a P's first token, which the client has already,
        the D's is a repetition."""
        stage = instance.stage

        def token(number: int, last: bool) -> None:
            if number == 1:
                one.turn.prefilled()
                one.first_s = one.first_s or self._clock.now_s
                one.second_s, one.step_s = self._clock.now_s, stage.decode_s
                one.steps, one.within = stage.gaps.steps, tuple(stage.gaps.within)
            if not last:
                return
            if instance is one.head:
                instance.prompts -= 1
            else:
                instance.answers -= 1
            if not one.ended:
                steps = stage.gaps.steps - one.steps
                self._ended(one, steps, [now - then for now, then in zip(stage.gaps.within, one.within, strict=True)])

        return token

    def _ended(self, one: _Underway, steps: int, within: Sequence[int]) -> None:
        """Args: steps: of its stage since its first token there; within: those of them within each limit."""
        request, now = one.request, self._clock.now_s
        gaps = request.output_tokens - 1
        counted = []
        for at, slo in enumerate(self._slos):
            # While it waited, preempted, steps went by that count as one gap of its own.
            own = max(0, (within[at] if gaps else 0) - max(0, steps - gaps))
            # The first gap of a stream that began with P's token goes on until D's second one.
            if own and one.second_s > one.first_s and one.second_s + one.step_s - one.first_s > slo.tpot_ms / 1e3:
                own -= 1
            counted.append(min(own, gaps))
        one.ended = True
        one.turn.leave()
        found = (one.first_s, now, request.output_tokens, gaps, tuple(counted))
        served = Served(request.id, request.at_s, *found, one.path.name, tuple(one.instances))
        one.counts.ended += 1
        one.counts.output_tokens += request.output_tokens
        for at, slo in enumerate(self._slos):
            one.counts.attained[at] += slo.attained(served.ttft_s, served.tpot_s, gaps, counted[at])
        self._tell(served)

    def _submit(self, one: _Underway, instance: VirtualInstance, sequence: Job, *, held: bool = False) -> None:
        """`held`: see `Scheduler.add`."""
        self._fleet.picked(instance)
        one.instances.setdefault(instance.stage.name)
        sequence.priority = one.priority
        instance.stage.scheduler.add(sequence, held=held)
        instance.stage.wake()
