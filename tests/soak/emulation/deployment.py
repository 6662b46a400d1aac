"""A layout in virtual time: requests through its stages, placed by the proxy's own policies; rows as a client's.

E encodes, hands over; then D reserves, P prefills, KV goes over, D decodes; fused stages do the same within one step.
Loads are what stages report, without the delay of reports. No failures, no reuse: every image is new. The rows are
those of the load generator, so every figure that a measured run has, an emulated one has by the same code.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from bench.workloads.requests import RequestSpec
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.placement import check_servable, lower
from epd_serve.roles import Role
from epd_serve.sim.items import MERGE, PATCH_PIXELS
from epd_serve.sim.load import stage_report
from epd_serve.sim.sequence import Sequence
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring
from proxy.encode.assignment import share_of, spread
from proxy.registry.load import pending_s, reported_pending, reported_rate
from proxy.routing.paths import Path, paths
from proxy.routing.policy import POLICIES, Candidate, Placement, usual_rate, with_neighbours
from tests.soak.emulation.device import StageDevice
from tests.soak.emulation.stage import Clock, SharedDevice, VirtualStage


@dataclass(eq=False)
class Request:
    """One request under way.

    Attributes:
        item_tokens: of each of its images.
        path: through the layout. instances: that it met, in order. token_s: when each token was there.
    """

    id: str
    due_s: float
    text_tokens: int
    item_tokens: tuple[int, ...]
    output_tokens: int
    path: str = ""
    instances: dict[str, None] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, spec: RequestSpec) -> Request:
        """Images count a token per 28x28 pixels, as with simulated stages (`epd_serve/sim/items.py`)."""
        assert spec.arrival_s is not None
        side = PATCH_PIXELS * MERGE
        items = (max(1, round(one.width / side)) * max(1, round(one.height / side)) for one in spec.images)
        return cls(spec.id, spec.arrival_s, spec.text_tokens, tuple(items), spec.max_tokens)

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + sum(self.item_tokens)

    def row(self, label: str, number: int) -> RequestRecord:
        """Returns what the request sender would have noted."""
        last_s = self.token_s[-1]
        return RequestRecord(
            *(label, number, self.id, self.id, self.due_s, self.due_s, last_s, Outcome.OK, self.due_s),
            token_s=tuple(self.token_s),
            last_s=last_s,
            status=200,
            usage_tokens=len(self.token_s),
            prompt_tokens=self.prompt_tokens,
            finish_reason="length",
            path=self.path,
            instances=",".join(self.instances),
        )


def check_emulated(layout: Layout) -> None:
    """Raises ConfigError for a layout that cannot be served, or with stages of several devices."""
    check_servable(layout)
    if any(member.tp > 1 for member in layout.members()):
        raise ConfigError(
            f"layout {layout} has stages of several devices; an emulation knows one device each", param="--layouts"
        )


def emulate(
    layout: Layout, device: StageDevice, requests: Iterable[RequestSpec], label: str, policy: str = "least-loaded"
) -> Run:
    """Serve `requests`, each of which has an `arrival_s`, on devices that are all `device`.

    Args:
        label: of the run, in its rows.
        policy: of the proxy; the default is EPD-Serve's (§3.4), which knows nothing of neighbours.

    Raises:
        ConfigError: see `check_emulated`.
    """
    check_emulated(layout)
    clock = Clock()
    deployment = _Deployment(layout, device, clock, policy)
    own = [Request.of(spec) for spec in requests]
    run = Run(label, sent=len(own), issued_s=max((one.due_s for one in own), default=0.0))

    def ended(request: Request) -> None:
        run.rows.append(request.row(label, len(run.rows)))

    for request in own:
        deployment.expect(request, ended)
    clock.run()
    assert len(run.rows) == len(own), f"{len(own) - len(run.rows)} requests never ended"
    run.ended_s = max((row.ended_s for row in run.rows), default=0.0)
    return run


class _Deployment:
    """The instances of a layout."""

    def __init__(self, layout: Layout, device: StageDevice, clock: Clock, policy: str) -> None:
        self._device, self._clock = device, clock
        self._policy, self._by_neighbours = POLICIES[policy], policy == "first-token"
        self._picks = itertools.count(1)
        profile = device.profile()
        devices: dict[int, SharedDevice] = defaultdict(lambda: SharedDevice(clock, device.slowdowns()))
        self._stages = [
            VirtualStage(plan.id, plan.role, profile, devices[plan.devices[0]], clock)
            for plan in lower(layout, range(layout.device_count))
        ]
        self._picked = {stage.name: 0 for stage in self._stages}
        on = {plan.id: plan.devices[0] for plan in lower(layout, range(layout.device_count))}
        self._neighbours = {
            one.name: [other for other in self._stages if other is not one and on[other.name] == on[one.name]]
            for one in self._stages
        }

    def expect(self, request: Request, ended: Callable[[Request], None]) -> None:
        """It will come when it is due. `ended`: called with its last token."""

        def arrive() -> None:
            path, _ = self._route(request)
            if path.encode:
                self._encode(request, lambda: self._generate(request, ended))
            else:
                self._generate(request, ended)

        self._clock.after(request.due_s - self._clock.now_s + self._device.front_s, arrive)

    # --- stages of a request --------------------------------------------------------------------------------------

    def _encode(self, request: Request, then: Callable[[], None]) -> None:
        """All items, spread over the encoders; then what is to be done when P can have them all."""
        encoders = [stage for stage in self._stages if stage.role is Role.E]
        tokens = request.item_tokens
        keys = [f"{request.id}/{index}" for index in range(len(tokens))]
        costs = list(map(float, tokens))
        workers = with_neighbours([self._candidate(one) for one in encoders], share_of(costs, len(encoders)))
        shares = spread(keys, costs, workers)
        left = len(tokens)

        def handed_over() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for encoder, share in zip(encoders, shares, strict=True):
            if share:
                items = tuple(tokens[index] for index in share)
                sequence = Sequence(0, 1, lambda number, last: None, items)
                sequence.on_encoded = lambda index, items=items: self._clock.after(  # type: ignore[misc]
                    self._device.handed_over_s(items[index]), handed_over
                )
                self._submit(request, encoder, sequence)

    def _generate(self, request: Request, ended: Callable[[Request], None]) -> None:
        path, head = self._route(request)
        request.path = path.name
        own_items = () if path.encode else request.item_tokens

        def token(number: int, last: bool) -> None:
            request.token_s.append(self._clock.now_s)
            if last:
                ended(request)

        if path.tail is None:
            whole = Sequence(request.prompt_tokens, request.output_tokens, token, own_items)
            self._submit(request, head, whole)
            return
        tail = self._chosen([stage for stage in self._stages if stage.role is path.tail], 1.0)
        answer = Sequence(request.prompt_tokens, request.output_tokens, token)

        def transferred() -> None:
            head.scheduler.free(prompt)
            head.wake()
            tail.scheduler.loaded(answer)
            tail.wake()

        def reserved() -> None:
            head.scheduler.release(prompt)
            head.wake()

        prompt = Sequence(
            *(request.prompt_tokens, 1),
            lambda number, last: self._clock.after(self._device.kv_exposed_s, transferred),
            own_items,
            keeps_kv=True,
        )
        answer.on_reserved = lambda: self._clock.after(0.0, reserved)
        self._submit(request, head, prompt, held=True)
        self._submit(request, tail, answer)

    def _submit(self, request: Request, stage: VirtualStage, sequence: Sequence, *, held: bool = False) -> None:
        """`held`: see `Scheduler.add`."""
        self._picked[stage.name] = next(self._picks)
        request.instances.setdefault(stage.name)
        stage.scheduler.add(sequence, held=held)
        stage.wake()

    # --- the proxy's choices --------------------------------------------------------------------------------------

    def _route(self, request: Request) -> tuple[Path, VirtualStage]:
        """Returns the path and its head, chosen of all that take prompts."""
        roles = {stage.role for stage in self._stages}
        by_role = {path.head: path for path in paths(roles, multimodal=bool(request.item_tokens))}
        heads = [stage for role in by_role for stage in self._stages if stage.role is role]
        head = self._chosen(heads, float(request.prompt_tokens))
        return by_role[head.role], head

    def _chosen(self, stages: Iterable[VirtualStage], cost: float) -> VirtualStage:
        by_name = {stage.name: stage for stage in stages}
        return by_name[self._policy([self._candidate(stage) for stage in by_name.values()], Placement(cost)).id]

    def _candidate(self, stage: VirtualStage) -> Candidate:
        report = self._report(stage)
        return Candidate(
            stage.name,
            "1",
            reported_pending(stage.role, report),
            last_pick=self._picked[stage.name],
            rate=reported_rate(stage.role, report),
            neighbours_s=tuple(map(self._pending_s, self._neighbours[stage.name])) if self._by_neighbours else (),
        )

    def _pending_s(self, stage: VirtualStage) -> float:
        report = self._report(stage)
        rate = usual_rate([reported_rate(stage.role, report)])
        return pending_s(stage.role, reported_pending(stage.role, report), report.running, rate)

    def _report(self, stage: VirtualStage) -> StageReport:
        return stage_report(StageWiring(instance=stage.name, role=stage.role, incarnation="1"), stage, 1)
