"""The head of a report: what was measured, on what, how, and what of it does not count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.report.experiment import Experiment
from bench.report.sheet import Sheet

SAID = frozenset("kind workload rates rates_are entries slos seed machine versions".split())
"""Of experiment.json, what has words of its own above."""


def facts(experiment: Experiment) -> list[tuple[str, str]]:
    """(name, value), in the order in which they are read."""
    envs = [entry.env for entry in experiment.entries if entry.env]
    machines = [env.get("machine", {}) for env in envs]
    rates = ", ".join(f"{rate:g}" for rate in experiment.rates) or "none"
    requests = sum(int(run.figure("requests_of_the_run") or 0) for _, run in experiment.all_runs())
    deployments = ", ".join(
        f"{entry.known_as}{' (baseline)' if entry.baseline else ''}" for entry in experiment.entries
    )
    found = [
        ("kind", experiment.kind),
        ("workload", experiment.workload),
        ("rates", f"{rates} req/s, {'per device' if experiment.per_device else 'in total'}"),
        ("objectives (TTFT:TPOT, ms)", ", ".join(str(slo) for slo in experiment.slos)),
        ("seed", str(experiment.asked.get("seed", "not said"))),
        ("requests sent", str(requests)),
        ("runs", f"{sum(1 for _ in experiment.all_runs())}, of which {len(experiment.invalid())} not valid"),
        ("deployments", deployments or "none"),
        ("commit", _each(map(commit, envs))),
        ("machine", _each(map(machine, machines))),
        ("load average (1 min)", _span(_loads(experiment))),
        ("measured", _span(env.get("date") for env in envs)),
        ("versions", _each(_plain(env.get("versions", {})) for env in envs)),
        ("command", _each(str(env.get("command", "")) for env in envs)),
    ]
    found += [(name, _plain(value)) for name, value in experiment.asked.items() if name not in SAID]
    return [(name, value) for name, value in found if value]


def commit(env: Mapping[str, Any]) -> str:
    """Of a result's environment, with a word on what was not committed; "" where it is not known."""
    if not env.get("commit"):
        return ""
    return f"{env['commit']}{' with changes' if env.get('uncommitted_changes') else ''}"


def machine(found: Mapping[str, Any]) -> str:
    """In words; "" where it is not known."""
    if not found:
        return ""
    return f"{found.get('cpu', 'unknown')}, {found.get('cores', '?')} cores, {found.get('arch', 'unknown')}"


def deployed(experiment: Experiment) -> Sheet:
    """Every entry with what it was served by."""
    rows = tuple(
        (
            entry.name,
            entry.layout,
            entry.devices,
            entry.baseline,
            entry.ready_s,
            len(entry.runs),
            sum(not run.valid for run in entry.runs),
            " ".join(entry.flags),
        )
        for entry in experiment.entries
    )
    columns = ("deployment", "layout", "devices", "baseline", "ready after (s)", "runs", "of them not valid", "flags")
    return Sheet("deployments", "Deployments", columns, rows)


def problems(experiment: Experiment) -> list[str]:
    """What a reader has to know before any figure: what is missing, what is not valid."""
    found = list(experiment.problems)
    for entry in experiment.entries:
        if entry.env.get("entry", {}).get("devices_share_cores"):
            found.append(f"{entry.name}: its {entry.devices} devices share cores, and are no {entry.devices} devices")
    for entry, run in experiment.invalid():
        found.append(f"{entry.name}, {run.label}: not valid: {'; '.join(run.objections) or 'no reason given'}")
    for entry, run in experiment.all_runs():
        if run.valid and run.grows:
            found.append(f"{entry.name}, {run.label}: no steady state: {run.grows}")
    return found


def _loads(experiment: Experiment) -> list[Any]:
    """Whenever it was looked at: before each entry, and where runs say it, before each run."""
    before = [entry.env.get("machine", {}).get("load_average_1min") for entry in experiment.entries]
    return [*before, *(run.figure("load_average_1min") for _, run in experiment.all_runs())]


def _each(values: Iterable[str]) -> str:
    """Different ones, each once."""
    return "; ".join(filter(None, dict.fromkeys(values)))


def _span(values: Iterable[Any]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(one) for one in value)
    return "" if value is None else str(value)
