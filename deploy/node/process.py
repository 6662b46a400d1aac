"""`python -m deploy.node.process [--owner FD] [--listening FD] <SETUP`: the node process runs what others decide.

It leaves whoever starts it behind: in a session of its own, a child of nobody, found again by its run directory. Below
it is, as in a launch of one machine, a process that may die (`deploy/host/root.py`), with agent and front doors. Once
these can be asked it answers with one line on stdout (`NodeRun`, or `Failed`). It ends with its owner, at once; by
SIGTERM, when its stages have ended; and by itself when it never gets ready. A node has one: who is started beside it
answers for the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.wiring import Net
from deploy.front.shared import Shared
from deploy.host import root
from deploy.host.environment import run_root, say
from deploy.host.event_loop import together
from deploy.host.launches import kill_leftovers, reap_dead
from deploy.host.ports import BACKLOG, address_of, listen, private_socket
from deploy.host.rundir import RunDir
from deploy.node.front import NodeFront
from deploy.node.routes import NodeWatch, serve_node
from deploy.node.start import LOOK_S, START_S, Failed, NodeError, NodeRun, NodeSetup, end_node, find_node
from deploy.runtime.node_api import NODE_SOCKET
from epd_serve.errors import ConfigError, EpdError

LOG, KEY = "node", "key"
"""Names in the run directory: of its log, and of the file with the deployment's key."""

BEGUN = "begun"
"""The section of the state that says that it can be asked."""

NOBODY = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.node.process")
    parser.add_argument("--owner", type=int)
    parser.add_argument("--listening", type=int)
    given = parser.parse_args()
    packed = sys.stdin.buffer.read()
    answers = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115 - closed with the answer
    try:
        setup = NodeSetup.unpacked(packed)
    except ConfigError as error:
        _answer(answers, msgspec.json.encode(Failed(error.message, config=True)))
        return NOBODY
    _leave()
    listening = socket.socket(fileno=given.listening) if given.listening is not None else None
    try:
        return _Node(setup, given.owner, listening, answers).live()
    except EpdError as error:
        failed = Failed(error.message, error.param, config=isinstance(error, ConfigError))
        with contextlib.suppress(OSError):  # whoever asked has gone
            _answer(answers, msgspec.json.encode(failed))
        return NOBODY


def _leave() -> None:
    """Whoever has started this process: from here on it is nobody's child, and inherits descriptors alone."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)  # no leader of a session: it can get no terminal
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what it inherits says nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir("/")
    os.umask(0o077)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


def _answer(answers: BinaryIO, line: bytes) -> None:
    """Raises OSError: nobody hears it."""
    answers.write(line + b"\n")
    answers.close()


class _Node:
    """Args:
    owner: descriptor of the process with whose end this one ends. listening: for front doors, bound.
    answers: of whoever has started this process.
    """

    def __init__(self, setup: NodeSetup, owner: int | None, listening: socket.socket | None, answers: BinaryIO) -> None:
        self._setup = setup
        self._owner = owner
        self._listening = listening
        self._answers = answers
        self._root = Path(setup.run_root) if setup.run_root else run_root()
        self._last = ""

    def live(self) -> int:
        """Raises EpdError: it did not begin, and everything is cleaned up."""
        warnings = _take_after(self._setup.owner_pid)
        with contextlib.ExitStack() as stack:
            run = self._run_of_our_own()
            if isinstance(run, NodeRun):
                _answer(self._answers, run.packed())
                return 0
            stack.callback(run.remove)
            _log_to(run.log(LOG))
            agent = self._agent_setup(run)
            told = replace(self._told(run), warnings=warnings, master=agent.tier.address)
            return self._keep(stack, run, agent, told)

    def _run_of_our_own(self) -> RunDir | NodeRun:
        """A run directory, once there is nobody else; or whoever is there for the same owner, once it is ready."""
        setup, until = self._setup, time.monotonic() + START_S
        while True:
            with _alone(self._root, until):
                other = find_node(setup.deployment, setup.node, self._root)
                if other is None:
                    reap_dead(self._root)
                    run = RunDir.create(self._root)
                    self._told(run).write()
                    return run
            if other.owner_pid != setup.owner_pid:
                end_node(other)
            elif other.ready:
                return other
            elif time.monotonic() > until:
                raise NodeError(f"node {setup.node} begins in process {other.pid}, and is not ready")
            time.sleep(LOOK_S)

    def _told(self, run: RunDir) -> NodeRun:
        setup = self._setup
        return NodeRun(setup.deployment, setup.node, run.path, os.getpid(), setup.owner_pid)

    def _agent_setup(self, run: RunDir) -> AgentSetup:
        setup = self._setup
        key = run.path / KEY
        key.touch(mode=0o600)
        key.write_text(f"{setup.key}\n", "ascii")
        blueprint = setup.blueprint
        if setup.master:
            blueprint = replace(blueprint, config=replace(blueprint.config, mooncake_master=setup.master))
        return AgentSetup.of(
            run,
            blueprint,
            setup.command_of,
            setup.master_command_of,
            setup.patience,
            net=Net(setup.node, address_of(setup.host, "--node-host"), str(key), setup.ports),
            shm_mib=setup.shm_mib,
        )

    def _keep(self, stack: contextlib.ExitStack, run: RunDir, setup: AgentSetup, told: NodeRun) -> int:
        asked = stack.enter_context(private_socket(run.socket(NODE_SOCKET)))
        asked.listen(BACKLOG)
        shared = self._shared(stack, run) if self._setup.front is not None else None

        async def control(life: root.Life) -> int:
            children, watch = life.children(), NodeWatch()
            agent = Agent(setup, children, life.state, say=watch.say)
            front = None
            if self._setup.front is not None and shared is not None:
                drain_s, key_file = setup.blueprint.config.drain_s, str(run.path / KEY)
                front = NodeFront(self._setup.front, drain_s, run, shared, key_file, children, life.state, watch.say)
            async with agent.running():
                serving = serve_node(asked, life.state, watch, agent, front)
                await root.crash_only(together(serving, self._until_signalled(life, agent)))
            return NOBODY

        def take_down() -> None:
            if shared is not None:
                shared.refuse()
            kill_leftovers(run.path)
            if not self._answers.closed:
                self._last += f"; its log: {run.keep_log(LOG)}"
            run.remove()

        kept = root.Root(
            control,
            drain_s=0.0,
            say=self._say,
            was_ready=lambda sections: BEGUN in sections,
            take_down=take_down,
            owned=[*run.held, self._answers],
            look=partial(self._look, replace(told, ready=True), time.monotonic() + START_S),
        )
        code = kept.serve()
        if not self._answers.closed:
            raise NodeError(f"node {self._setup.node}: {self._last}")
        return code

    def _look(self, ready: NodeRun, by: float, sections: Mapping[str, bytes]) -> str:
        """Why all has to end, or "". Whoever has started it is answered once."""
        if self._owner is not None and select.select([self._owner], [], [], 0)[0]:
            return "whom it belongs to has gone: everything is killed"
        if self._answers.closed:
            return ""
        if BEGUN not in sections:
            return "it is not ready in time" if time.monotonic() >= by else ""
        try:
            ready.write()
        except OSError as error:
            return f"that it has begun cannot be written down: {error}"
        try:
            _answer(self._answers, ready.packed())
        except OSError as error:
            return f"nobody hears that it has begun: {error}"
        return ""

    async def _until_signalled(self, life: root.Life, agent: Agent) -> None:
        """Then its stages end, and everything: there is nobody else who would."""
        signalled = asyncio.Event()
        life.heed(lambda number: signalled.set())
        life.state.write(BEGUN, b"")
        await signalled.wait()
        await agent.close()
        root.end_now(0)

    def _shared(self, stack: contextlib.ExitStack, run: RunDir) -> Shared:
        config = self._setup.blueprint.config
        listening = stack.enter_context(self._listening or listen(config.host, config.port))
        return Shared.of(listening, stack.enter_context(private_socket(run.feed)), config.workers)

    def _say(self, line: str) -> None:
        """To the log."""
        self._last = line
        say(line)


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


@contextlib.contextmanager
def _alone(root: Path, until: float) -> Iterator[None]:
    """No other node process begins meanwhile below this run root. Raises NodeError at the deadline."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise NodeError(f"{root} is locked by a node process that has not begun") from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(folder)


def _log_to(path: Path) -> None:
    """What this process and its parts say from now on."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    sys.exit(main())
