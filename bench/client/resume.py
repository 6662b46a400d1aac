"""Going on with a sweep that was cut short: which of its runs are whole, and that what goes on is the same experiment.

A run that was ended early is measured again, from its first request; what it left is let go.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client.experiment import difference
from epd_serve.errors import ConfigError


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
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Earlier()
    except OSError as error:
        raise ConfigError(f"--resume: {path} cannot be read: {error.strerror}", param="--resume") from error
    try:
        found = json.loads(text)
        figures, env, rows = found["figures"], found["env"], found["rows"]
        before = env["load"]["experiment"]
        whole = [row for row in rows if not row["stopped"]]
        places = {row["run"]: row["number"] for row in whole}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--resume: {path} is no result of a sweep that could go on; name another --json FILE to begin anew",
            param="--resume",
        ) from None
    if other := difference(before, now):
        raise ConfigError(
            f"--resume: {path} is another experiment: {other}; ask for the same, or name another --json FILE",
            param="--resume",
        )
    for label, place in places.items():
        if place >= len(labels) or labels[place] != label:
            raise ConfigError(
                f"--resume: {path} has {label} as run {place + 1}, which --rate does not: its requests would be "
                "others. Give the rates in the order they had, further ones behind them",
                param="--resume",
            )
    kept = {name: value for name, value in figures.items() if name.split("/")[0] in places}
    return Earlier(kept, whole, env)


def keep_runs(path: Path, runs: Collection[str], flag: str = "--resume") -> None:
    """Leave those JSON lines of `path` that belong to these runs. It changes as a whole or not at all; none: none made.

    Raises:
        ConfigError: it cannot be read or written.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{flag}: {path} is no file that could be gone on with", param=flag)
    scratch = path.with_name(path.name + ".part")
    try:
        kept = [line for line in path.read_bytes().split(b"\n")[:-1] if _run_of(line) in runs]
        scratch.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise ConfigError(f"{flag}: {path}: {error.strerror}", param=flag) from error


def _run_of(line: bytes) -> str | None:
    """Of a line that is no row: None."""
    try:
        run = json.loads(line)["run"]
    except (ValueError, KeyError, TypeError):
        return None
    return run if isinstance(run, str) else None
