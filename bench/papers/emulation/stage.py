"""A stage in virtual time: the scheduler and the profile of a simulated stage, on a device that it may share.

What `epd_serve/sim/engine.py` is in real time. Which request it gets when is not its business.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.papers.devices.stage import DECODE, ENCODE, PREFILL
from bench.papers.emulation.clock import Clock
from bench.papers.emulation.shared_device import SharedDevice, mixture
from epd_serve.roles import Role
from epd_serve.sim.engine import Rates
from epd_serve.sim.profile import Profile
from epd_serve.sim.scheduler import Scheduler, Step
from epd_serve.sim.sequence import Sequence

Worked = Callable[[Sequence, str, float, float], None]
"""(sequence, kind of work, begin, end) of each part of a step that worked on it."""


class VirtualStage:
    """One instance.

    Args:
        worked: called for every encode and every piece of a prompt, when its step is over.

    Attributes:
        scheduler: who changes it calls `wake`. rates: as of a simulated stage, so that `stage_report` reads them.
    """

    def __init__(
        self, name: str, role: Role, profile: Profile, device: SharedDevice, clock: Clock, worked: Worked
    ) -> None:
        self.name, self.role = name, role
        self.scheduler, self.rates = Scheduler(profile.capacity), Rates()
        self._profile, self._device, self._clock, self._worked = profile, device, clock, worked
        self._factor = profile.factors(name)
        self._busy = False

    def wake(self) -> None:
        """An idle stage begins a step when all that comes at this moment is here."""
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._begin)

    def _begin(self) -> None:
        step = self.scheduler.plan()
        self._busy = bool(step)
        if step:
            parts_s = self._profile.step_parts_s(step.item_tokens, step.prompt_tokens, len(step.decodes))
            parts, begun_s = dict(zip((ENCODE, PREFILL, DECODE), parts_s, strict=True)), self._clock.now_s
            self._device.run(
                mixture(**parts), sum(parts_s) * self._factor(), lambda: self._complete(step, begun_s, parts_s)
            )

    def _complete(self, step: Step, begun_s: float, parts_s: tuple[float, float, float]) -> None:
        now_s = self._clock.now_s
        took_s, alone_s = now_s - begun_s, sum(parts_s)
        self.rates.took(step, took_s, parts_s[2])
        encoded_s = begun_s + (took_s * parts_s[0] / alone_s if alone_s else 0.0)
        for sequence, _ in step.encodes:
            self._worked(sequence, ENCODE, begun_s, encoded_s)
        for sequence, tokens in step.prefills:
            if tokens:
                self._worked(sequence, PREFILL, encoded_s, now_s)
        self.scheduler.complete(step)
        self._begin()
