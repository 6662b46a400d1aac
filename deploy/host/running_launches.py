"""The launches of this user that run on this machine: those that keep features, those that take commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.host.environment import run_root, shm_root
from deploy.host.rundir import HELD, RunDir, is_held, read_instances
from epd_serve.errors import ConfigError, EpdError

ADMIN_SOCKET = "admin.sock"
"""In the run directory of a launch that takes commands."""


class NoLaunchError(EpdError):
    """Nothing runs that could be asked."""


@dataclass(frozen=True)
class RunningLaunch:
    """One launch."""

    id: str
    path: Path
    arena: Path

    def __str__(self) -> str:
        return f"{self.id} ({', '.join(read_instances(self.path))})"


def running_launches(root: Path | None = None, *, keeps: str = "") -> list[RunningLaunch]:
    """In the order of their ids.

    Args:
        keeps: only those with a file of this name in their run directory; with an arena, if none is given.
    """
    root = root or run_root()
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        launch = RunningLaunch(path.name, path, RunDir(path.name, path, shm_root()).arena)
        if is_held(path / HELD) and (path / keeps if keeps else launch.arena).exists():
            found.append(launch)
    return found


def choose_launch(launch_id: str | None, root: Path | None = None, *, keeps: str = "") -> RunningLaunch:
    """The launch of this id (or its beginning), or the only one there is.

    Raises:
        NoLaunchError: nothing runs.
        ConfigError: several run and none or a wrong one is named; lists them.
    """
    launches = running_launches(root, keeps=keeps)
    if not launches:
        raise NoLaunchError(f"no launch of this user runs here that {'takes commands' if keeps else 'keeps features'}")
    chosen = [one for one in launches if launch_id is None or one.id.startswith(launch_id)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(map(str, launches))
    if launch_id is None:
        raise ConfigError(f"several launches run; name one by --launch: {listed}", param="--launch")
    raise ConfigError(f"no single launch {launch_id!r}; there are: {listed}", param="--launch")
