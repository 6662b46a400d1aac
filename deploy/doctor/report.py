"""How findings are shown: text for people, JSON for bug reports. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.doctor.check import Finding, Level
from deploy.doctor.facts import Facts
from deploy.options.versions import spelled
from epd_serve import __version__

_MARKS = {Level.OK: ("✓", "32"), Level.WARNING: ("!", "33"), Level.ERROR: ("✗", "31")}
"""What stands before a finding, and its colour (ANSI)."""

_WIDTH = 110

Findings = Mapping[str, Sequence[Finding]]


def text(facts: Facts, findings: Findings, *, colour: bool = False) -> str:
    """The whole report. A line that is well is one line; another has its reason and its fix below."""
    indent = max(len(one.check) for group in findings.values() for one in group) + 6
    lines = [f"epd-serve {__version__} on {facts.wanted.device}"]
    for heading, group in findings.items():
        lines += ["", _painted(heading, "1", colour)]
        for one in group:
            mark = _painted(*_MARKS[one.level], colour)
            first, *more = _wrapped(one.seen, " " * indent)
            lines += [f"  {mark} {one.check:<{indent - 4}}{first.strip()}", *more]
            if one.fix:
                lines += _wrapped(one.why, " " * indent + "why: ") + _wrapped(one.fix, " " * indent + "fix: ")
    return "\n".join((*lines, "", summary(findings)))


def counts(findings: Findings) -> Counter[Level]:
    """How many findings there are of each level."""
    return Counter(one.level for group in findings.values() for one in group)


def summary(findings: Findings) -> str:
    found = counts(findings)
    errors, warnings = (
        f"{found[level] or 'no'} {level.value}{'' if found[level] == 1 else 's'}"
        for level in (Level.ERROR, Level.WARNING)
    )
    return f"{errors} and {warnings}, {found[Level.OK]} checks passed"


def document(facts: Facts, findings: Findings) -> dict[str, Any]:
    """For `--json`: versions and findings, nothing of the environment but what a finding says."""
    packages = {**facts.packages.versions, **facts.packages.mooncake}
    ascend = {"cann": facts.ascend.cann, "driver": facts.ascend.driver}
    return {
        "epd_serve": __version__,
        "device": facts.wanted.device,
        "layout": facts.wanted.layout,
        "python": spelled(facts.machine.python),
        "architecture": facts.machine.architecture,
        "versions": packages | {name: one for name, one in ascend.items() if one},
        "devices": [one.name for one in facts.devices],
        "findings": [
            {"heading": heading, **asdict(one), "seen": tidy(one.seen), "fix": tidy(one.fix)}
            for heading, group in findings.items()
            for one in group
        ],
        "errors": counts(findings)[Level.ERROR],
    }


def tidy(words: str) -> str:
    """Without the name of the user, which is in the path of a home directory."""
    home = str(Path.home())
    return words.replace(home, "~") if len(home) > 1 else words


def _wrapped(words: str, first: str) -> list[str]:
    """Commands are not broken at their hyphens."""
    return textwrap.wrap(
        tidy(words) or "-",
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _painted(words: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{words}\x1b[0m" if colour else words
