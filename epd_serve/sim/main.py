"""The process of one simulated stage: flags, event loop, signals. Quick to start; imports neither torch nor vLLM."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from msgspec.structs import replace

from epd_serve import garbage
from epd_serve.budgets import Budgets
from epd_serve.errors import ConfigError
from epd_serve.lifeline import die_with_parent
from epd_serve.roles import Role
from epd_serve.sim.engine import Engine
from epd_serve.sim.faults import SimFaults, fault_of
from epd_serve.sim.http import Connection
from epd_serve.sim.profile import Profile, read_profile
from epd_serve.sim.request_lifecycle import RequestLifecycle
from epd_serve.sim.stage import Stage
from epd_serve.stage_flags import WITHOUT_ENCODER
from epd_serve.stage_plan import LAUNCHER_ENV
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring
from store.addresses import authority

DRAIN_S = 5.0
DRAIN_LOOK_S = 0.02
BACKLOG = 2048
KEY_ENV = "VLLM_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; requests in flight may then go on for `DRAIN_S`."""
    arguments = parsed(argv)
    if launcher := os.environ.get(LAUNCHER_ENV):
        die_with_parent(int(launcher))
    try:
        profile = profile_of(arguments)
        wiring = _wiring(arguments)
        time.sleep(profile.start_s.get(wiring.role, 0.0))  # as long nobody can connect, and a signal ends it
        with _bind(arguments.host, arguments.port, arguments.uds) as listening:
            _run(_serve(arguments, wiring, profile, listening))
    except ConfigError as error:
        sys.stderr.write(f"epd-sim: error: {error}\n")
        return 2
    return 0


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags. Ends the process where they cannot be read, as argparse does."""
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epd_serve.sim",
        description="a simulated stage (see docs/guides/simulation.md)",
        allow_abbrev=False,
    )
    parser.add_argument("--role", choices=[role.value for role in Role], help="default: of --wiring, or PD")
    parser.add_argument("--instance", default="", help="name (default: role and 0)")
    parser.add_argument("--wiring", default="", help="StageWiring as JSON, for a stage with peers")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--uds", default="", metavar="PATH", help="a Unix socket instead")
    parser.add_argument("--profile", default="", metavar="FILE", help="latencies and capacity (JSON)")
    parser.add_argument(WITHOUT_ENCODER, dest="encoder_free", action="store_true", help="take metadata, and no media")
    parser.add_argument("--guarded", action="store_true", help=f"want the bearer token of {KEY_ENV}")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="NAME=VALUE", help="see epd_serve/sim/faults.py"
    )
    capacity = parser.add_argument_group("as vLLM calls them; over the profile's")
    capacity.add_argument("--max-num-seqs", dest="max_running", type=int)
    capacity.add_argument("--max-num-batched-tokens", dest="step_tokens", type=int)
    capacity.add_argument("--max-model-len", dest="max_model_len", type=int)
    capacity.add_argument("--block-size", dest="block_tokens", type=int)
    capacity.add_argument("--tensor-parallel-size", type=int, default=1)
    capacity.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    capacity.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    return parser


def profile_of(arguments: argparse.Namespace) -> Profile:
    """The file's, with the flags' capacities. Raises ConfigError."""
    profile = read_profile(arguments.profile)
    given = {
        name: getattr(arguments, name)
        for name in ("max_running", "step_tokens", "max_model_len", "block_tokens")
        if getattr(arguments, name) is not None
    }
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1", param=name)
    return replace(profile, capacity=replace(profile.capacity, **given))


def _wiring(arguments: argparse.Namespace) -> StageWiring:
    if not arguments.wiring:
        role = Role(arguments.role or Role.PD)
        return StageWiring(instance=arguments.instance or f"{role}0", role=role, incarnation="alone")
    try:
        return StageWiring.from_json(json.loads(arguments.wiring))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--wiring is not a stage's wiring: {error}", param="--wiring") from error


def budgets_of(wiring: StageWiring, profile: Profile) -> Budgets | None:
    """None where the stage is held to no SLO."""
    if not wiring.slo_ttft_s:
        return None
    most_tokens, most_items = profile.capacity.step_tokens, profile.capacity.encoder_tokens
    prefills = wiring.role.has_language_model
    return Budgets(
        wiring.slo_ttft_s, wiring.slo_tpot_s, most_tokens=most_tokens, most_items=most_items, prefills=prefills
    )


def _bind(host: str, port: int, path: str) -> socket.socket:
    try:
        if path:
            return socket.create_server(path, family=socket.AF_UNIX, backlog=BACKLOG)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        where = f"--uds {path}" if path else f"--host {host} --port {port}"
        raise ConfigError(f"{where}: cannot listen there ({error})", param="--port") from error


def _run(serving: object) -> None:
    assert asyncio.iscoroutine(serving)
    try:
        import uvloop
    except ImportError:
        garbage.freeze_gc()
        asyncio.run(serving)
    else:
        uvloop.run(serving)


async def _serve(
    arguments: argparse.Namespace, wiring: StageWiring, profile: Profile, listening: socket.socket
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = Engine(
        profile,
        wiring.instance,
        priorities=arguments.scheduling_policy == "priority",
        shares_steps=wiring.role.sends_kv,
        budgets=budgets_of(wiring, profile),
        trace=Trace(wiring.trace_path, wiring.instance) if wiring.trace_path else None,
    )
    key = os.environ.get(KEY_ENV, "") if arguments.guarded else ""
    if arguments.guarded and not key:
        raise ConfigError(f"--guarded needs {KEY_ENV} in the environment", param="--guarded")
    faults = SimFaults(lambda state: setattr(engine, "slowness", state.slow))
    for text in arguments.fault:
        faults.change(fault_of(text))
    ranks, caching = arguments.tensor_parallel_size, arguments.enable_prefix_caching
    lifecycle = RequestLifecycle(wiring, engine, faults, ranks=ranks, caching=caching)
    lifecycle.start()
    model = arguments.served_model_name or arguments.model
    takes_media = not arguments.encoder_free
    stage = Stage(engine, lifecycle, faults, model=model, model_path=arguments.model, key=key, takes_media=takes_media)
    connections: set[Connection] = set()
    running = asyncio.create_task(engine.run(), name="engine")
    server = await loop.create_server(lambda: Connection(stage.handle, connections), sock=listening)
    where = arguments.uds or authority(*listening.getsockname()[:2])
    sys.stderr.write(f"simulated {wiring.role} {wiring.instance} on {where}\n")
    try:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        server.close()
        await _drained(connections)
    finally:
        running.cancel()
        for connection in list(connections):
            connection.abort()
        lifecycle.close()


async def _drained(connections: set[Connection]) -> None:
    """Wait for answers under way, `DRAIN_S` at most."""
    for _ in range(round(DRAIN_S / DRAIN_LOOK_S)):
        if not any(one.busy for one in connections):
            return
        await asyncio.sleep(DRAIN_LOOK_S)
