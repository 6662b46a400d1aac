"""`epd-serve stage --join URL`: one stage of a cluster, in the foreground, until a signal.

Order: flags and ports → the head's settings → run directory and arena of this machine's own → the vLLM server under
the supervisor, which restarts it under new incarnations; beats tell the head what is up. A head that goes away changes
nothing here: requests that others forward are served, beats go on with back-off, and a head that has forgotten this
stage is joined again. The way back: leave (the head drains), stop the server, remove everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.agent.second_tier import record_pool
from deploy.agent.stage_life import Spawn
from deploy.agent.supervisor import StageSpec, Supervisor
from deploy.agent.template import stage_starts
from deploy.agent.waits import Patience
from deploy.alone.stage import device_list
from deploy.cluster.join_client import HeadClient, check_head_url
from deploy.cluster.join_member import Member
from deploy.cluster.join_plan import JoinPlan, address_of, check_passed
from deploy.host.environment import is_terminal, shm_root, stage_environment
from deploy.host.ports import listen
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.keeper.in_process import InProcess
from deploy.launch.screen import Screen
from deploy.memory.check import OneStage
from deploy.memory.shared_memory import RESERVE_MIB, free_mib
from deploy.options.config import DeployConfig, check_segment
from deploy.options.engines import command_of
from deploy.options.mm_store import what_is_missing
from deploy.plan.blueprint import draw
from deploy.plan.core_plan import joined_order
from epd_serve.cluster import MAX_DRAIN_S, NAME, JoinAnswer
from epd_serve.engine.stage_guard import KEY_ENV
from epd_serve.errors import ConfigError, StageError
from epd_serve.key_files import read_cluster_key, stage_key
from epd_serve.peers import write_peers
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan
from npu_ops.core_grants import read_grants
from proxy.background import Background


def run_joined(
    *,
    join: str,
    cluster_key_file: str,
    model: str,
    role: str | None,
    instance: str,
    host: str,
    port: int,
    device: str,
    device_ids: str,
    arena_mib: int,
    mooncake_segment_mib: int,
    drain_s: float,
    run_root: str,
    kv_faults: str,
    startup_timeout_s: float,
    core_share: str,
    stage_template: str,
    passed: Sequence[str],
    engine: str = "vllm",
    sim_profile: str = "",
) -> int:
    """Serve as a member of the cluster at `join` until SIGINT or SIGTERM.

    Raises:
        ConfigError: what is wrong with the flags. JoinRefusedError: what differs from the cluster.
        StageError: the vLLM server does not start.
    """
    if role is None:
        raise ConfigError("--join needs --role E, P, D, PD, EP or EPD", param="--role")
    check_head_url(join)
    check_passed(passed)
    _check_flags(role, instance, mooncake_segment_mib, drain_s)
    key = read_cluster_key(cluster_key_file)
    ids = device_list(device_ids)
    tp = max(1, len(ids))
    config = DeployConfig(
        model=model,
        layout=f"TP{tp}",
        device=device,
        arena_mib=arena_mib,
        startup_timeout_s=startup_timeout_s,
        stage_template=stage_template,
        kv_faults=kv_faults,
        engine=engine,
        sim_profile=sim_profile,
    )
    blueprint = draw(config, stage=OneStage(Role(role), ids, tuple(passed)))
    if ids and blueprint.device != "cpu":  # virtual devices have no numbers of their own
        placed = replace(blueprint.plans[0], devices=ids)
        blueprint = replace(blueprint, plans=(placed,))
    crosses = Role(role) is not Role.EPD and engine != "sim"
    if crosses and (missing := what_is_missing(blueprint.device, master=False)):
        raise ConfigError(f"features and KV cross hosts by Mooncake: {missing}", param="--join")
    core_order, warnings = joined_order(core_share, blueprint.device, simulated=engine == "sim")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    plan = JoinPlan(
        blueprint,
        Role(role),
        address_of(host, "--host"),
        port,
        instance,
        arena_mib,
        mooncake_segment_mib,
        tuple(passed),
        core_order,
    )
    return serve_joined(plan, join, key, drain_s=drain_s, root=Path(run_root) if run_root else None)


def _check_flags(role: str, instance: str, segment_mib: int, drain_s: float) -> None:
    """What would otherwise be found out after this stage's memory is there, or never."""
    if Role(role) is Role.ED:
        raise ConfigError("--role ED: vLLM has no encode-only path in it; run E and D apart", param="--role")
    if instance and not NAME.fullmatch(instance):
        raise ConfigError(f"--instance {instance!r} is not letters, digits, '.', '_' and '-'", param="--instance")
    check_segment(segment_mib)
    if not 0 <= drain_s <= MAX_DRAIN_S:
        raise ConfigError(f"--drain-s {drain_s:g} is not between 0 and {MAX_DRAIN_S:g}", param="--drain-s")


def serve_joined(
    plan: JoinPlan,
    head_url: str,
    cluster_key: str,
    *,
    drain_s: float = 30.0,
    root: Path | None = None,
    command_of: Callable[[StagePlan], StageCommand] = command_of,
    patience: Patience | None = None,
) -> int:
    """The part of `run_joined` after the flags. Tests put a stand-in for vLLM into `command_of`."""
    for number in plan.ports:
        listen(plan.host, number).close()
    screen = Screen(sys.stderr, terminal=is_terminal())
    for launch_id in reap_dead(root):
        screen.line(f"cleaned up after launch {launch_id}, which was killed")
    with contextlib.ExitStack() as stack:
        run = RunDir.create(root)
        stack.callback(run.remove)
        stack.enter_context(_arena(plan, run))
        patience = patience or Patience(start_s=plan.blueprint.config.startup_timeout_s)
        stage = _JoinedStage(plan, run, screen, patience, command_of)
        return asyncio.run(stage.serve(head_url, cluster_key, drain_s))


@contextlib.contextmanager
def _arena(plan: JoinPlan, run: RunDir) -> Iterator[None]:
    """This machine's arena for this stage, where features concern it."""
    if not plan.featured:
        yield
        return
    from store.arena import Arena

    free = free_mib(shm_root())
    if plan.arena_mib + RESERVE_MIB > free:
        raise ConfigError(
            f"/dev/shm has {free} MiB free; --arena-mib {plan.arena_mib} does not fit", param="--arena-mib"
        )
    arena = Arena.create(str(run.arena), capacity_bytes=plan.arena_mib << 20)
    try:
        yield
    finally:
        arena.close()


class _JoinedStage:
    """The life of one agent in its event loop; what the supervisor reports to (`StageEvents`)."""

    def __init__(
        self,
        plan: JoinPlan,
        run: RunDir,
        screen: Screen,
        patience: Patience,
        command_of: Callable[[StagePlan], StageCommand],
    ) -> None:
        self._plan = plan
        self._run = run
        self._screen = screen
        self._patience = patience
        self._command_of = command_of
        self._supervisor: Supervisor | None = None
        self._spawned_with: JoinAnswer | None = None
        self._stop = asyncio.Event()
        self._was_up = False

    async def serve(self, head_url: str, cluster_key: str, drain_s: float) -> int:
        """Until a signal; 0 after one."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with HeadClient(head_url, cluster_key) as head:
            self._member = Member(self._plan, head, self._screen.line)
            joining = asyncio.create_task(self._member.join())
            await self._first_of(joining)
            if not joining.done():
                joining.cancel()
                return 0
            joining.result()
            record_pool(self._run, self._member.answer.settings.mooncake_master, "")
            await self._run_stage(stage_key(cluster_key), drain_s)
        return 0

    async def _run_stage(self, key: str, drain_s: float) -> None:
        """`key`: what the stage's server wants to hear. The name of the first join stays that of log and screen."""
        name, plan = self._member.answer.id, self._plan
        spec = StageSpec(name, plan.host, plan.port, self._run.log(name), lambda life: self._spawn(key, life))
        config = plan.blueprint.config
        starts = stage_starts(
            config.stage_template,
            plan.blueprint.device,
            self._spawn(key, ""),
            plan.blueprint.model,
            self._run.log("template"),
            self._screen.line,
            InProcess(),
        )
        async with starts as start:
            supervisor = self._supervisor = Supervisor(self, self._patience, start=start)
            try:
                await self._until_stopped(supervisor, spec, drain_s)
            finally:
                await supervisor.close()

    async def _until_stopped(self, supervisor: Supervisor, spec: StageSpec, drain_s: float) -> None:
        name = spec.id
        self._screen.open([name])
        supervisor.add(spec)
        answered = asyncio.create_task(supervisor.answered(name), name="stage")
        background = Background()
        background.start("beats", lambda: self._member.beat_for_ever(self._follow_head))
        try:
            await self._first_of(answered)
            if answered.done():
                answered.result()
                await self._stop.wait()
        except StageError as error:
            drain_s = 0.0
            raise StageError(f"{error}; its log: {self._run.keep_log(name)}", stage=name) from None
        finally:
            await background.stop()
            self._screen.close()
            self._screen.line("leaving" if self._stop.is_set() else "giving up")
            await self._member.leave(drain_s)
            answered.cancel()

    async def _first_of(self, *tasks: asyncio.Task[None]) -> None:
        """Until one of the tasks ends, or a signal."""
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    def _follow_head(self) -> None:
        """Restart a server that was wired with another name or other addresses than the head says now."""
        was, now = self._spawned_with, self._member.answer
        if was is None or (was.id, was.settings) == (now.id, now.settings):
            return
        assert self._supervisor is not None, "beats begin with it"
        if self._was_up:  # a first start that is interrupted would count as a failed one
            self._screen.line("the head has other settings now: restarting the stage with them")
            self._spawned_with = None
            self._supervisor.kill_now()

    def _spawn(self, key: str, incarnation: str) -> Spawn:
        self._spawned_with = self._member.answer
        write_peers(self._run.peers, self._plan.peers(self._member.answer))
        made = self._command_of(self._plan.stage(self._member.answer, self._run, incarnation))
        env = stage_environment(made.env, self._run.path, self._plan.blueprint.device)
        return Spawn(made.argv, {**env, KEY_ENV: key})

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def before_spawn(self, stage: str, incarnation: str) -> None:
        self._run.clear_instance(stage)
        self._member.tell(incarnation, False, "starting")

    def spawned(self, stage: str, pid: int) -> None:
        self._run.record_group(stage, pid)
        self._screen.started(stage)

    def phase(self, stage: str, phase: str) -> None:
        self._screen.phase(stage, phase)

    def up(self, stage: str, incarnation: str, seconds: float) -> None:
        self._was_up = True
        self._member.tell(incarnation, True, "")
        self._screen.up(stage, seconds)
        if self._plan.core_order is not None:
            grants = read_grants(self._run.grant_template(self._member.answer.id), self._plan.tp)
            got = (
                "; ".join(dict.fromkeys(grant.summary() for grant in grants)) or "its workers do not say what they got"
            )
            self._screen.line(f"[{stage}] core share {self._plan.core_order.share:g}: {got}")

    def down(self, stage: str, incarnation: str, reason: str, retry_in_s: float | None) -> None:
        self._member.tell(incarnation, False, reason)
        if retry_in_s is not None:
            self._screen.down(stage, reason, retry_in_s)

    def over(self, stage: str, reason: str) -> None:
        """Whoever waits for its first answer is told."""

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        # The second one: no more waiting.
        if self._supervisor is not None:
            self._supervisor.kill_now()
        self._run.remove()
        os._exit(130)
