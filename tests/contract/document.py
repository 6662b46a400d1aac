"""`docs/reference/compatibility.md`, from the manifest and what our code does with it.

Pure; a test holds the file to this.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.contract.findings import Examined, Finding, Hook, Probe
from tests.contract.known import KNOWN
from tests.contract.manifest import Manifest
from tests.contract.origins import GUARDED
from tests.contract.source import Function
from tests.contract.wheels import Wheel

DOCUMENT = "docs/reference/compatibility.md"

_INTRODUCTION = """# Compatibility

<!-- Written by `make npu-contract`; a test holds it to the manifest. Do not edit. -->

What our code uses of the engines, devices and transports below it, held against their released wheels. The wheels are
read, never imported: nothing on this page was run on an NPU. `make check-npu-contract` (part of `make check`) repeats
the comparison offline, from `tests/contract/manifest/`; a name, signature, hook, config key, flag or environment
variable that a version lacks is reported with file and line. `make npu-contract` downloads the wheels and reads them
again.
"""

_LIMITS = """## What this cannot show

- Mooncake is a compiled library. That a name is among its bytes is all that is known of it; arguments are not checked.
- Values that reach our code without a type are followed only as far as `tests/contract/origins.py` says what they are.
- That a symbol exists says nothing of what it does. The meaning of hooks was read by people, see
  `epd_serve/engine/kv/connector.py` and `epd_serve/engine/ec/connector.py`.
- A hook counts as called where something named like a connector or scheduler is called so; not every such place runs.
"""


def compatibility(manifests: Mapping[Wheel, Manifest], results: Sequence[Examined], files: Mapping[str, str]) -> str:
    """The whole text.

    Args:
        files: our sources by path; docstrings in them say what is done where something is missing.
    """
    by_name = {result.wheel: result for result in results}
    parts = [
        _INTRODUCTION,
        "## Wheels\n\n" + _wheels(manifests),
        "## What is checked\n\n" + _counts(by_name),
        "## What differs, and what our code does about it\n\n" + _probes(by_name, files),
        "## Hooks\n\n" + _hooks(by_name),
        "## Known gaps\n\n" + _gaps(results),
        _LIMITS,
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _wheels(manifests: Mapping[Wheel, Manifest]) -> str:
    rows = []
    for wheel, manifest in manifests.items():
        about = manifest.about
        found = f"`{about['file']}`" if manifest.available else f"not available: {about['not_available']}"
        rows.append((wheel.name, wheel.role, found, f"`{about.get('sha256', '')[:16]}`" if manifest.available else ""))
    return _table(("release", "stands for", "read from", "sha256 begins"), rows)


def _counts(results: Mapping[str, Examined]) -> str:
    kinds = ("import", "attribute", "call", "hook", "config key", "flag", "variable")
    rows = []
    for name, result in results.items():
        count = Counter(kind for kind, _ in {(use.kind, use.name) for use in result.uses})
        unproved = len({use.name for use in result.unproved})
        rows.append((name, *(str(count[kind] or "") for kind in kinds), str(unproved or "")))
    heads = ("release", *(f"{kind}s" for kind in kinds), "not provable")
    note = "Different names that our code uses. Not provable: the class inherits from outside the wheel.\n"
    return _table(heads, rows) + "\n" + note


def _probes(results: Mapping[str, Examined], files: Mapping[str, str]) -> str:
    """One row for each question that our code asks at run time, and the answers."""
    packages: dict[str, list[str]] = {}
    answers: dict[tuple[str, str, str], dict[str, bool]] = {}
    examples: dict[tuple[str, str, str], Probe] = {}
    for name, result in results.items():
        for probe in result.probes:
            key = (probe.path, probe.where, probe.question)
            answers.setdefault(key, {})[name] = probe.found
            examples.setdefault(key, probe)
            packages.setdefault(_distribution(name), [])
    wheels = [name for name in results if _distribution(name) in packages]
    rows = []
    for key in sorted(answers):
        given = [answers[key].get(name) for name in wheels]
        if all(given):
            continue
        path, where, question = key
        marks = ["" if one is None else ("yes" if one else "no") for one in given]
        asked = question if question.startswith("`") else f"`{question}`"
        rows.append((asked, *marks, _purpose(files[path], examples[key]), f"`{path}`, `{where}`"))
    same = sum(all(answers[key].get(name) for name in wheels) for key in answers)
    note = f"Asked at run time. {same} more questions have the answer yes everywhere.\n"
    return _table(("is there", *wheels, "what for", "asked in"), rows) + "\n" + note


def _hooks(results: Mapping[str, Examined]) -> str:
    """Every method that the engine calls, and how often it does."""
    found: dict[tuple[str, str], dict[str, Hook]] = {}
    for name, result in results.items():
        for hook in result.hooks:
            found.setdefault((hook.owner, hook.method), {})[name] = hook
    wheels = [name for name, result in results.items() if result.hooks]
    rows = []
    for (owner, method), by_wheel in sorted(found.items()):
        calls = [_calls(by_wheel.get(name)) for name in wheels]
        rows.append((f"`{owner.rsplit('.', 1)[-1]}.{method}`", *calls))
    note = "Places that call it. `–`: the base class has no such method; 0: it has it and nobody calls it.\n"
    return _table(("hook", *wheels), rows) + "\n" + note


def _gaps(results: Iterable[Examined]) -> str:
    findings = sorted({finding for result in results for finding in result.findings})
    rows = []
    for known in KNOWN:
        covered = [one for one in findings if known.covers(one)]
        rows.append((known.wheel, _places(covered), "; ".join(one.message for one in covered), known.reason))
    return _table(("release", "where", "what", "what follows"), rows) if rows else "None.\n"


def _places(findings: Iterable[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"`{one.path}`" for one in findings))


def _calls(hook: Hook | None) -> str:
    if hook is None:
        return ""
    return str(hook.calls) if hook.defined else "–"


def _purpose(text: str, probe: Probe) -> str:
    """What the table of guarded functions says, or the line's own comment, or the docstring of who asks."""
    if reason := GUARDED.get((probe.path, probe.where)):
        return reason
    comment = text.splitlines()[probe.line - 1].partition("  # ")[2]
    if comment:
        return comment
    asking: ast.Module | ast.ClassDef | Function = ast.parse(text)
    for name in probe.where.split("."):
        for node in ast.walk(asking):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                asking = node
                break
    first = (ast.get_docstring(asking) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def _distribution(name: str) -> str:
    return name.rpartition(" ")[0]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
