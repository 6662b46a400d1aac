"""`epd-serve proxy --cluster-key-file F`: the head of a cluster, in the foreground, until a signal.

One process on one machine: the OpenAI endpoint, the admin listener, which stages join by, the event bus, and (as a
child, under supervision) Mooncake's master. All ports follow from two numbers, so that a head that is started again has
them again and no stage has to be told: the proxy's, and `--cluster-port` C (default: the proxy's plus ten):

    C      events in: stages that announce connect here       C + 2  mooncake_master, for the stages
    C + 1  events out: stages that listen connect here        C + 3  mooncake_master's /health and /metrics
    C + 4  the admin listener: stages join here (unless --admin-port says otherwise)

The head keeps no state that matters. Started again, it learns of its members by their next beats.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.agent.pool_master import PoolMaster, mooncake_command
from deploy.agent.second_tier import SecondTier
from deploy.cluster.bus import EventBus
from deploy.cluster.front import Front
from deploy.cluster.join_plan import address_of, processing_text
from deploy.host import event_loop
from deploy.host.ending import Ending
from deploy.host.environment import is_terminal
from deploy.host.ports import listen
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.keeper.in_process import InProcess
from deploy.launch.admin import Admin, open_admin
from deploy.launch.screen import Screen
from deploy.options.addresses import host_and_port
from deploy.options.config import DeployConfig, check_admin_port
from deploy.options.mm_store import what_is_missing
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.proxy_settings import build_proxy_settings
from epd_serve import __version__
from epd_serve.cluster import ClusterSettings
from epd_serve.errors import ConfigError
from epd_serve.key_files import admin_key, admin_key_command, read_cluster_key, stage_key
from epd_serve.sockets import PLAIN
from store.mooncake.master import MasterSettings

if TYPE_CHECKING:
    from proxy.cluster.membership import Membership
    from proxy.config.settings import ProxySettings

SILENCE_EVERY_S = 0.5
BUS_EVERY_S = 0.5
GRACE_S = 2.0
"""How long requests in flight may go on after the signal."""

AUTO, NONE = "auto", "none"
ADMIN = 4
"""The admin listener's port, from the first of the cluster's ports on."""


@dataclass(frozen=True)
class Head:
    """A head, checked but for its ports.

    Attributes:
        blueprint: the model and the proxy's settings, drawn as a monolith's: the members make the layout.
        address: IPv4 address that the stages reach this machine at. port: first of five (see the module).
        master: `auto` (run one), `none`, or host:port of one that runs already.
        passed: the vLLM flags that all stages are started with, as far as they change what a feature is.
    """

    blueprint: Blueprint
    key: str
    address: str
    port: int
    master: str
    passed: tuple[str, ...]

    @property
    def settings(self) -> ClusterSettings:
        """What the members are told."""
        config = self.blueprint.config
        own = f"{self.address}:{self.port + 2}"
        return ClusterSettings(
            served_model=self.blueprint.served_model_name,
            events_publish=f"tcp://{self.address}:{self.port}",
            events_listen=f"tcp://{self.address}:{self.port + 1}",
            mooncake_master={AUTO: own, NONE: ""}.get(self.master, self.master),
            mooncake_protocol=config.mooncake_protocol,
            kv_grouping=config.kv_grouping,
            kv_packet_floor_kib=config.kv_packet_floor_kib,
            recompute_limit=config.recompute_limit,
            feature_path=config.feature_path if config.feature_path == "host" else "auto",
        )

    @property
    def proxy_settings(self) -> ProxySettings:
        """Without a layout, arena or devices of its own: what the stages take, they say."""
        facts = self.blueprint.facts
        return replace(
            build_proxy_settings(self.blueprint),
            vllm_version="",
            modalities=facts.towers if facts else None,
            stage_key=stage_key(self.key),
            key_file=PLAIN,
        )

    def second_tier(self, run: RunDir, tell: Callable[[str], None]) -> SecondTier:
        """On fixed ports: the stages keep looking for the master where it was."""
        if self.master != AUTO:
            return SecondTier(run, InProcess(), tell, address=self.settings.mooncake_master)
        ports = MasterSettings(host=self.address, rpc_port=self.port + 2, metrics_port=self.port + 3)
        master = PoolMaster(ports, run, mooncake_command)
        return SecondTier(run, InProcess(), tell, master, master.address)


def run_head(
    *,
    model: str,
    cluster_key_file: str,
    cluster_host: str,
    cluster_port: int,
    mooncake_master: str,
    host: str,
    port: int,
    admin_port: int = 0,
    admin_host: str = "",
    admin_key_file: str = "",
    passed: Sequence[str],
    **options: Any,
) -> int:
    """Serve until a signal (`deploy/host/ending.py`). `options`: further fields of `DeployConfig`.

    Raises:
        ConfigError: what is wrong with the flags, or a port in use. StageError: mooncake_master does not start.
    """
    config = DeployConfig(
        model=model,
        layout="TP1",
        device="cpu",  # the head computes nothing; what the stages run on is compared when they join
        host=host,
        port=port,
        stage_args=(f"all:{shlex.join(passed)}",) if passed else (),
        **options,
    )
    if mooncake_master not in (AUTO, NONE):
        host_and_port(mooncake_master)
    missing = what_is_missing("cpu", master=True) if mooncake_master == AUTO else ""
    if missing:
        raise ConfigError(
            f"the feature store needs a master: {missing}. Without features between hosts: --mooncake-master none",
            param="--mooncake-master",
        )
    address = address_of(cluster_host or host, "--cluster-host")
    key = read_cluster_key(cluster_key_file)
    first = cluster_port or port + 10
    _check_ports(first, port)
    door = admin_port or first + ADMIN
    check_admin_port(door, port)
    head = Head(draw(config, starts_stages=False), key, address, first, mooncake_master, tuple(passed))
    root = Path(config.run_root) if config.run_root else None
    settings = head.proxy_settings  # what is wrong with `--proxy` is said before anything starts
    screen = Screen(sys.stderr, terminal=is_terminal())
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        admin = stack.enter_context(open_admin(admin_host or address, door, admin_key_file, usual_key=admin_key(key)))
        assert admin is not None, "a head has a port for it"
        if not admin_key_file:
            screen.line(f"/metrics and /instances want the key that this prints: {admin_key_command(cluster_key_file)}")
        for launch_id in reap_dead(root):
            screen.line(f"cleaned up after launch {launch_id}, which was killed")
        told = head.settings
        bus = stack.enter_context(EventBus(told.events_publish, told.events_listen))
        if mooncake_master == AUTO:
            _check_free(address, head.port + 2, head.port + 3)
        run = RunDir.create(root)
        stack.callback(run.remove)
        event_loop.run(_serve(head, settings, run, listening, admin, bus, screen))
    return 0


def _check_ports(first: int, port: int) -> None:
    if first > 65535 - ADMIN:
        raise ConfigError(
            f"the cluster's five ports from {first} on have to be below 65536; choose others with --cluster-port",
            param="--cluster-port",
        )
    if port in range(first, first + ADMIN + 1):
        raise ConfigError(
            f"--port {port} is one of the cluster's five from {first} on; choose others with --cluster-port",
            param="--cluster-port",
        )


def _check_free(address: str, *ports: int) -> None:
    """Who listens there now would be taken for our master: it is found by the answers of its port."""
    for port in ports:
        try:
            listen(address, port).close()
        except ConfigError as error:
            raise ConfigError(
                f"mooncake_master cannot listen on {address}:{port} ({error}); choose other ports with --cluster-port",
                param="--cluster-port",
            ) from error


async def _serve(
    head: Head,
    settings: ProxySettings,
    run: RunDir,
    listening: socket.socket,
    admin: Admin,
    bus: EventBus,
    screen: Screen,
) -> None:
    from proxy.cluster.compatibility import ClusterIdentity
    from proxy.cluster.membership import Membership
    from proxy.errors import most_telling

    facts, config = head.blueprint.facts, head.blueprint.config
    identity = ClusterIdentity(
        model=head.blueprint.model_name,
        revision=facts.revision if facts else "",
        processing=processing_text(head.passed),
        multimodal=facts.multimodal if facts else True,
        version=__version__,
    )
    ending = Ending(config.lame_duck_s, config.drain_s, screen.line)
    ending.listen()
    front = Front(
        settings,
        listening,
        host=config.host,
        port=config.port,
        workers=config.workers,
        grace_s=GRACE_S,
        drain_s=config.drain_s,
        serves=ending.serves,
        say=screen.line,
        launch_id=run.launch_id,
        admin=admin,
    )
    members = Membership(front.table, identity, head.settings)
    async with head.second_tier(run, screen.line).running():
        try:
            async with asyncio.TaskGroup() as group:
                front.background.start("silence of members", partial(_notice_silence, members))
                front.background.start("event bus", partial(_watch_bus, bus))
                serving = group.create_task(front.serve(members, head.key))
                host, port, *_ = admin.listening.getsockname()
                screen.line(
                    f"head of a cluster on http://{config.host}:{config.port}; stages join it at "
                    f"http://{head.address if host == '0.0.0.0' else host}:{port}"
                )
                await ending.wait()
                serving.cancel()
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None


async def _watch_bus(bus: EventBus) -> None:
    """Ends with what the bus failed of: its thread goes on by itself, this is how it is counted and shown."""
    while True:
        await asyncio.sleep(BUS_EVERY_S)
        bus.raise_failure()


async def _notice_silence(members: Membership) -> None:
    loop = asyncio.get_running_loop()
    while True:
        slept_since = loop.time()
        await asyncio.sleep(SILENCE_EVERY_S)
        # After a pause of this process (a suspended machine) the beats that came meanwhile are still unread.
        if loop.time() - slept_since < 2 * SILENCE_EVERY_S:
            members.notice_silence()
