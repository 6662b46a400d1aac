"""What measurements of real stages share: the `bench` preset, enough memory for it, requests in a closed loop, and one
stage of a layout started alone, wired as in the layout, which the layout's time to ready is held against.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.served import scratch
from deploy.agent.health import health_status
from deploy.agent.specs import orders
from deploy.agent.stage_life import Spawn, StageLife
from deploy.agent.template import stage_starts
from deploy.agent.wiring import Site, wire
from deploy.host.environment import stage_environment
from deploy.host.rundir import RunDir
from deploy.keeper.in_process import InProcess
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from epd_serve.demo.presets import write_preset
from epd_serve.errors import ConfigError, StageError
from epd_serve.placement import InstancePlan
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties
from store.arena import Arena

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


def seconds_of(records: Sequence[RequestRecord]) -> float:
    """From the first request to the last answer."""
    return max(one.ended_s for one in records) - min(one.due_s for one in records)


def tpot_s(record: RequestRecord, tokens: int) -> float:
    """(end - first byte) / (tokens - 1); vLLM's role comes with the first token."""
    assert record.first_byte_s is not None, "a whole answer"
    return (record.ended_s - record.first_byte_s) / (tokens - 1)


POLL_S = 0.2  # as the supervisor
START_S = 600.0
STOP_S = 8.0


def seconds_to_ready(blueprint: Blueprint, plan: InstancePlan) -> float:
    """Seconds until the first 200 on /health of a stage that is started as a launch of the blueprint would start it, by
    a template of its own where that has one. Everything it made is gone on return.

    Raises:
        StageError: it ended, or took longer than `START_S`; with the reason from its log.
    """
    with scratch() as folder, contextlib.ExitStack() as stack:
        run = RunDir.create(folder / "run")
        stack.callback(run.remove)
        config = blueprint.config
        if blueprint.features_travel:
            stack.callback(Arena.create(str(run.arena), capacity_bytes=config.arena_mib << 20).close)
        order = next(one for one in orders(blueprint) if one.id == plan.id)
        site = Site(run, config.kv_staging_mib << 20)
        stage = wire(order, site, 0, os.urandom(6).hex())
        command = command_of(stage)
        spawn = Spawn(command.argv, stage_environment(command.env, run.path, blueprint.device), plan.id)
        return asyncio.run(_start(blueprint, spawn, run, plan.id, stage.url))


async def _start(blueprint: Blueprint, spawn: Spawn, run: RunDir, instance: str, url: str) -> float:
    begun, config = time.monotonic(), blueprint.config
    log = run.log("template")
    setting, device, keeper = config.stage_template, blueprint.device, InProcess()
    async with stage_starts(setting, device, spawn, blueprint.model, log, print, keeper) as start:
        return await _ready(begun, await StageLife.begin(spawn, run.log(instance), start), run, instance, url)


async def _ready(begun: float, process: StageLife, run: RunDir, instance: str, url: str) -> float:
    run.record_group(instance, process.pid)
    try:
        while process.exit_code is None and time.monotonic() < begun + START_S:
            with contextlib.suppress(TimeoutError):
                if await health_status(url, timeout_s=5.0) == 200:
                    return time.monotonic() - begun
            await asyncio.sleep(POLL_S)
        raise StageError(f"{instance} alone did not become ready: {process.failure_reason()}", stage=instance)
    finally:
        await process.stop(STOP_S)
