"""`epd-serve node`: one machine of a deployment on several, run by whoever controls it.

It is the program that serves on one machine without the part that decides: it listens, over TLS to members alone
(`deploy/runtime/secrets.py`), says what the machine is, and waits until a controller tells it the deployment. Then it
is, as in a launch of one machine, the root of a process that may die (`deploy/host/root.py`), with agent and front
doors. Ray's Node actor keeps it alive, or Kubernetes; one that is started again waits to be told anew.

It ends by SIGTERM, when requests and stages have ended; by SIGINT or SIGHUP, without the former; and with its owner, at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.wiring import Net
from deploy.front.key_watch import api_keys_of, read_key_text
from deploy.front.shared import Shared
from deploy.host import event_loop, root
from deploy.host.ending import Ending
from deploy.host.environment import run_root, say
from deploy.host.event_loop import first, together
from deploy.host.launches import kill_leftovers, reap_dead
from deploy.host.logs import read_log
from deploy.host.ports import address_of, free_ports, listen, private_socket
from deploy.host.processes import stat
from deploy.host.rundir import RunDir, is_held
from deploy.node.facts import NodeFacts, node_facts
from deploy.node.front import NodeFront
from deploy.node.routes import EPOCH, Calls, NodeWatch, serve_about, serve_node
from deploy.node.setup import NodeInfo, NodeSetup, Notes, deployment_key
from deploy.options.addresses import host_and_port, port_range
from deploy.options.config import DeployConfig, proxy_values
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.runtime.secrets import NodeSecrets
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from proxy.config.settings import ProxySettings
from proxy.config.tree import changed
from store.addresses import authority

KEY = "key"
"""In the run directory: the file with the deployment's key."""

BEGUN, NOTES = "begun", "notes"
"""Sections of the state: it can be asked; what is kept for the next controller."""


EMPTY_LOOK_S = 0.5


@dataclass(frozen=True)
class Start:
    """How a node process is started.

    Attributes:
        listen: `HOST:PORT` of its API, or `HOST:FIRST-LAST` for any free port of these.
        advertise: numeric address at which its stages are reached; "": the host that it listens on.
        address_file: gets an `Address` once it listens, and is locked while it lives; "": none.
        owner: pid of a process with whose end it ends; 0: none.
        clients: descriptor of a bound socket for its front doors; -1: it opens one.
    """

    listen: str
    secrets: str
    advertise: str = ""
    run_root: str = ""
    address_file: str = ""
    owner: int = 0
    clients: int = -1


class Address(msgspec.Struct, frozen=True):
    """Where a node process is asked: `HOST:PORT`; its pid."""

    address: str
    pid: int


def find_node(file: Path) -> Address | None:
    """The node process that has this address file, once it listens; None where none lives."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Address) if is_held(file) else None
    except (OSError, msgspec.DecodeError):  # it has only begun
        return None
    return found if found is not None and stat(found.pid) is not None else None


def run_node(start: Start) -> int:
    """Until it is ended. Returns its exit code. Raises ConfigError: it cannot begin."""
    secrets = NodeSecrets(start.secrets, "--secrets")
    if start.owner:
        _leave()
    with contextlib.ExitStack() as stack:
        owner = -1
        if start.owner:
            owner = os.pidfd_open(start.owner)
            stack.callback(os.close, owner)
        lock = stack.enter_context(open(start.address_file, "ab")) if start.address_file else None
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0  # there is one
            lock.truncate(0)
        host, port = _where(start.listen)
        asked = stack.enter_context(listen(host, port, flags="--listen"))
        if lock is not None:
            lock.write(msgspec.json.encode(Address(authority(host, port), os.getpid())))
            lock.flush()
        node = _Node(start, secrets, asked, host, _take_after(start.owner), stack)
        if not event_loop.run(node.wait(owner)):
            return 0
        return node.keep(owner, [lock] if lock is not None else [])


async def await_empty(start: Start, within_s: float) -> int:
    """Until the node that listens there has no instance any more: its controller has moved them. Returns an exit code.

    Raises:
        EpdError: it does not answer.
    """
    host, port = host_and_port(start.listen, "--listen")
    secrets = NodeSecrets(start.secrets, "--secrets")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s), secrets.client(authority(_here(host), port), within_s) as http:
            while True:
                try:
                    answer = await http.get("/node")
                    if not msgspec.json.decode(answer.content, type=NodeInfo).instances:
                        return 0
                except (httpx.TransportError, msgspec.MsgspecError) as error:
                    raise EpdError(f"the node at {start.listen} does not say what it has: {error}") from error
                await asyncio.sleep(EMPTY_LOOK_S)
    return 1


def _here(host: str) -> str:
    """For who asks from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _where(text: str) -> tuple[str, int]:
    """Raises ConfigError."""
    host, _, ports = text.rpartition(":")
    if "-" not in ports:
        return host_and_port(text, "--listen")
    host = host.strip("[]")
    return host, free_ports(1, host, port_range(ports))[0]


def _leave() -> None:
    """Whoever has started this process: from here on it is nobody's child, and inherits descriptors alone."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)  # no leader of a session: it can get no terminal
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what it inherits says nothing
    os.chdir("/")
    os.umask(0o077)


@dataclass
class _Deployment:
    """What the node is part of, made once.

    Attributes:
        front: settings of front doors, and what these have in common; None where there are none.
    """

    setup: NodeSetup
    run: RunDir
    agent: AgentSetup
    front: tuple[ProxySettings, Shared] | None


@dataclass
class _Node:
    """An `About`. `warnings`: for the operator. `stack`: undoes what it makes."""

    start: Start
    secrets: NodeSecrets
    asked: socket.socket
    host: str
    warnings: tuple[str, ...]
    stack: contextlib.ExitStack
    facts: NodeFacts | None = None
    deployment: _Deployment | None = None
    life: _Life | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, owner: int) -> bool:
        """Whether it has been told its deployment, or else it is to end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, ended.set)
        if owner >= 0:
            loop.add_reader(owner, ended.set)
        await first(self._told.wait(), ended.wait(), serve_about(self.asked.dup(), self))
        return not ended.is_set()

    # --- what is asked of it --------------------------------------------------------------------------------------

    def ready(self) -> bool:
        return self.life is not None and (self.life.front is None or self.life.front.serves)

    async def info(self) -> NodeInfo:
        if self.deployment is None or self.life is None:
            return NodeInfo(warnings=self.warnings)
        setup, life = self.deployment.setup, self.life
        doors = life.front.doors.pids if life.front is not None else {}
        return NodeInfo(
            __version__,
            setup.deployment,
            setup.node,
            int(life.state.read(EPOCH) or 0),
            life.notes,
            self.deployment.agent.tier.address,
            self.warnings,
            {"node": life.root, root.CONTROL: os.getpid(), **doors},
            life.watch.instances,
        )

    def calls(self) -> Calls:
        called: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "facts": (self._facts, tuple[DeployConfig, str, int]),
            "setup": (self._set_up, tuple[NodeSetup]),
            "end": (self._end, tuple[()]),
            "api_keys": (lambda path: asyncio.to_thread(read_key_text, path), tuple[str]),
        }
        if self.life is not None:
            called["notes"] = self.life.note, tuple[Notes]
            called["log"] = self.life.log, tuple[str, int]
        return called

    async def _facts(self, config: DeployConfig, node: str, virtual_devices: int) -> NodeFacts:
        """What the machine was before anything of a deployment ran on it. Raises ConfigError."""
        async with self._turn:
            if self.facts is None:
                self.facts = await asyncio.to_thread(node_facts, config, node, virtual_devices)
            return self.facts

    async def _set_up(self, setup: NodeSetup) -> None:
        """Raises ConfigError: it cannot serve this, or has another deployment."""
        async with self._turn:
            if self.deployment is None:
                self.deployment = await asyncio.to_thread(self._made, setup)
                self._told.set()
            elif (had := self.deployment.setup).member != setup.member:
                raise ConfigError(f"this node is {had.node} of deployment {had.deployment}, begun before: end it first")

    async def _end(self) -> None:
        """As by SIGINT."""
        os.kill(self.life.root if self.life is not None else os.getpid(), signal.SIGINT)

    def _made(self, setup: NodeSetup) -> _Deployment:
        """Raises ConfigError: all is undone."""
        blueprint, folder = setup.blueprint(), self.start.run_root
        config = blueprint.config
        if setup.master:
            config = replace(config, mooncake_master=setup.master)
            blueprint = replace(blueprint, config=config)
        reap_dead(Path(folder) if folder else run_root())
        with contextlib.ExitStack() as stack:
            run = RunDir.create(Path(folder) if folder else None)
            stack.callback(run.remove)
            key = run.path / KEY
            key.touch(mode=0o600)
            key.write_text(f"{deployment_key(self.secrets.token, setup.deployment, setup.nonce)}\n", "ascii")
            host = address_of(setup.host or self.start.advertise or self.host, "--node-host")
            net = Net(setup.node, host, str(key), port_range(config.node_ports))
            agent = AgentSetup.of(run, blueprint, patience=setup.patience, net=net, shm_mib=setup.shm_mib)
            front = None
            if setup.front:
                keys = api_keys_of(setup.api_keys, config.api_key_file) if config.api_key_file else None
                told = replace(blueprint, config=changed(config, proxy_values(setup.options)))
                given = self.start.clients
                clients = socket.socket(fileno=os.dup(given)) if given >= 0 else listen(config.host, config.port)
                feed = stack.enter_context(private_socket(run.feed))
                shared = Shared.of(stack.enter_context(clients), feed, config.workers)
                front = build_proxy_settings(told, None, keys), shared
            self.stack.push(stack.pop_all())
        return _Deployment(setup, run, agent, front)

    # --- once it has been told ------------------------------------------------------------------------------------

    def keep(self, owner: int, owned: list[BinaryIO]) -> int:
        """The root of its control, until the end. Returns its exit code."""
        told = self.deployment
        assert told is not None, "it has been told"
        config = told.agent.blueprint.config
        self._turn = asyncio.Lock()  # the other one is of a loop that has ended

        async def control(life: root.Life) -> int:
            self.life = one = _Life(told, life)
            async with one.agent.running():
                answer = partial(serve_about, self.asked.dup(), self)
                serving = serve_node(answer, life.state, one.watch, one.agent, one.front)
                await root.crash_only(together(serving, one.until_signalled()))
            return 1

        def take_down() -> None:
            if told.front is not None:
                told.front[1].refuse()
            kill_leftovers(told.run.path)
            told.run.remove()

        def look(sections: Mapping[str, bytes]) -> str:
            gone = select.select([owner], [], [], 0)[0]
            return "whom it belongs to has gone: everything is killed" if gone else ""

        return root.Root(
            control,
            drain_s=config.lame_duck_s + config.drain_s,
            say=say,
            was_ready=lambda sections: BEGUN in sections,
            take_down=take_down,
            owned=[*told.run.held, *owned],
            look=look if owner >= 0 else None,
        ).serve()


class _Life:
    """One life of control: the agent and the front doors of the node."""

    def __init__(self, told: _Deployment, life: root.Life) -> None:
        children, self.state, self.root = life.children(), life.state, life.root
        self.watch = NodeWatch()
        self.agent = Agent(told.agent, children, self.state, say=self.watch.say)
        self.front: NodeFront | None = None
        self._run, self._config, self._heed = told.run, told.agent.blueprint.config, life.heed
        if told.front is not None:
            settings, shared = told.front
            drain_s, key_file = self._config.drain_s, str(told.run.path / KEY)
            self.front = NodeFront(settings, drain_s, told.run, shared, key_file, children, self.state, self.watch.say)
        noted = self.state.read(NOTES)
        self.notes = msgspec.json.decode(noted, type=Notes) if noted is not None else told.setup.notes

    async def note(self, newer: Notes) -> None:
        """Keep this for the next controller."""
        if (merged := self.notes.merged(newer)) is not self.notes:
            self.notes = merged
            self.state.write(NOTES, msgspec.json.encode(merged))

    async def log(self, name: str, offset: int) -> tuple[bytes, int]:
        """As `read_log`, of a process of the node."""
        if "/" in name:
            raise ConfigError(f"{name!r} is no log")
        return await asyncio.to_thread(read_log, self._run.path / f"{name}.log", offset)

    async def until_signalled(self) -> None:
        """Then requests end, its stages, and everything: there is nobody else who would."""
        ending = Ending(self._config.lame_duck_s, self._config.drain_s, self.watch.say, lambda: root.end_now(0))

        def take(number: int) -> None:
            if self.front is not None:
                ending.serves(self.front.doors)  # those of now
            ending.take(number)

        self._heed(take)
        self.state.write(BEGUN, b"")
        await ending.wait()
        if self.front is not None:
            await self.front.end()
        await self.agent.close()
        root.end_now(0)


def _take_after(owner_pid: int) -> tuple[str, ...]:
    """Be to the kernel what the owner is to it, and not what was made of whoever has started this process.

    Returns:
        What could not be had, for the operator.
    """
    if not owner_pid:
        return ()
    warnings = []
    try:
        mine, theirs = os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, owner_pid)
        if mine != theirs:
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, theirs)
                mine = theirs
        if mine != theirs:
            warnings.append(f"stages and front doors run at nice {mine}, and give way to others: only root can undo it")
        own, owners = Path("/proc/self/oom_score_adj"), Path(f"/proc/{owner_pid}/oom_score_adj")
        wanted = owners.read_text("ascii").strip()
        if own.read_text("ascii").strip() != wanted:
            try:
                own.write_text(wanted, "ascii")
            except PermissionError:
                warnings.append("when memory runs out, stages and front doors are the first that the kernel ends")
    except (ProcessLookupError, FileNotFoundError):
        pass  # its end is noticed elsewhere
    return tuple(warnings)
