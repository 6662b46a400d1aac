"""What one node of a Ray cluster says when the doctor asks it, in a process there."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import socket

from deploy.doctor.facts import MEMORY_MONITOR, SUBREAPER, HostFacts
from deploy.doctor.gather import read_packages
from deploy.host.environment import run_root
from deploy.host.ports import exposed, hold, is_free
from deploy.host.processes import group_members
from deploy.host.rundir import is_of_this_namespace, read_groups
from deploy.options.versions import installed
from epd_serve import __version__

REACH_S = 3.0


class HostProbe:
    """One node's part of the examination, in a process there.

    Args:
        address: that the others are to reach it at. ports: the range for stages.
    """

    def __init__(self, name: str, address: str, ports: range) -> None:
        self._name, self._address, self._ports = name, address, ports
        self._listening: socket.socket | None = None

    def facts(self) -> HostFacts:
        """All that it knows by itself."""
        return HostFacts(
            self._name,
            self._address,
            versions=_versions(),
            free_ports=sum(is_free(self._address, port) for port in self._ports),
            exposed=_exposed(self._address),
            niceness=os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getppid()),
            settings={name: os.environ[name] for name in (MEMORY_MONITOR, SUBREAPER) if name in os.environ},
        )

    def listen(self) -> int:
        """A free port of the range, on which it listens from now on; 0 where there is none."""
        for port in random.sample(self._ports, len(self._ports)):
            if (holder := hold(self._address, port)) is not None:
                holder.listen()
                self._listening = holder
                return port
        return 0

    def reaches(self, address: str, port: int) -> bool:
        """Whether a connection from here comes through."""
        try:
            socket.create_connection((address, port), REACH_S).close()
        except OSError:
            return False
        return True


def _versions() -> dict[str, str]:
    packages = read_packages()
    found = {"epd-serve": __version__, "python": platform.python_version(), "ray": "", **installed(["ray"])}
    return {**found, **packages.versions, **packages.mooncake}


def _exposed(address: str) -> tuple[int, ...]:
    """Ports of this user's stages on this machine that answer at another address, too."""
    root = run_root()
    runs = [path for path in root.iterdir() if is_of_this_namespace(path)] if root.is_dir() else []
    pids = [member.pid for run in runs for leader in read_groups(run) for member in group_members(leader)]
    return tuple(sorted({one.port for one in asyncio.run(exposed(pids, address))}))
