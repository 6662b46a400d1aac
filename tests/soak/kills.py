"""What clients notice while parts of a deployment are killed (`bench/change/kills.py`), every ten seconds."""

from __future__ import annotations

import argparse

from bench.change.command import KILL_S, figures
from bench.change.kills import kills_real, kills_simulated
from bench.micro.measurement import Goal
from tests.soak.harness import Result, Soak

PER_S = 16.0


def measure(arguments: argparse.Namespace) -> Result:
    """Of simulated stages; with `--real` of real ones too."""
    rows = list(kills_simulated(60.0 if arguments.quick else 300.0, PER_S))
    if arguments.real:
        count = 3 if arguments.quick else 10
        rows += kills_real(KILL_S * count, count)
    return figures(rows), rows, "\n".join(f"{row['at']:8.1f} s  {row['kill']}" for row in rows if "kill" in row)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="of real stages too, which takes minutes more")


SOAK = Soak(
    "kills",
    "clients' errors while a stage, a front door, the controller or the agent is killed every ten seconds",
    measure,
    (
        Goal("kills_client_errors", "==", 0.0, "but for connections of a killed front door and streams of a killed D"),
        Goal("kills_held", "==", 0.0, "no load leaks, whatever the ending"),
    ),
    flags=_flags,
)


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
