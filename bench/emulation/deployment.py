"""A layout in virtual time: the course of requests through its stages, placed by the proxy's own policies (design §4).

E encodes, hands over; then D reserves, P prefills, KV goes over, D decodes; fused stages do the same within one step.
Loads are what stages report, without the delay of reports. No failures, no reuse: every picture is new.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.devices.serving import ENCODE, PREFILL, Serving
from bench.emulation.clock import Clock
from bench.emulation.sharing import SharedDevice
from bench.emulation.stage import VirtualStage
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.placement import check_servable, lower
from epd_serve.roles import Role
from epd_serve.sim.load import stage_report
from epd_serve.sim.sequence import Sequence
from epd_serve.wiring import StageWiring
from proxy.encode.assignment import spread
from proxy.registry.load import reported_pending, reported_rate
from proxy.routing.paths import Path, paths
from proxy.routing.policy import Candidate, least_loaded


@dataclass(eq=False)
class Course:
    """One request under way.

    Attributes:
        items: tokens of each of its pictures. stamps: when it reached what, by the milestones of `stamped.py`.
        path: which way it goes; instances: which stages it met. token_s: when each token was there.
    """

    id: str
    due_s: float
    text_tokens: int
    items: tuple[int, ...]
    output_tokens: int
    path: str = ""
    instances: list[str] = field(default_factory=list)
    stamps: dict[str, float] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + sum(self.items)

    def meets(self, stage: VirtualStage) -> VirtualStage:
        if stage.name not in self.instances:
            self.instances.append(stage.name)
        return stage


class Deployment:
    """The instances of `layout` on devices that are all `device`.

    Raises:
        ConfigError: a layout that cannot be served, or with stages of several devices.
    """

    def __init__(self, layout: Layout, device: Serving, clock: Clock) -> None:
        check_servable(layout)
        if any(member.tp > 1 for member in layout.members()):
            raise ConfigError(
                f"layout {layout} has stages of several devices; an emulation knows one device each", param="--layouts"
            )
        self._device, self._clock = device, clock
        self._picks = itertools.count(1)
        self._courses: dict[Sequence, Course] = {}
        self._answers: set[Sequence] = set()  # at another stage than their prompts
        profile = device.profile()
        devices: dict[int, SharedDevice] = defaultdict(lambda: SharedDevice(clock, device.slows()))
        self.stages = [
            VirtualStage(plan.id, plan.role, profile, devices[plan.devices[0]], clock, self._worked)
            for plan in lower(layout, range(layout.device_count))
        ]
        self._picked = {stage.name: 0 for stage in self.stages}

    def expect(self, course: Course, ended: Callable[[Course], None]) -> None:
        """It will come when it is due. `ended`: called with its last token."""

        def arrives() -> None:
            course.stamps["dispatched"] = self._clock.now_s
            path, _ = self._way(course)
            if path.encode:
                self._encode(course, lambda: self._generate(course, ended))
            else:
                self._generate(course, ended)

        self._clock.after(course.due_s - self._clock.now_s + self._device.front_s, arrives)

    # --- stages of a request --------------------------------------------------------------------------------------

    def _encode(self, course: Course, then: Callable[[], None]) -> None:
        """All items, spread over the encoders; then what is to be done when P can have them all."""
        encoders = [stage for stage in self.stages if stage.role is Role.E]
        keys = [f"{course.id}/{index}" for index in range(len(course.items))]
        shares = spread(keys, [float(tokens) for tokens in course.items], [self._candidate(one) for one in encoders])
        left = len(course.items)

        def handed_over() -> None:
            nonlocal left
            left -= 1
            if not left:
                course.stamps["feature_ready"] = self._clock.now_s
                then()

        for encoder, share in zip(encoders, shares, strict=True):
            if share:
                items = tuple(course.items[index] for index in share)
                sequence = Sequence(0, 1, lambda number, last: None, items)
                sequence.on_encoded = lambda index, items=items: self._clock.after(  # type: ignore[misc]
                    self._device.handed_over_s(items[index]), handed_over
                )
                self._courses[sequence] = course
                self._pick(course, encoder).submit(sequence)

    def _generate(self, course: Course, ended: Callable[[Course], None]) -> None:
        path, head = self._way(course)
        course.path = path.name
        own_items = () if path.encode else course.items

        def token(number: int, last: bool) -> None:
            course.token_s.append(self._clock.now_s)
            if last:
                ended(course)

        if path.tail is None:
            whole = Sequence(course.prompt_tokens, course.output_tokens, token, own_items)
            self._courses[whole] = course
            self._pick(course, head).submit(whole)
            return
        tail = self._least_loaded(stage for stage in self.stages if stage.role is path.tail)
        answer = Sequence(course.prompt_tokens, course.output_tokens, token)

        def prefilled(number: int, last: bool) -> None:
            def there() -> None:
                course.stamps["kv_done"] = self._clock.now_s
                head.free(prompt)
                tail.loaded(answer)

            self._clock.after(self._device.kv_exposed_s, there)

        prompt = Sequence(course.prompt_tokens, 1, prefilled, own_items, keeps_kv=True)
        self._courses[prompt] = self._courses[answer] = course
        self._answers.add(answer)
        answer.on_reserved = lambda: self._clock.after(0.0, lambda: head.release(prompt))
        self._pick(course, head).submit(prompt, held=True)
        self._pick(course, tail).submit(answer)

    def _worked(self, sequence: Sequence, kind: str, begun_s: float, ended_s: float) -> None:
        course = self._courses[sequence]
        if sequence in self._answers:  # of its prompt only the last token, with its first step
            course.stamps.setdefault("decode_start", begun_s)
            return
        begin, end = {ENCODE: ("encode_start", "encoded"), PREFILL: ("prefill_start", "prefill_end")}[kind]
        course.stamps.setdefault(begin, begun_s)
        course.stamps[end] = ended_s

    # --- the proxy's choices --------------------------------------------------------------------------------------

    def _way(self, course: Course) -> tuple[Path, VirtualStage]:
        """The path, and its head: the least loaded of all that take prompts."""
        ways = paths({stage.role for stage in self.stages}, multimodal=bool(course.items))
        heads = {stage.name: (path, stage) for path in ways for stage in self.stages if stage.role is path.head}
        return heads[least_loaded([self._candidate(stage) for _, stage in heads.values()]).id]

    def _least_loaded(self, stages: Iterable[VirtualStage]) -> VirtualStage:
        by_name = {stage.name: stage for stage in stages}
        return by_name[least_loaded([self._candidate(stage) for stage in by_name.values()]).id]

    def _candidate(self, stage: VirtualStage) -> Candidate:
        report = stage_report(StageWiring(instance=stage.name, role=stage.role, incarnation="1"), stage, 1)
        return Candidate(
            stage.name,
            "1",
            reported_pending(stage.role, report),
            last_pick=self._picked[stage.name],
            rate=reported_rate(stage.role, report),
        )

    def _pick(self, course: Course, stage: VirtualStage) -> VirtualStage:
        self._picked[stage.name] = next(self._picks)
        return course.meets(stage)
