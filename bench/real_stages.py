"""What measurements of real stages share: the `bench` preset, enough memory for it, requests in a closed loop."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from epd_serve.demo.presets import write_preset
from epd_serve.errors import ConfigError, StageError
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties

PRESET = "bench"
"""Random weights, an 8B model's proportions."""
STAGE_BYTES = 2_500_000_000
"""Free memory per stage of the preset: its processes, KV cache and share of the arena."""
LIMIT_S = 300.0


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="sim: to try the flow, no measurement"
    )
    parser.add_argument("--sim-profile", help="with --engine sim: the profile of the simulated stages")


def engine_flags(arguments: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """What every launch gets: the model, or the simulation."""
    if arguments.engine == "sim":
        return ("--engine", "sim", *(("--sim-profile", arguments.sim_profile) if arguments.sim_profile else ()))
    write_preset(folder / PRESET, PRESET)
    return (str(folder / PRESET),)


def kind_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What `env` says of the run."""
    return {
        "kind": f"real: CPU, {PRESET} preset" if arguments.engine == "vllm" else "simulated stages: to try the flow"
    }


def check_memory(stages: int) -> None:
    """Raises ConfigError where so many stages at a time do not fit into what is free."""
    free = read_properties(DeviceInventory("cpu"))[0].free_bytes
    if free is not None and free < stages * STAGE_BYTES:
        raise ConfigError(
            f"{stages} stages are up at a time, which takes {stages * STAGE_BYTES / 1e9:.0f} GB of memory, and "
            f"{free / 1e9:.0f} are free: end something, or measure a part with --only",
            param="--only",
        )


def closed_loop(
    sender: SenderProcess, url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int, *, decode: bool = False
) -> list[RequestRecord]:
    """Send all bodies, so many at a time; their records, with the time of every token where they are to be decoded.

    Raises:
        StageError: an answer was not whole: fewer requests are another measurement.
    """
    flow = Flow(requests(bodies), concurrency=concurrency, count=len(bodies))
    records = sender.run(url, flow, within_s=LIMIT_S, limit_s=LIMIT_S, decode=decode).rows
    if bad := [one for one in records if not one.ok]:
        first = f"{bad[0].fault}: {bad[0].error}"
        raise StageError(f"{url}: {len(bad)} of {len(records)} answers are not good, the first: {first}", stage=url)
    return records
