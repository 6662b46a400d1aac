"""The node processes of this machine as others see them: what one is told at its start, all that it ever has to know of
its deployment; found by deployment and node, started, ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deploy.agent.second_tier import MasterCommand, mooncake_command
from deploy.agent.waits import Patience
from deploy.host.environment import module_command, module_environment, module_path, run_root, shm_root
from deploy.host.launches import kill_leftovers
from deploy.host.rundir import HELD, RunDir, is_held
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.stage_plan import StageCommand, StagePlan

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings


@dataclass(frozen=True)
class NodeSetup:
    """Of one node.

    Attributes:
        deployment, node: its names; together they are what it is found by.
        host: numeric address at which its stages are reached by the other nodes.
        key: of the deployment, which its members alone have.
        blueprint: of this node alone, under its own device ids; the layout in it is nobody's order.
        ports: from which its instances have theirs; an empty one: any that are free.
        master: `host:port` of the second tier's master, where another node has it.
        front: what front doors are to be like; None where there are to be none.
        owner_pid: of the process with whose end it ends; 0: none.
        shm_mib: how much of /dev/shm is its own; None: whatever is free.
        run_root: of its run directory; "": the usual one.
        command_of, master_command_of: make the commands of stages and of Mooncake's master; tests put stand-ins here.
    """

    deployment: str
    node: str
    host: str
    key: str = field(repr=False)
    blueprint: Blueprint
    ports: range = range(0)
    master: str = ""
    front: ProxySettings | None = None
    owner_pid: int = 0
    shm_mib: int | None = None
    run_root: str = ""
    patience: Patience = field(default_factory=Patience)
    command_of: Callable[[StagePlan], StageCommand] = command_of
    master_command_of: MasterCommand = mooncake_command

    def packed(self) -> bytes:
        """For a process of the same version of this program."""
        return __version__.encode() + b"\n" + pickle.dumps(self)

    @classmethod
    def unpacked(cls, raw: bytes) -> NodeSetup:
        """Raises ConfigError: another version has packed it."""
        version, _, packed = raw.partition(b"\n")
        if version.decode("ascii", "replace") != __version__:
            raise ConfigError(
                f"this node has epd-serve {__version__}, whoever starts it {version.decode('ascii', 'replace')[:40]}: "
                "install the same version on all nodes"
            )
        setup = pickle.loads(packed)
        assert isinstance(setup, cls), "whoever packs it is the same program"
        return setup


NODE_FILE = "node.json"
"""In the run directory of a node process: a `NodeRun`."""

START_S = 60.0
END_S = 40.0
"""For stages to end by themselves, and what is left to be killed."""

LOOK_S = 0.05


class NodeError(EpdError):
    """A node process does not start, or does not end."""


@dataclass(frozen=True)
class NodeRun:
    """A node process.

    Attributes:
        path: its run directory.
        owner_pid: of the process with whose end it ends.
        ready: it can be asked.
        warnings: for the operator, a line each.
        master: `host:port` of the second tier's master that is to run here, or that it was told of, or "".
    """

    deployment: str
    node: str
    path: Path
    pid: int
    owner_pid: int = 0
    ready: bool = False
    warnings: tuple[str, ...] = ()
    master: str = ""

    @property
    def lives(self) -> bool:
        return is_held(self.path / HELD) is True

    def write(self) -> None:
        """For whoever looks for it."""
        unnamed = self.path / f".{NODE_FILE}"
        unnamed.write_bytes(self.packed())
        unnamed.rename(self.path / NODE_FILE)

    def packed(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def unpacked(cls, raw: bytes) -> NodeRun:
        """Raises msgspec.DecodeError."""
        return msgspec.json.decode(raw, type=cls, dec_hook=lambda kind, value: kind(value))


class Failed(msgspec.Struct, frozen=True):
    """What a node process answers that does not begin. `config`: it is a ConfigError."""

    error: str
    param: str | None = None
    config: bool = False

    def raised(self) -> EpdError:
        return ConfigError(self.error, param=self.param) if self.config else NodeError(self.error)


def find_node(deployment: str, node: str, root: Path | None = None) -> NodeRun | None:
    """The one that lives, be it about to begin or to end."""
    root = root or run_root()
    for path in sorted(root.glob(f"*/{NODE_FILE}")):
        with contextlib.suppress(OSError, msgspec.DecodeError):  # it has gone meanwhile
            run = NodeRun.unpacked(path.read_bytes())
            if (run.deployment, run.node) == (deployment, node) and run.lives:
                return run
    return None


def start_node(
    setup: NodeSetup,
    *,
    owner: int | None = None,
    listening: socket.socket | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_S,
) -> NodeRun:
    """Start a node process, or wait for the one of this name that has been started. For a thread: it blocks.

    Args:
        owner: descriptor of the process with whose end it ends, of `os.pidfd_open`; with `setup.owner_pid`.
        listening: bound, for its front doors. The caller's to close.
        env: of the node process and all that it starts; by default this process's.

    Raises:
        ConfigError, NodeError: as the node process says, or it says nothing.
    """
    flags: list[str] = []
    for name, descriptor in (("owner", owner), ("listening", listening.fileno() if listening else None)):
        flags += [f"--{name}", str(descriptor)] if descriptor is not None else []
    process = subprocess.Popen(
        module_command("deploy.node.process", *flags),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=module_environment() if env is None else {**env, "PYTHONPATH": module_path()},
        pass_fds=[int(number) for number in flags[1::2]],
        cwd="/",
    )
    with process:
        try:
            answer, _ = process.communicate(setup.packed(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # the one that has come out of it finds nobody to answer, and ends
            raise NodeError(f"node {setup.node} has not begun within {timeout_s:g} s") from None
    line = answer.strip().rpartition(b"\n")[2]
    if not line:
        raise NodeError(f"node {setup.node} ended before it began; what it said is on the stderr of who started it")
    with contextlib.suppress(msgspec.DecodeError):
        raise msgspec.json.decode(line, type=Failed).raised()
    return NodeRun.unpacked(line)


def end_node(run: NodeRun, timeout_s: float = END_S) -> None:
    """Have it end: its stages by themselves, then everything. Returns when nothing of it is left. Blocks.

    Raises:
        NodeError: something is left.
    """
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(run.pid)
        try:
            if run.lives:  # or the pid may be another's
                with contextlib.suppress(OSError):  # it has gone meanwhile
                    replace(run, ready=False).write()  # nobody takes it for the one to go on with
                signal.pidfd_send_signal(process, signal.SIGTERM)
                if not select.select([process], [], [], timeout_s)[0]:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    select.select([process], [], [], timeout_s)
        finally:
            os.close(process)
    until = time.monotonic() + LOOK_S
    while run.lives and time.monotonic() < until:  # the kernel lets go of its locks a moment later
        time.sleep(LOOK_S / 10)
    if run.lives:
        raise NodeError(f"node {run.node} does not end: process {run.pid}")
    if run.path.exists():
        kill_leftovers(run.path)
        RunDir(run.path.name, run.path, shm_root()).remove()
