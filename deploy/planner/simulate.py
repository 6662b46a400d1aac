"""A layout in virtual time: `simulate` serves traffic on it, by the decisions of the real proxy and scheduler. Pure.

E encodes, hands over; then D reserves, P prefills, KV goes over, D decodes; fused stages do the same within one step.
Who gets a request or an image the proxy's own policies decide, by loads that are what stages report, without the delay
of reports. No failures, and every request is answered whole.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace as changed

from deploy.planner.profile import FRONT, KINDS, DeviceProfile, beside_name
from deploy.planner.stage import Clock, SharedDevice, VirtualStage
from epd_serve.budgets import Budgets
from epd_serve.core_shares import share_cores
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.placement import InstancePlan, check_servable, lower
from epd_serve.roles import Role
from epd_serve.sim.sequence import Sequence as Job
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request
from proxy.encode.assignment import share_of, spread
from proxy.registry.load import pending_s, reported_pending, reported_rate
from proxy.routing.paths import Path, paths
from proxy.routing.policy import POLICIES, UNMEASURED_RATE, Candidate, Placement, with_neighbours


@dataclass(frozen=True)
class Options:
    """How a layout is run.

    Attributes:
        policy: of the proxy. first_token: `prefill` shows streams the token of P, `decode` that of D.
        budgets: steps are held to it; None leaves them to the limits.
        max_running, step_tokens, encoder_tokens: of every stage, by role; else the profile's.
        core_share: of the cores of a device, as `--core-share` has it; "" is no limit.
    """

    policy: str = "first-token"
    first_token: str = "prefill"
    budgets: Slo | None = None
    max_running: Mapping[str, int] = field(default_factory=dict)
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    encoder_tokens: Mapping[str, int] = field(default_factory=dict)
    core_share: str = ""


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
        busy: by instance and kind of work, the share of the span in which it computed.
    """

    slos: tuple[Slo, ...]
    served: Sequence[Served]
    span_s: float
    busy: Mapping[str, Mapping[str, float]]

    def attained(self, number: int, since: int = 0) -> float:
        """The share of requests, from that one on, that attained `slos[number]`; 1 of none."""
        slo = self.slos[number]
        kept = [slo.attained(one.ttft_s, one.tpot_s, one.gaps, one.within[number]) for one in self.served[since:]]
        return sum(kept) / len(kept) if kept else 1.0


def check_simulated(layout: Layout, profile: DeviceProfile) -> None:
    """Raises ConfigError: it cannot be served, or has a tensor-parallel size that the profile does not know."""
    check_servable(layout)
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
) -> Simulated:
    """Serve `requests`, in the order of their arrival, on devices that all are the profile's.

    Args:
        until: called with each request that ends; once it is true nobody wants to know more, and the rest counts as
            never served.

    Raises:
        ConfigError: see `check_simulated`.
    """
    check_simulated(layout, profile)
    first_s = requests[0].at_s if requests else 0.0
    clock = Clock(first_s)
    served: dict[str, Served] = {}
    left = iter(requests)

    def arrivals() -> None:
        """One at a time: a day of them need not be on the clock at once."""
        if (request := next(left, None)) is not None:
            clock.after(max(0.0, request.at_s - clock.now_s), lambda: arrive(request))

    def arrive(request: Request) -> None:
        deployment.arrive(request)
        arrivals()

    def ended(one: Served) -> None:
        served[one.id] = one
        if until(one):
            clock.stopped = True

    deployment = _Deployment(layout, profile, clock, slos, options, ended)
    arrivals()
    clock.run()
    assert clock.stopped or len(served) == len(requests), f"{len(requests) - len(served)} requests never ended"
    span_s = max((one.last_s for one in served.values()), default=first_s) - first_s
    busy = {
        stage.name: {kind: s / span_s if span_s else 0.0 for kind, s in stage.busy_s.items()}
        for stage in deployment.stages
    }
    never = math.inf
    found = [
        served.get(one.id) or Served(one.id, one.at_s, never, never, one.output_tokens, 1, (0,) * len(slos))
        for one in requests
    ]
    return Simulated(tuple(slos), found, span_s, busy)


@dataclass(eq=False, slots=True)
class _Underway:
    """One request.

    Attributes:
        path: through the layout. instances: that it met, in order.
        first_s: when its first token was there. second_s: when the stage where it decodes had made one for it.
        step_s: of that stage, then. steps, within: of its `Gaps`, then.
    """

    request: Request
    path: Path
    head: VirtualStage
    instances: dict[str, None] = field(default_factory=dict)
    first_s: float = 0.0
    second_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    within: tuple[int, ...] = ()
    ended: bool = False


class _Deployment:
    """The instances of a layout, and who gets what: the proxy's own choices (`proxy/routing`, `proxy/encode`)."""

    def __init__(
        self,
        layout: Layout,
        profile: DeviceProfile,
        clock: Clock,
        slos: Sequence[Slo],
        options: Options,
        ended: Callable[[Served], None],
    ) -> None:
        self._profile, self._clock, self._options, self._tell = profile, clock, options, ended
        self._policy = POLICIES[options.policy]
        self._limits_s = tuple(slo.tpot_ms / 1e3 for slo in slos)
        self._picks = itertools.count(1)
        slowdowns = {(one, other): profile.slows(one, other) for one in KINDS for other in KINDS}
        devices: dict[int, SharedDevice] = defaultdict(lambda: SharedDevice(clock, slowdowns))
        plans = share_cores(options.core_share, lower(layout, range(layout.device_count)))
        self.stages = [
            # Who has a share of the cores to itself meets nobody.
            self._stage(plan, SharedDevice(clock, slowdowns) if plan.core_share else devices[plan.devices[0]])
            for plan in plans
        ]
        self._by_name = {stage.name: stage for stage in self.stages}
        hosts: dict[int, list[VirtualStage]] = defaultdict(list)
        for plan, stage in zip(plans, self.stages, strict=True):
            hosts[plan.devices[0] // profile.host_devices].append(stage)
        beside = {
            kind: [
                (other, slows - 1.0)
                for other in KINDS
                if (slows := profile.beside.get(beside_name(kind, other), 1.0)) > 1.0
            ]
            for kind in KINDS
        }
        self._devices: dict[str, list[SharedDevice]] = {}  # that may compute for the front of a stage, its own first
        for host in hosts.values():
            for stage in host:
                self._devices[stage.name] = [stage.device, *(other.device for other in host)]
                if any(beside.values()):
                    stage.beside = beside
                    stage.others = [other for other in host if other.device is not stage.device]
        neighbours = {plan.id: [self._by_name[name] for name in plan.colocated_with] for plan in plans}
        self._around: Mapping[str, Sequence[VirtualStage]]  # on its device, as far as the policy minds
        self._around = neighbours if options.policy == "first-token" else dict.fromkeys(neighbours, ())
        self._picked = dict.fromkeys(self._by_name, 0)
        self._unseen = dict.fromkeys(self._by_name, 0.0)
        self._fronts: dict[str, deque[tuple[float, Callable[[], None]]]] = {name: deque() for name in self._by_name}
        self._known: dict[Role, dict[str, Candidate]] = defaultdict(dict)
        for stage in self.stages:
            self._known[stage.role][stage.name] = self._candidate(stage)
        self._stale: dict[Role, set[VirtualStage]] = {role: set() for role in self._known}
        for stage in self.stages:
            stage.changed = self._changed(stage)
        self._heads = [  # for requests without items, and with some
            {path.head: path for path in paths(self._known, multimodal=multimodal)} for multimodal in (False, True)
        ]
        self._encoders = [stage for stage in self.stages if stage.role is Role.E]
        self._at: dict[str, str] = {}  # who served a session last
        self._encoded: dict[
            str, list[Callable[[], None]] | None
        ] = {}  # by key: who waits for it, None once it is there
        if options.budgets is not None:
            for encoder in self._encoders:
                for neighbour in neighbours[encoder.name]:
                    neighbour.stepped = _told(encoder)

    def _stage(self, plan: InstancePlan, device: SharedDevice) -> VirtualStage:
        options, own = self._options, self._profile.stages[plan.tp]
        limits = {
            name: by_role[plan.role.value]
            for name in ("max_running", "step_tokens", "encoder_tokens")
            if plan.role.value in (by_role := getattr(options, name))
        }
        own = changed(own, capacity=changed(own.capacity, **limits)) if limits else own
        budgets = None
        if (slo := options.budgets) is not None:
            budgets = Budgets(
                slo.ttft_ms / 1e3,
                slo.tpot_ms / 1e3,
                most_tokens=own.capacity.step_tokens,
                most_items=own.capacity.encoder_tokens,
                prefills=plan.role.has_language_model,
            )
        return VirtualStage(
            plan.id,
            plan.role,
            own,
            device,
            self._clock,
            budgets=budgets,
            limits_s=self._limits_s,
            spread=self._profile.spread,
            slow=1.0 / (plan.core_share or 1.0),
        )

    # --- stages of a request --------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """It has come, and who takes it first is chosen: it counts as pending there from now on, though the front takes
        its time (`proxy/registry/load.py`)."""
        path, head = self._route(request)
        one = _Underway(request, path, head)
        if not path.encode:
            self._through_front(head, request.item_tokens, request.prompt_tokens, lambda: self._generate(one))
            return
        left = len(request.items)

        def handed_over() -> None:
            nonlocal left
            left -= 1
            if not left:
                one.path, one.head = self._route(request)  # what is pending has changed since it came
                self._generate(one)

        self._encode(one, handed_over)

    def _through_front(self, stage: VirtualStage, item_tokens: int, pending: float, then: Callable[[], None]) -> None:
        """HTTP and preprocessing, of which the stage's scheduler knows nothing yet."""
        self._unseen[stage.name] += pending
        self._picked[stage.name] = next(self._picks)
        stage.changed()
        amount = item_tokens or 1e-9  # a text has the setup
        busy_s = self._profile.front_busy.seconds(amount)
        idle_s = max(0.0, self._profile.front.seconds(amount) - busy_s)

        def seen() -> None:
            self._unseen[stage.name] -= pending
            stage.changed()
            then()

        def computed() -> None:
            self._clock.after(idle_s, seen)

        if busy_s > 0:
            waiting = self._fronts[stage.name]
            waiting.append((busy_s, computed))
            if len(waiting) == 1:
                self._next_front(stage)
        else:
            computed()

    def _next_front(self, stage: VirtualStage) -> None:
        """An API server computes for one request at a time, on whichever device of its host does least."""
        waiting = self._fronts[stage.name]

        def done() -> None:
            busy_s, then = waiting.popleft()
            stage.busy_s[FRONT] += busy_s
            then()
            if waiting:
                self._next_front(stage)

        device = min(self._devices[stage.name], key=lambda device: device.under_way)
        device.run({FRONT: 1.0}, waiting[0][0], done)

    def _encode(self, one: _Underway, handed_over: Callable[[], None]) -> None:
        """All items, spread over the encoders, each key once. `handed_over`: called for each when P can have it."""
        items = one.request.items
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
            return
        costs = [float(items[index].tokens) for index in own]
        workers = with_neighbours(self._candidates(Role.E), share_of(costs, len(self._encoders)))
        keys = [items[index].key or f"{one.request.id}/{index}" for index in own]
        for encoder, share in zip(self._encoders, spread(keys, costs, workers), strict=True):
            if share:
                tokens = sum(items[own[at]].tokens for at in share)
                several = [items[own[at]] for at in share]
                self._through_front(
                    encoder, tokens, tokens, partial(self._encode_at, encoder, one, several, handed_over)
                )

    def _encode_at(
        self, encoder: VirtualStage, one: _Underway, items: Sequence[Item], handed_over: Callable[[], None]
    ) -> None:
        sequence = Job(0, 1, lambda number, last: None, tuple(item.tokens for item in items))

        def encoded(index: int) -> None:
            self._clock.after(self._profile.handover.seconds(items[index].tokens), lambda: stored(items[index].key))

        def stored(key: str) -> None:
            waiting = self._encoded.get(key) if key else None
            if key:
                self._encoded[key] = None
            for each in (handed_over, *(waiting or ())):
                each()

        sequence.on_encoded = encoded
        self._submit(one, encoder, sequence)

    def _generate(self, one: _Underway) -> None:
        request, path = one.request, one.path
        head, own_items = one.head, () if path.encode else tuple(item.tokens for item in request.items)
        cached = request.cached_tokens if self._at.get(request.session) == head.name else 0
        if request.session:
            self._at[request.session] = head.name
        if path.tail is None:
            whole = Job(request.prompt_tokens, request.output_tokens, self._tokens(one, head), own_items)
            whole.cached = cached
            self._submit(one, head, whole)
            return
        tail = self._chosen(self._candidates(path.tail), 1.0)
        answer = Job(request.prompt_tokens, request.output_tokens, self._tokens(one, tail))

        def transferred() -> None:
            head.scheduler.free(prompt)
            head.wake()
            tail.scheduler.loaded(answer)
            tail.wake()

        def prefilled(number: int, last: bool) -> None:
            if self._options.first_token == "prefill":
                one.first_s = self._clock.now_s
                if request.output_tokens == 1:
                    self._ended(one, 0, ())
            self._clock.after(self._profile.kv.seconds(request.prompt_tokens), transferred)

        def reserved() -> None:
            head.scheduler.release(prompt)
            head.wake()

        prompt = Job(request.prompt_tokens, 1, prefilled, own_items, keeps_kv=True, cached=cached)
        answer.on_reserved = lambda: self._clock.after(0.0, reserved)
        self._submit(one, head, prompt, held=True)
        self._submit(one, tail, answer)

    def _tokens(self, one: _Underway, stage: VirtualStage) -> Callable[[int, bool], None]:
        """What is done with tokens that `stage` makes for it. Of a P's first token, which the client has already, the
        D's is a repetition."""

        def token(number: int, last: bool) -> None:
            if number == 1:
                one.first_s = one.first_s or self._clock.now_s
                one.second_s, one.step_s = self._clock.now_s, stage.decode_s
                one.steps, one.within = stage.gaps.steps, tuple(stage.gaps.within)
            if last and not one.ended:
                steps = stage.gaps.steps - one.steps
                self._ended(one, steps, [now - then for now, then in zip(stage.gaps.within, one.within, strict=True)])

        return token

    def _ended(self, one: _Underway, steps: int, within: Sequence[int]) -> None:
        """Args: steps: of its stage since its first token there; within: those of them within each limit."""
        request, now = one.request, self._clock.now_s
        gaps = request.output_tokens - 1
        counted = []
        for at, limit_s in enumerate(self._limits_s):
            # While it waited, preempted, steps went by that count as one gap of its own.
            own = max(0, (within[at] if gaps else 0) - max(0, steps - gaps))
            # The first gap of a stream that began with P's token goes on until D's second one.
            if own and one.second_s > one.first_s and one.second_s + one.step_s - one.first_s > limit_s:
                own -= 1
            counted.append(min(own, gaps))
        one.ended = True
        found = (one.first_s, now, request.output_tokens, gaps, tuple(counted))
        self._tell(Served(request.id, request.at_s, *found, one.path.name, tuple(one.instances)))

    def _submit(self, one: _Underway, stage: VirtualStage, sequence: Job, *, held: bool = False) -> None:
        """`held`: see `Scheduler.add`."""
        self._picked[stage.name] = next(self._picks)
        one.instances.setdefault(stage.name)
        stage.scheduler.add(sequence, held=held)
        stage.wake()

    # --- the proxy's choices --------------------------------------------------------------------------------------

    def _route(self, request: Request) -> tuple[Path, VirtualStage]:
        """Returns the path and its head, chosen of all that take prompts."""
        by_role = self._heads[bool(request.items)]
        candidates = [one for role in by_role for one in self._candidates(role)]
        if request.session and (at := self._at.get(request.session)) is not None:
            candidates = [
                changed(one, cached=float(request.cached_tokens)) if one.id == at else one for one in candidates
            ]
        head = self._chosen(candidates, float(request.prompt_tokens))
        return by_role[head.role], head

    def _chosen(self, candidates: Sequence[Candidate], cost: float) -> VirtualStage:
        chosen = candidates[0] if len(candidates) == 1 else self._policy(candidates, Placement(cost))
        return self._by_name[chosen.id]

    def _changed(self, stage: VirtualStage) -> Callable[[], None]:
        """Returns what makes it, and who shares its device, other candidates from then on."""
        marks = [partial(self._stale[one.role].add, one) for one in (stage, *self._around[stage.name])]
        if len(marks) == 1:
            return marks[0]

        def changed() -> None:
            for mark in marks:
                mark()

        return changed

    def _candidates(self, role: Role) -> Sequence[Candidate]:
        """All of a role. Of many only those that have changed are looked at again."""
        known, stale = self._known[role], self._stale[role]
        for stage in stale:
            known[stage.name] = self._candidate(stage)
        stale.clear()
        return list(known.values())

    def _candidate(self, stage: VirtualStage) -> Candidate:
        rate = reported_rate(stage.role, stage)
        around = self._around[stage.name]
        neighbours_s = tuple([self._pending_s(one) for one in around]) if around else ()
        load, last_pick = self._load(stage), self._picked[stage.name]
        return Candidate(stage.name, "1", load, last_pick, rate=rate, neighbours_s=neighbours_s)

    def _load(self, stage: VirtualStage) -> float:
        return reported_pending(stage.role, stage) + self._unseen[stage.name]

    def _pending_s(self, stage: VirtualStage) -> float:
        """For how long it keeps its device."""
        rate = reported_rate(stage.role, stage) or UNMEASURED_RATE
        return pending_s(stage.role, self._load(stage), stage.running, rate)


def _told(encoder: VirtualStage) -> Callable[[float], None]:
    """An encoder hears of a neighbour's steps that decode, as over the reports of a deployment."""

    def stepped(seconds: float) -> None:
        assert encoder.scheduler.budgets is not None
        encoder.scheduler.budgets.neighbour(seconds)

    return stepped
