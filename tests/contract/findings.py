"""What an examination of our code against one wheel brings. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Finding:
    """Something that fails with this wheel."""

    path: str
    line: int
    wheel: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.wheel}: {self.message}"


@dataclass(frozen=True, order=True)
class Use:
    """Something of the wheel that our code uses. `kind`: import, attribute, call, hook, config key, flag, variable."""

    path: str
    line: int
    kind: str
    name: str


@dataclass(frozen=True, order=True)
class Probe:
    """A place where our code asks at run time whether something is there, and lives with either answer.

    Attributes:
        question: what it looks for.
        where: the function that asks; its docstring says what follows.
    """

    path: str
    line: int
    where: str
    question: str
    found: bool
    why: str = ""


@dataclass(frozen=True, order=True)
class Hook:
    """A method of ours that the wheel calls. `calls`: how often; `at`: where first."""

    path: str
    line: int
    owner: str
    method: str
    defined: bool
    calls: int
    at: str = ""


@dataclass
class Examined:
    """All that was seen."""

    wheel: str
    findings: list[Finding] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    hooks: list[Hook] = field(default_factory=list)
    followed: set[tuple[str, str, str]] = field(default_factory=set)  # origins that were needed
    unproved: list[Use] = field(default_factory=list)  # members that a base outside the wheel may have
