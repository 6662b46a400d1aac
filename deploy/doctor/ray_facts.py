"""Facts about serving on several hosts: Ray and its token here, and what one node of a cluster says, asked there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.doctor.facts import HostFacts, RayFacts
from deploy.doctor.packages import read_packages
from deploy.host.environment import run_root
from deploy.host.listeners import exposed
from deploy.host.processes import group_members
from deploy.host.rundir import is_of_this_namespace, read_groups
from epd_serve import __version__

REACH_S = 3.0
MEMORY_MONITOR = "RAY_memory_monitor_refresh_ms"
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
_STAT_OTHERS = 0o077


def read_ray(environment: Mapping[str, str], home: Path | None = None) -> RayFacts:
    """By metadata and files alone: whether Ray is installed, and where the token of this user lies, as Ray looks for
    it."""
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    if environment.get("RAY_AUTH_TOKEN"):
        return RayFacts(_installed("ray"), "RAY_AUTH_TOKEN")
    try:
        mode, found = file.stat().st_mode, bool(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return RayFacts(_installed("ray"))
    return RayFacts(_installed("ray"), str(file) if found else "", bool(found and mode & _STAT_OTHERS))


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
            free_ports=sum(map(self._is_free, self._ports)),
            exposed=_exposed(self._address),
            niceness=os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getppid()),
            settings={name: os.environ[name] for name in (MEMORY_MONITOR, SUBREAPER) if name in os.environ},
        )

    def listen(self) -> int:
        """A free port of the range, on which it listens from now on; 0 where there is none."""
        for port in random.sample(self._ports, len(self._ports)):
            with contextlib.suppress(OSError):
                self._listening = self._bound(port)
                self._listening.listen()
                return port
        return 0

    def reaches(self, address: str, port: int) -> bool:
        """Whether a connection from here comes through."""
        try:
            socket.create_connection((address, port), REACH_S).close()
        except OSError:
            return False
        return True

    def _is_free(self, port: int) -> bool:
        try:
            self._bound(port).close()
        except OSError:
            return False
        return True

    def _bound(self, port: int) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(self._address, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound


def _versions() -> dict[str, str]:
    packages = read_packages()
    found = {"epd-serve": __version__, "python": platform.python_version(), "ray": _installed("ray")}
    return {**found, **packages.versions, **{one.name: one.version for one in packages.mooncake}}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _exposed(address: str) -> tuple[int, ...]:
    """Ports of this user's stages on this machine that answer at another address, too."""
    root = run_root()
    runs = [path for path in root.iterdir() if is_of_this_namespace(path)] if root.is_dir() else []
    pids = [member.pid for run in runs for leader in read_groups(run) for member in group_members(leader)]
    return tuple(sorted({one.port for one in asyncio.run(exposed(pids, address))}))
