"""How findings are shown: text for people, JSON for bug reports. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, Level
from epd_serve import __version__

_MARKS = {Level.OK: "✓", Level.WARNING: "!", Level.ERROR: "✗"}
_COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.ERROR: "31"}
_WIDTH = 110

Findings = Mapping[str, Sequence[Finding]]


def failed(findings: Findings) -> bool:
    return any(one.level is Level.ERROR for group in findings.values() for one in group)


def text(facts: Facts, findings: Findings, *, colour: bool = False) -> str:
    """The whole report. A line that is well is one line; another has its reason and its fix below."""
    column = max(len(one.check) for group in findings.values() for one in group) + 2
    lines = [f"epd-serve {__version__} on {facts.wanted.device}"]
    for heading, group in findings.items():
        lines += ["", _painted(heading, "1", colour)]
        for one in group:
            mark = _painted(_MARKS[one.level], _COLOURS[one.level], colour)
            first, *more = _wrapped(one.seen, "", column + 4)
            lines += [f"  {mark} {one.check:<{column}}{first.strip()}", *more]
            if one.level is not Level.OK:
                lines += _wrapped(one.why, "why: ", column + 4)
                lines += _wrapped(one.fix, "fix: ", column + 4)
    return "\n".join((*lines, "", summary(findings)))


def summary(findings: Findings) -> str:
    counts = Counter(one.level for group in findings.values() for one in group)
    said = [_count(counts[level], name) for level, name in ((Level.ERROR, "error"), (Level.WARNING, "warning"))]
    return f"{' and '.join(said)}, {counts[Level.OK]} checks passed"


def document(facts: Facts, findings: Findings) -> dict[str, Any]:
    """For `--json`: versions and findings, nothing of the environment but what a finding says."""
    return {
        "epd_serve": __version__,
        "device": facts.wanted.device,
        "layout": facts.wanted.layout,
        "python": ".".join(map(str, facts.machine.python)),
        "architecture": facts.machine.architecture,
        "versions": dict(facts.packages.versions)
        | {one.name: one.version for one in facts.packages.mooncake}
        | {name: found for name, found in (("cann", facts.ascend.cann), ("driver", facts.ascend.driver)) if found},
        "devices": [one.name for one in facts.devices],
        "findings": [
            {"heading": heading, **{key: _clean(value) for key, value in asdict(one).items()}}
            for heading, group in findings.items()
            for one in group
        ],
        "errors": sum(one.level is Level.ERROR for group in findings.values() for one in group),
    }


def tidy(words: str) -> str:
    """Without the name of the user, which is in the path of a home directory."""
    home = str(Path.home())
    return words.replace(home, "~") if len(home) > 1 else words


def _clean(value: Any) -> Any:
    return tidy(value) if isinstance(value, str) else value


def _wrapped(words: str, name: str, indent: int) -> list[str]:
    """Commands are not broken at their hyphens."""
    first = " " * indent + name
    return textwrap.wrap(
        tidy(words) or "-",
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _count(count: int, name: str) -> str:
    return f"{count or 'no'} {name}{'' if count == 1 else 's'}"


def _painted(words: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{words}\x1b[0m" if colour else words
