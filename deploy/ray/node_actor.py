"""The Node actor: what Ray keeps alive on each node of a deployment, and what keeps a node process alive there.

The node process (`deploy/node/process.py`) is none of Ray's and outlives the actor: what a process is under Ray (its
environment, its niceness, its place in the order of those that are killed where memory is short) is not for stages. It
ends with the raylet. What is asked of it is asked over TLS: words and numbers are all that goes through Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from deploy.host.environment import module_command, module_path, run_root
from deploy.host.ports import listen
from deploy.host.processes import environment_of, signal_process
from deploy.host.rundir import is_held, private_folder
from deploy.node.process import Address, find_node
from deploy.options.addresses import host_and_port
from epd_serve.errors import EpdError

START_S = 60.0
END_S = 40.0
"""For stages to end by themselves; what is left is killed."""

LOOK_S = 0.02


class NodeActor:
    """On its node, until the deployment ends. Every call may be repeated.

    Args:
        name: of deployment and node. host: at which the others reach it. ports: `FIRST-LAST`, of which its API gets
            one. secrets: folder of what makes it a member.
        folder: where the node process keeps its run directory, or "".
    """

    def __init__(self, name: str, host: str, ports: str, secrets: str, folder: str) -> None:
        self._folder = Path(folder) if folder else run_root()
        self._file = self._folder / f"{name}.json"
        bracketed = f"[{host}]" if ":" in host else host
        self._words = ["--listen", f"{bracketed}:{ports}", "--secrets", secrets, "--run-root", folder]
        self._one_at_a_time = asyncio.Lock()
        self._clients: socket.socket | None = None
        self._ended = False

    async def pid(self) -> int:
        return os.getpid()

    async def find(self) -> str:
        """`HOST:PORT` of the node process, "" where none runs."""
        found = await asyncio.to_thread(find_node, self._file)
        return found.address if found is not None else ""

    async def reach(self, clients: str) -> tuple[str, str]:
        """The same, of one that is started where none runs.

        Args:
            clients: `HOST:PORT` of its front doors, or "". It is taken at once and kept: connections wait there while
                a node process that was killed is followed by another one.

        Returns:
            And what is wrong, where none can be started.
        """
        async with self._one_at_a_time:
            try:
                return (await asyncio.to_thread(self._reach, clients)).address, ""
            except EpdError as error:
                return "", error.message

    def _reach(self, clients: str) -> Address:
        """Raises EpdError."""
        if self._ended:  # calls of an actor may overtake each other
            raise EpdError("the deployment has been ended here")
        if (found := find_node(self._file)) is not None:
            return found
        if clients and self._clients is None:
            self._clients = listen(*host_and_port(clients, "--host"))
        return self._start(_raylet())

    def _start(self, owner: int) -> Address:
        private_folder(self._folder)
        words, passed = [*self._words, "--address-file", str(self._file), "--owner", str(owner)], []
        if self._clients is not None:
            passed = [self._clients.fileno()]
            words += ["--clients", str(passed[0])]
        log = self._file.with_suffix(".log")
        with log.open("wb") as said:
            process = subprocess.Popen(
                module_command("deploy.cli", "node", *words),
                env={**environment_of(owner, without=("RAY_",)), "PYTHONPATH": module_path()},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=passed,
                cwd="/",
            )
        until = time.monotonic() + START_S
        while (found := find_node(self._file)) is None:
            if process.poll() or time.monotonic() > until:
                process.kill()
                raise EpdError(f"its node process does not begin: {log.read_text(errors='replace')[-400:].strip()}")
            time.sleep(LOOK_S)
        process.wait(START_S)  # it has left another one behind
        return found

    async def end(self) -> None:
        """Ends the node process and all of its own, for good; returns when nothing is left."""
        async with self._one_at_a_time:
            self._ended = True
            if self._clients is not None:
                self._clients.close()
                self._clients = None
            await asyncio.to_thread(self._end, signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        for one, within_s in ((number, END_S), (signal.SIGKILL, END_S)):
            if (found := find_node(self._file)) is None:
                break
            signal_process(found.pid, one)
            until = time.monotonic() + within_s
            while is_held(self._file) and time.monotonic() < until:
                time.sleep(LOOK_S)
        if not is_held(self._file):
            for left in (self._file, self._file.with_suffix(".log")):
                left.unlink(missing_ok=True)


def _raylet() -> int:
    """Pid of the process that Ray is on this node, our parent. Raises EpdError: our parent is another one."""
    pid = os.getppid()
    name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
    if name != "raylet" or os.getppid() != pid:
        raise EpdError(f"the parent of a Ray worker is {name}, not its raylet: runtime_env containers are not for us")
    return pid
