"""A layout in virtual time: `simulate` serves traffic on it, by the decisions of the real proxy and scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.planner.profile import DeviceProfile
from epd_serve.layout import Layout
from epd_serve.slo import Slo
from epd_serve.traffic import Request


@dataclass(frozen=True)
class Options:
    """How a layout is run.

    Attributes:
        policy: of the proxy. budgets: steps are held to it; None leaves them to the limits.
        max_running, step_tokens, encoder_tokens: of every stage, by role; else the profile's.
        core_shares: of a device's cores, by role; none is no limit.
    """

    policy: str = "first-token"
    budgets: Slo | None = None
    max_running: Mapping[str, int] = field(default_factory=dict)
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    encoder_tokens: Mapping[str, int] = field(default_factory=dict)
    core_shares: Mapping[str, float] = field(default_factory=dict)


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

    def attained(self, number: int) -> float:
        """The share of requests that attained `slos[number]`; 1 of none."""
        slo = self.slos[number]
        kept = [slo.attained(one.ttft_s, one.tpot_s, one.gaps, one.within[number]) for one in self.served]
        return sum(kept) / len(kept) if kept else 1.0


def simulate(
    layout: Layout,
    profile: DeviceProfile,
    requests: Sequence[Request],
    *,
    slos: Sequence[Slo] = (),
    options: Options = Options(),
) -> Simulated:
    """Serve `requests` on devices that all are the profile's.

    Raises:
        ConfigError: the layout cannot be served, or has a tensor-parallel size that the profile does not know.
    """
    raise NotImplementedError
