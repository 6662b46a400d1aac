"""What a follower sees, proposes, decides and remembers. Data.

Instances are counted by group: `P`, `D:tp2`, `(E-P)`, as one copy of it stands in a layout. What they do is counted in
*group-seconds*: seconds that one copy of a group is busy. So a need of 2.3 is 2.3 copies that never rest.

A group whose stages are held to shares of their device's cores has *parts*, one for each role, `(E-P)/E` and `(E-P)/P`:
they work side by side, each for itself, and the group is as busy as the busiest of them. Any other group is one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deploy.change.types import Kind
from epd_serve.layout import Layout
from epd_serve.roles import Role

if TYPE_CHECKING:
    from deploy.planner.workload import Work

Counts = Mapping[str, int]
"""Copies by group."""
Needs = Mapping[str, float]
"""Group-seconds a second, by group."""


@dataclass(frozen=True)
class Limits:
    """What a follower may do (`follow.*` of `epd-serve serve`).

    Attributes:
        least, most: copies by group; a group that is not there has at least 1, and at most as many as fit.
        devices: that may be used in all.
        use: share of its time that a group may be busy and still keep the SLO.
        every_s: between decisions. quiet_s: for how long less must have been needed before anything is given up.
        switchable: P and D become each other without a restart.
    """

    devices: int
    least: Counts = field(default_factory=dict)
    most: Counts = field(default_factory=dict)
    use: float = 0.7
    every_s: float = 5.0
    quiet_s: float = 300.0
    switchable: bool = False
    fixed_shares: str = ""


@dataclass(frozen=True)
class Shares:
    """How the stages of a group divide the cores of its device.

    Attributes:
        of: share of one instance, by role, above 0. counts: instances of the group, by role.
        cores: of the device, the smallest of those that its copies have.
    """

    of: Mapping[Role, float]
    counts: Mapping[Role, int]
    cores: int

    def part(self, role: Role) -> float:
        """Share of all instances of this role."""
        return self.of[role] * self.counts[role]


def part_of(group: str, role: Role) -> str:
    """The name of a part of a group that has shares."""
    return f"{group}/{role.value}"


def parts_of(groups: Iterable[str], shares: Mapping[str, Shares]) -> list[str]:
    """Of all groups, each a part itself where it has no shares."""
    return [
        part
        for group in groups
        for part in ([part_of(group, role) for role in shares[group].of] if group in shares else [group])
    ]


def by_group(parts: Needs) -> dict[str, float]:
    """A group is as busy as its busiest part."""
    groups = dict[str, float]()
    for part, need in parts.items():
        group = part.partition("/")[0]
        groups[group] = max(need, groups.get(group, 0.0))
    return groups


@dataclass(frozen=True)
class Observation:
    """What is seen at one moment.

    Attributes:
        at_s: of a clock that never goes back.
        layout: that is wanted.
        window_s: for how long arrivals were counted. came: requests in it, by kind, refused ones included.
        costs: group-seconds that a request takes, by kind, then by part. sizes: of a request on average, by kind.
        backlog: group-seconds of work that waits, by part.
        start_s: how long an instance takes to start, by experience.
        heard: share of the front doors that said what came to them.
        changing: a change is under way. own: it is the follower's, which may supersede it.
        devices: that this deployment has or could lease now, where they are lent; None: all of `Limits.devices`.
        busy: group-seconds a second that the parts of all copies have really worked since the look before.
        shares: of groups whose stages divide a device's cores, by group.
    """

    at_s: float
    layout: Layout
    window_s: float
    came: Mapping[Kind, float]
    costs: Mapping[Kind, Needs]
    backlog: Needs = field(default_factory=dict)
    start_s: float = 0.0
    heard: float = 1.0
    changing: bool = False
    sizes: Mapping[Kind, Work] = field(default_factory=dict)
    devices: int | None = None
    busy: Needs = field(default_factory=dict)
    own: bool = False
    shares: Mapping[str, Shares] = field(default_factory=dict)


@dataclass(frozen=True)
class Mix:
    """What kind of work comes.

    Attributes:
        shares: of a device's time, by kind of work (`encode`, `prefill`, `decode`).
        scenario: layout whose groups EPD-Serve (§4.7) advises for such work and this SLO; "" for none.
    """

    shares: Mapping[str, float]
    scenario: str = ""


@dataclass(frozen=True)
class PlanQuestion:
    """Which layout would serve most of such work on as many devices as this one has.

    Attributes:
        rates: requests a second, by kind; only their proportions matter. sizes: of a request, by kind.
    """

    layout: str
    rates: Mapping[Kind, float]
    sizes: Mapping[Kind, Work]
    mix: Mix


@dataclass(frozen=True)
class Trend:
    """Of one kind of request, by the square root of what comes in a window (`forecast.py`)."""

    level: float
    slope: float


@dataclass(frozen=True)
class Move:
    """Another layout, or other core shares.

    Attributes:
        what: `share` and `flip` take seconds, `scale` as long as a start, `relayout`, to other groups, as several.
        layout: as text. counts: of it. core_share: as `--core-share` has it; "" where shares stay.
        relieves: the busiest group, or part.
        before, after: how busy it is beyond what it may be, and will be: above 1 is late.
        why: for people.
    """

    what: str
    layout: str
    counts: Counts
    relieves: str
    before: float
    after: float
    why: str
    core_share: str = ""

    @property
    def target(self) -> str:
        """What is to be reached, as a name."""
        return self.core_share or self.layout


@dataclass(frozen=True)
class Decision:
    """What was decided, with what it was decided by.

    Attributes:
        rates: requests a second that are reckoned with, by kind.
        need: by that. peak: the most that was needed since `quiet_s`.
        chosen: None where all stays. refused: moves that would help, and what forbids them.
        plan: why the layout is of these groups, and no others. question: that the planner should answer.
        costs: as observed.
    """

    at_s: float
    layout: str
    rates: Mapping[Kind, float]
    need: Needs
    peak: Needs
    chosen: Move | None = None
    refused: tuple[tuple[Move, str], ...] = ()
    plan: str = ""
    question: PlanQuestion | None = None
    costs: Mapping[Kind, Needs] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """What a decision has of those before it.

    Attributes:
        since_s: the first decision; None before it.
        trends: by kind. needs: with the time of each, since `quiet_s` ago.
        given_up: when a copy was last, by group, and what was needed of it then.
        calm: so many times the usual time passes before anything is given up, because before it was too early.
        calmed_s: when that was.
        resting: targets that could not be reached, each until when, and for how long.
        shared_s: when core shares were changed last.
        mix: at the decision before. suited: for which mix the groups of a layout were chosen, or planned last, by them.
    """

    since_s: float | None = None
    trends: Mapping[Kind, Trend] = field(default_factory=dict)
    needs: tuple[tuple[float, Needs], ...] = ()
    given_up: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    calm: float = 1.0
    calmed_s: float = float("-inf")
    resting: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shared_s: float = float("-inf")
    mix: Mix | None = None
    suited: Mapping[frozenset[str], Mix] = field(default_factory=dict)


OFF: Mapping[str, Any] = MappingProxyType(
    {"mode": "off", "every_s": None, "use": None, "lacking": (), "budgets": (), "decisions": ()}
)
"""What is told of the follower (`report.follow_json`) where there is none."""
