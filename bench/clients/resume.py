"""Going on with a sweep that was cut short: which of its runs are whole, and that what goes on is the same experiment.

A run that was ended early is measured again, from its first request; what it left is let go. What makes an experiment
is whatever changes the requests, when they are due, or how they are judged: where results go, which address serves, and
how many runs there are does not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clients.measure import Plan
from epd_serve.errors import ConfigError

FLAGS = (
    "workload reuse zipf pictures_each output_tokens seed same arrivals concurrency n timeout cancel min_samples "
    "late_ms kind"
).split()
FILES = ("bodies", "prompts", "tokenizer")


def experiment(arguments: argparse.Namespace, plan: Plan, model: str) -> dict[str, Any]:
    """What a load measures, by flag (`--warm-up` is `warm_up`). Files count by name and content, folders by name."""
    return {
        **{name: getattr(arguments, name) for name in FLAGS},
        **{name: None if (path := getattr(arguments, name)) is None else _file(path) for name in FILES},
        "model": model,
        "duration": plan.seconds,
        "warm_up": plan.warm_up_s,
        "slo": [str(slo) for slo in plan.slos],
        "devices": plan.devices,
    }


def _file(path: Path) -> str:
    if not path.is_file():
        return path.name
    return f"{path.name} ({hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()})"


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field that differs, as `--flag was A, is B`; "" where they are the same experiment."""

    def shown(value: Any) -> str:
        return "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)

    for name in dict.fromkeys([*now, *before]):
        if before.get(name) != now.get(name):
            return f"--{name.replace('_', '-')} was {shown(before.get(name))}, is {shown(now.get(name))}"
    return ""


@dataclass(frozen=True)
class Earlier:
    """What an earlier sweep has left that counts.

    Attributes:
        figures, rows: of its whole runs, as in the result.
        env: under which they were measured; {} where there was nothing yet.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> set[str]:
        return {row["run"] for row in self.rows}


def read_earlier(path: Path, now: Mapping[str, Any], labels: Sequence[str]) -> Earlier:
    """The whole runs of the result at `path`; none where there is no such file.

    Args:
        now: the experiment that is asked for now. labels: of its runs, in order.

    Raises:
        ConfigError: it is no result of a load, or of another experiment; names what differs.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        env, whole = result["env"], [row for row in result["rows"] if not row["stopped"]]
        other = difference(env["load"]["experiment"], now)
        places = {row["run"]: row["number"] for row in whole}
        kept = {name: value for name, value in result["figures"].items() if name.split("/")[0] in places}
    except FileNotFoundError:
        return Earlier()
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        why = "is no result of a sweep that could go on; name another --json FILE to begin anew"
        raise _refused(path, why) from None
    if other:
        raise _refused(path, f"is another experiment: {other}; ask for the same, or name another --json FILE")
    for label, place in places.items():
        if labels[place : place + 1] != [label]:
            why = f"has {label} as run {place + 1}, which --rate does not: its requests would be others. Give the rates"
            raise _refused(path, f"{why} in the order they had, further ones behind them")
    return Earlier(kept, whole, env)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--resume: {path} {why}", param="--resume")


def keep_runs(path: Path, runs: Collection[str], flag: str = "--resume") -> None:
    """Leave those JSON lines of `path` that belong to these runs. It changes as a whole or not at all; none: none made.

    Raises:
        ConfigError: it cannot be read or written.
    """
    if not path.exists():
        return
    scratch = path.with_name(path.name + ".part")
    try:
        kept = [line for line in path.read_bytes().split(b"\n")[:-1] if _run_of(line) in runs]
        scratch.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise ConfigError(f"{flag}: {path}: {error.strerror}", param=flag) from error


def _run_of(line: bytes) -> object:
    """Of a line that is no row: None."""
    try:
        return json.loads(line)["run"]
    except (ValueError, KeyError, TypeError):
        return None
