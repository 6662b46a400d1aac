"""A stage in virtual time: the scheduler and the profile of a simulated stage, on a device that it may share.

What `epd_serve/sim/engine.py` is in real time. Which request it gets when is not its business.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.devices.serving import DECODE, ENCODE, PREFILL
from bench.emulation.clock import Clock
from bench.emulation.sharing import SharedDevice, mixture
from epd_serve.roles import Role
from epd_serve.sim.engine import Rates
from epd_serve.sim.profile import Profile
from epd_serve.sim.scheduler import Scheduler, Step
from epd_serve.sim.sequence import Sequence

Began = Callable[[Sequence, str, float, float], None]
"""(sequence, kind of work, begin, end) of each part of a step that worked on it."""


class VirtualStage:
    """One instance.

    Args:
        worked: told of every encode and every piece of a prompt, when its step is over.

    Attributes:
        scheduler, rates: as of a simulated stage, so that `stage_report` reads them.
    """

    def __init__(
        self, name: str, role: Role, profile: Profile, device: SharedDevice, clock: Clock, worked: Began
    ) -> None:
        self.name, self.role = name, role
        self.scheduler = Scheduler(profile.capacity)
        self.rates = Rates()
        self._profile, self._device, self._clock = profile, device, clock
        self._factor = profile.factors(name)
        self._worked = worked
        self._busy = False

    def submit(self, sequence: Sequence, *, held: bool = False) -> None:
        """See `Scheduler.add`."""
        self.scheduler.add(sequence, held=held)
        self._ring()

    def release(self, sequence: Sequence) -> None:
        """See `Scheduler.release`."""
        self.scheduler.release(sequence)
        self._ring()

    def loaded(self, sequence: Sequence) -> None:
        """See `Scheduler.loaded`."""
        self.scheduler.loaded(sequence)
        self._ring()

    def free(self, sequence: Sequence) -> None:
        """See `Scheduler.free`."""
        self.scheduler.free(sequence)
        self._ring()

    def _ring(self) -> None:
        """An idle stage begins when all that comes at this moment is here."""
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._begin)

    def _begin(self) -> None:
        step = self.scheduler.plan()
        if not step:
            self._busy = False
            return
        parts_s = self._profile.step_parts_s(step.item_tokens, step.prompt_tokens, len(step.decodes))
        parts = dict(zip((ENCODE, PREFILL, DECODE), parts_s, strict=True))
        begun_s = self._clock.now_s

        def over() -> None:
            self._over(step, begun_s, parts_s)

        self._device.run(mixture(**parts), sum(parts_s) * self._factor(), over)

    def _over(self, step: Step, begun_s: float, parts_s: tuple[float, float, float]) -> None:
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
