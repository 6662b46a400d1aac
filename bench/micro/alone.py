"""One stage of a layout started alone, wired as in the layout: what the layout's time to ready is held against.

Uses the launcher's own parts, without supervisor and proxy. Its peers are absent, which no stage waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from bench.served import scratch
from deploy.agent.health import health_status
from deploy.agent.specs import orders
from deploy.agent.stage_life import Spawn, StageLife
from deploy.agent.template import stage_starts
from deploy.agent.wiring import STAGE_HOST, Site, wire
from deploy.host.environment import stage_environment
from deploy.host.ports import free_ports
from deploy.host.rundir import RunDir
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from epd_serve.errors import StageError
from epd_serve.placement import InstancePlan
from store.arena import Arena

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
        (port,) = free_ports(1)
        if blueprint.features_travel:
            stack.callback(Arena.create(str(run.arena), capacity_bytes=config.arena_mib << 20).close)
        order = next(one for one in orders(blueprint) if one.id == plan.id)
        site = Site(run, config.kv_staging_mib << 20)
        stage = wire(order, site, port, os.urandom(6).hex())
        command = command_of(stage)
        spawn = Spawn(command.argv, stage_environment(command.env, run.path, blueprint.device))
        return asyncio.run(_start(blueprint, spawn, run, plan.id, stage.port))


async def _start(blueprint: Blueprint, spawn: Spawn, run: RunDir, instance: str, port: int) -> float:
    begun, config = time.monotonic(), blueprint.config
    log = run.log("template")
    async with stage_starts(config.stage_template, blueprint.device, spawn, blueprint.model, log, print) as start:
        return await _ready(begun, await StageLife.begin(spawn, run.log(instance), start), run, instance, port)


async def _ready(begun: float, process: StageLife, run: RunDir, instance: str, port: int) -> float:
    run.record_group(instance, process.pid)
    try:
        while process.exit_code is None and time.monotonic() < begun + START_S:
            with contextlib.suppress(TimeoutError):
                if await health_status(STAGE_HOST, port, timeout_s=5.0) == 200:
                    return time.monotonic() - begun
            await asyncio.sleep(POLL_S)
        raise StageError(f"{instance} alone did not become ready: {process.failure_reason()}", stage=instance)
    finally:
        await process.stop(STOP_S)
