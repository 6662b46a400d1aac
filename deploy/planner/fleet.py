"""The instances of a deployment in virtual time, and who is chosen: the proxy's own policies (`proxy/routing`), behind
its own door. Pure.

Instances come, drain, take another part and go while requests are under way; whoever does that drives the `Fleet`, from
the ticks of `simulate`. Loads are what stages report, without the delay of reports. What becomes of a request on its
instances is `deploy/planner/simulate.py`'s business.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec.structs import replace as changed

from deploy.planner.door import Door
from deploy.planner.profile import KINDS, DeviceProfile, beside_name
from deploy.planner.stage import Clock, SharedDevice, VirtualStage
from epd_serve.budgets import Budgets
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from epd_serve.slo import Slo
from epd_serve.traffic import Request
from proxy.admission.queue import Stage
from proxy.config.settings import ProxyOptions
from proxy.registry.instance_state import pending_s, reported_pending, reported_rate
from proxy.routing.credits import Credit, kv_room, seats
from proxy.routing.plan import Path, paths
from proxy.routing.policy import POLICIES, UNMEASURED_RATE, Candidate, Placement

USUAL_TTFT_S = 2.0
"""Of a request's objective, where no SLO is asked about."""


@dataclass(frozen=True)
class Options:
    """How a layout is run.

    Attributes:
        policy: of the proxy. order: of those that wait at its door (`proxy/admission/order.py`).
        first_token: `prefill` shows streams the token of P, `decode` that of D.
        budgets: steps are held to it; None leaves them to the limits.
        max_running, step_tokens, encoder_tokens: of every stage, by role; else the profile's.
        core_share: of the cores of a device, as `--core-share` has it; "" is no limit.
        image_parts: most encoders that share one image, as the proxy has it.
    """

    policy: str = "first-token"
    order: str = "deadline"
    first_token: str = "prefill"
    budgets: Slo | None = None
    max_running: Mapping[str, int] = field(default_factory=dict)
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    encoder_tokens: Mapping[str, int] = field(default_factory=dict)
    core_share: str = ""
    image_parts: int = ProxyOptions.image_parts


@dataclass(slots=True)
class Counts:
    """Requests of one kind since the beginning.

    Attributes:
        came, items, item_tokens, prompt_tokens: of those that arrived, whether they are served yet or not.
        ended, output_tokens: of those that were answered. attained: of them those that attained each SLO.
    """

    attained: list[int]
    came: int = 0
    items: int = 0
    item_tokens: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    output_tokens: int = 0


@dataclass(eq=False, slots=True)
class VirtualInstance:
    """A stage of the fleet, and what the proxy knows of it beyond what it reports.

    Attributes:
        removed_s: when; infinite while it is there.
        draining: it gets nothing new.
        prompts: requests that came through its front and are not done with: a P has their KV until that has left, an E
            their features until they are handed over. answers: that it decodes to prompts of others, or will.
        unseen, unseen_kv: of its load, and of tokens whose KV it is to hold, what its scheduler does not know of yet.
        looked_s: when it was last seen how busy it is. last_pick: grows with every pick.
        front: seconds of its API server's work, in order, and what is called after each.
        front_devices: those that may compute it, its own first. around: who is on its device.
    """

    plan: InstancePlan
    stage: VirtualStage
    removed_s: float = math.inf
    draining: bool = False
    prompts: int = 0
    answers: int = 0
    unseen: float = 0.0
    unseen_kv: int = 0
    looked_s: float = 0.0
    last_pick: int = 0
    front: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    front_devices: Sequence[SharedDevice] = ()
    around: Sequence[VirtualInstance] = ()


class Fleet:
    """Instances that all run on devices of one profile.

    Attributes:
        clock: what is begun now and done later goes there.
        instances: by name, those that serve or drain. held: those and the ones that start.
        ever: all that were added, in order.
        counts: of requests, by kind: `text`, `media`.
        door: where requests wait until instances take them.
    """

    def __init__(
        self, plans: Sequence[InstancePlan], profile: DeviceProfile, clock: Clock, slos: Sequence[Slo], options: Options
    ) -> None:
        self.clock, self._profile, self._options = clock, profile, options
        self.instances: dict[str, VirtualInstance] = {}
        self.held: Mapping[str, InstancePlan] = {}
        self.ever: list[VirtualInstance] = []
        self.counts = {kind: Counts([0] * len(slos)) for kind in ("text", "media")}
        self._policy = POLICIES[options.policy]
        self._limits_s = tuple(slo.tpot_ms / 1e3 for slo in slos)
        self._picks = itertools.count(1)
        slo_s = slos[0].ttft_ms / 1e3 if slos else USUAL_TTFT_S
        self.door = Door(
            options.order,
            slo_s,
            clock,
            self.credits,
            lambda: bool(self._heads[False]),
            self._soonest,
            options.image_parts,
        )
        self._device_s, self._device_count, self._counted_s = 0.0, 0, clock.now_s
        self._slowdowns = {(one, other): profile.slows(one, other) for one in KINDS for other in KINDS}
        self._devices: dict[int, SharedDevice] = defaultdict(lambda: SharedDevice(clock, self._slowdowns))
        self._beside = {
            kind: [
                (other, slows - 1.0)
                for other in KINDS
                if (slows := profile.beside.get(beside_name(kind, other), 1.0)) > 1.0
            ]
            for kind in KINDS
        }
        for plan in plans:
            self._join(plan)
        self._settle()

    # --- instances that come and go -------------------------------------------------------------------------------

    def hold(self, plan: InstancePlan) -> None:
        """It starts: its devices count from now on. `add` comes when it is up, or `remove` when its start fails."""
        self._set_held({**self.held, plan.id: plan})

    def add(self, plan: InstancePlan) -> None:
        """It is up and serves. Its devices count from now on, or since `hold`. Its name is nobody else's."""
        self._join(plan)
        self._settle()

    def drain(self, name: str) -> None:
        """It gets nothing new, and finishes what it has."""
        self.instances[name].draining = True
        self._settle()

    def take(self, name: str, role: Role) -> None:
        """It serves in this role from now on, though it was draining. A P becomes a D when it is `quiet`, for which it
        drains first, a D a P at once; limits stay those that it began with."""
        one = self.instances[name]
        if role is not one.plan.role:
            assert {role, one.plan.role} == {Role.P, Role.D} and self.quiet(name), f"{name} cannot be {role} now"
            one.plan = replace(one.plan, role=role, both=True)
        one.draining, one.stage.role = False, role
        self._set_held({**self.held, name: one.plan})
        self._settle()

    def share(self, name: str, core_share: float) -> None:
        """Who has a share of its device's cores has this one from its next step on."""
        one = self.instances[name]
        assert one.plan.core_share, f"{name} has no share of its own"
        one.plan = replace(one.plan, core_share=core_share)
        one.stage.slow = 1.0 / core_share

    def remove(self, name: str) -> None:
        """It is gone, which has to be `empty`, and so are its devices, unless another one is on them."""
        self._set_held({held: plan for held, plan in self.held.items() if held != name})
        if name in self.instances:
            assert self.empty(name), f"{name} has requests"
            self.instances.pop(name).removed_s = self.clock.now_s
            self._settle()

    def quiet(self, name: str) -> bool:
        """No prompt comes, waits or is computed there, and no KV or features have yet to leave."""
        return not self.instances[name].prompts

    def empty(self, name: str) -> bool:
        """No request holds it."""
        return self.quiet(name) and not self.instances[name].answers

    @property
    def device_s(self) -> float:
        """Seconds for which devices were held until now, summed."""
        return self._device_s + self._device_count * (self.clock.now_s - self._counted_s)

    def _set_held(self, held: Mapping[str, InstancePlan]) -> None:
        """From now on."""
        self._device_s, self._counted_s = self.device_s, self.clock.now_s
        self.held = held
        self._device_count = len({device for plan in held.values() for device in plan.devices})

    def _join(self, plan: InstancePlan) -> None:
        assert plan.id not in self.instances, f"there is a {plan.id}"
        self.hold(plan)
        # Who has a share of the cores to itself meets nobody.
        device = SharedDevice(self.clock, self._slowdowns) if plan.core_share else self._devices[plan.devices[0]]
        one = VirtualInstance(plan, self._stage(plan, device))
        self.instances[plan.id] = one
        self.ever.append(one)

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
            self.clock,
            budgets=budgets,
            limits_s=self._limits_s,
            spread=self._profile.spread,
            slow=1.0 / (plan.core_share or 1.0),
        )

    def _settle(self) -> None:
        """After a change: who is beside whom, who can be chosen, which paths there are."""
        self._meet()
        self._known: dict[Role, dict[str, Candidate]] = {role: {} for role in Role}
        self._credits: dict[Role, dict[str, Credit]] = {role: {} for role in Role}
        self._stale: dict[Role, set[VirtualInstance]] = {role: set() for role in Role}
        for one in self.instances.values():
            line = Stage.ENCODE if one.stage.role is Role.E else Stage.SERVE
            one.stage.changed, one.stage.gave = self._changed(one), partial(self.door.look, (line,))
            if not one.draining:
                self._look_at(one)
        roles = [role for role, known in self._known.items() if known]
        self._heads = [  # for requests without items, and with some
            {path.head: path for path in paths(roles, multimodal=multimodal)} for multimodal in (False, True)
        ]
        self.door.renewed()

    def _meet(self) -> None:
        """Those of a host share what computes for its fronts and slow each other, those of a device more so."""
        hosts: dict[int, list[VirtualInstance]] = defaultdict(list)
        groups: dict[tuple[int, ...], list[VirtualInstance]] = defaultdict(list)
        for one in self.instances.values():
            hosts[one.plan.devices[0] // self._profile.host_devices].append(one)
            groups[one.plan.devices].append(one)
        for host in hosts.values():
            for one in host:
                one.front_devices = [one.stage.device, *(other.stage.device for other in host)]
                if any(self._beside.values()):
                    one.stage.beside = self._beside
                    one.stage.others = [other.stage for other in host if other.stage.device is not one.stage.device]
        for one in self.instances.values():
            neighbours = [other for other in groups[one.plan.devices] if other is not one]
            one.around = neighbours if self._options.policy == "first-token" else ()
            if one.stage.role is Role.E and self._options.budgets is not None:
                for neighbour in neighbours:
                    neighbour.stage.stepped = _told(one.stage)

    # --- the proxy's choices --------------------------------------------------------------------------------------

    def encodes_apart(self, request: Request) -> bool:
        """Whether its items are to go to encoders before it goes elsewhere: where some heads encode for themselves,
        that follows from where it would go now."""
        apart = {path.encode for path in self._heads[True].values()} if request.items else ()
        return True in apart and (len(apart) == 1 or self.route(request, None)[0].encode)

    def route(self, request: Request, last: VirtualInstance | None) -> tuple[Path, VirtualInstance]:
        """Returns the path and its head, chosen of all that take prompts; there is a path. `last`: served the
        session."""
        by_role = self._heads[bool(request.items)]
        candidates = [one for role in by_role for one in self.candidates(role)]
        if last is not None and last.removed_s == math.inf:
            candidates = [
                changed(one, cached=float(request.cached_tokens)) if one.id == last.stage.name else one
                for one in candidates
            ]
        head = self._chosen(candidates, float(request.prompt_tokens))
        return by_role[head.stage.role], head

    def chosen(self, role: Role) -> VirtualInstance:
        """Of this role, of which there is one, to decode a request."""
        return self._chosen(self.candidates(role), 1.0)

    def device_of(self, id: str) -> object:
        """What an instance computes on."""
        return self.instances[id].stage.device

    def picked(self, one: VirtualInstance) -> None:
        one.last_pick = next(self._picks)

    def candidates(self, role: Role) -> Sequence[Candidate]:
        """All of a role that get something new. Of many only those that have changed are looked at again."""
        self._refresh(role)
        return list(self._known[role].values())

    def credits(self, role: Role) -> Collection[Credit]:
        """The same as what they may be given goes by."""
        self._refresh(role)
        return self._credits[role].values()

    def _soonest(self, stage: Stage, credit_s: float) -> tuple[float, Callable[[], None]] | None:
        """See `Door`."""
        found: tuple[float, Callable[[], None]] | None = None
        for role in (Role.E,) if stage is Stage.ENCODE else self._heads[False]:
            self._refresh(role)
            for name, credit in self._credits[role].items():
                rate = credit.rate
                if rate and (left_s := credit.tokens / rate - credit_s) > 0:
                    one = self.instances[name]
                    at_s = one.looked_s + left_s
                    if (found is None or at_s < found[0]) and one.stage.steps and one.unseen < credit_s * rate:
                        found = at_s, one.stage.changed
        return found

    def _refresh(self, role: Role) -> None:
        if stale := self._stale[role]:
            for one in list(stale):
                self._look_at(one)
                if not one.stage.fills:
                    stale.discard(one)

    def _chosen(self, candidates: Sequence[Candidate], cost: float) -> VirtualInstance:
        chosen = candidates[0] if len(candidates) == 1 else self._policy(candidates, Placement(cost))
        return self.instances[chosen.id]

    def _changed(self, one: VirtualInstance) -> Callable[[], None]:
        """Returns what makes it, and who shares its device, other candidates from then on."""
        marks = [partial(self._stale[each.stage.role].add, each) for each in (one, *one.around) if not each.draining]
        if len(marks) == 1:
            return marks[0]

        def changed() -> None:
            for mark in marks:
                mark()

        return changed

    def _look_at(self, one: VirtualInstance) -> None:
        """How busy it is now."""
        stage, role = one.stage, one.stage.role
        one.looked_s = self.clock.now_s
        decodes, running, shared = role.decodes, stage.running, stage.shared_tokens
        held = max(one.prompts + one.answers, running + stage.waiting)
        rate, load = reported_rate(role, stage), self._load(one)
        neighbours_s = tuple([self._pending_s(other) for other in one.around]) if one.around else ()
        shares = (shared, held - (running - 1 if decodes and running else 0)) if shared else (0, 0)
        self._known[role][stage.name] = Candidate(
            stage.name, "1", load, one.last_pick, False, rate, False, neighbours_s, 0.0, *shares
        )
        done = min(load - one.unseen, rate * stage.step_age_s)
        sequences = kv_tokens = math.inf
        if decodes:
            sequences, kv_tokens = seats(stage, held, stage.max_running), kv_room(stage, one.unseen_kv)
        self._credits[role][stage.name] = Credit(
            role, load - done, rate, *shares, held, sequences, kv_tokens, self._profile.front.setup_s
        )

    def _load(self, one: VirtualInstance) -> float:
        return reported_pending(one.stage.role, one.stage, both_halves=one.plan.both) + one.unseen

    def _pending_s(self, one: VirtualInstance) -> float:
        """For how long it keeps its device."""
        stage = one.stage
        rate = reported_rate(stage.role, stage) or UNMEASURED_RATE
        return pending_s(stage.role, self._load(one), stage.running, rate)


def _told(encoder: VirtualStage) -> Callable[[float], None]:
    """An encoder hears of a neighbour's steps that decode, as over the reports of a deployment."""

    def stepped(seconds: float) -> None:
        assert encoder.scheduler.budgets is not None
        encoder.scheduler.budgets.neighbour(seconds)

    return stepped
