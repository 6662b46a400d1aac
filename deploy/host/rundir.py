"""The run directory of a launch: its identity, logs and sockets, and what is needed to clean up after kill -9.

    <run root>/<launch id>/launcher.json    pid and PID namespace of the launcher
                           held             locked while the launcher lives
                           groups.jsonl     one line per process group that was ever started: stages, Mooncake's master
                           peers.json       who is there, for the stages, see epd_serve/peers.py
                           pool.json        addresses of the MM Store's second tier, where there is one
                           admin.sock       where commands are given (deploy/cli/changing.py)
                           key              of a node process: the key of its deployment
                           feed             where front doors hear of the instances (proxy/workers/hub.py)
                           front.<n>.sock, front.<n>.log   of a front door: where it is asked, its log
                           template.sock, template.log     of the template of the stages
                           <instance>.log, and its sockets (.http, .events, .load, .kv, .kvw<rank>,
                           .kvnews<rank>, .features<rank>)
                           <instance>.traffic, see epd_serve/engine/traffic.py
                           <instance>.cores<rank>.json, what a worker says of its share (npu_ops/core_grants.py)
    /dev/shm/epd-<launch id>-*              arena and staging files; what vLLM and Python make in the stages
    /dev/shm/sem.epd-<launch id>-*          their semaphores
    /dev/shm/epd-<launch id>-held           locked while the launcher lives

A launch removes its own directory when it ends. `reap_dead` does it for launches whose launcher has gone.

The kernel lets go of the lock of a file that is `held` however the process ends, and it is seen from every PID
namespace, which no pid is. The lock lies where that lies whose owner it tells: a directory in /tmp and memory in
/dev/shm may be shared by different containers.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from deploy.host import processes
from deploy.host.environment import run_root, shm_root
from deploy.host.logs import read_log
from epd_serve.errors import ConfigError


def hold(path: Path) -> BinaryIO:
    """Makes the file, locked from the moment it has its name. Closing it lets go; children that exec do not inherit it.

    Raises:
        OSError: it exists, or cannot be made.
    """
    unnamed = path.with_name(f".{path.name}")
    file = unnamed.open("xb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
    except OSError:
        file.close()
        unnamed.unlink(missing_ok=True)
        raise
    return file


def is_held(path: Path) -> bool | None:
    """Whether somebody holds it; None where there is no such file of this user's."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


HELD = "held"
MAX_SOCKET_PATH = 105
"""`sockaddr_un` holds 108 bytes."""

LONGEST_SOCKET_NAME = "00000000-0000-0000-0000-000000000000"
"""vLLM's own sockets are named by a UUID."""


@dataclass(frozen=True)
class RunDir:
    """One launch's directory and names. Made by `create`, removed by `remove`.

    Attributes:
        maker: pid of the process that made this. Its forks name files by it, and remove none.
    """

    launch_id: str
    path: Path
    shm: Path
    held: tuple[BinaryIO, ...] = field(default=(), compare=False, repr=False)
    maker: int = field(default_factory=os.getpid, compare=False, repr=False)

    @classmethod
    def create(cls, root: Path | None = None) -> RunDir:
        """Make the directory. A reaper leaves it alone until it has its lock, which is the last that it gets."""
        root = root or run_root()
        private_folder(root)
        launch_id = secrets.token_hex(4)
        run = cls(launch_id, root / launch_id, shm_root())
        if len(str(run.socket(LONGEST_SOCKET_NAME))) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"run directory {root} is too long for sockets; give a shorter one by --run-root or XDG_RUNTIME_DIR",
                param="run_root",
            )
        run.path.mkdir(mode=0o700)
        owner = {"pid": os.getpid(), "pid_namespace": processes.pid_namespace()}
        (run.path / "launcher.json").write_text(json.dumps(owner), encoding="ascii")
        try:
            return replace(run, held=(hold(held_in(run.shm, launch_id)), hold(run.path / HELD)))
        except OSError as error:
            run.remove()
            raise ConfigError(f"{error.filename} cannot be made or locked: {error.strerror}") from error

    def log(self, instance: str) -> Path:
        return self.path / f"{instance}.log"

    def socket(self, name: str) -> Path:
        return self.path / name

    def ipc(self, name: str) -> str:
        """ZMQ address of a socket in the directory; `name` may hold `{rank}`."""
        return f"ipc://{self.socket(name)}"

    @property
    def peers(self) -> Path:
        return self.path / "peers.json"

    def grant_template(self, instance: str) -> str:
        """Where each worker of an instance leaves its `CoreGrant`; holds `{rank}`."""
        return f"{self.path / instance}.cores{{rank}}.json"

    @property
    def feed(self) -> Path:
        """Of front doors."""
        return self.socket("feed")

    @property
    def arena(self) -> Path:
        return self.shm / f"epd-{self.launch_id}-arena"

    def memory_names(self, instance: str) -> str:
        """What the names of shared memory begin with that an instance's processes make."""
        return f"epd-{self.launch_id}-stage-{instance}-"

    def record_group(self, instance: str, pid: int) -> None:
        """Remember a process group before anything can go wrong with it."""
        found = processes.stat(pid)
        entry = {"instance": instance, "pid": pid, "start_ticks": found.start_ticks if found else 0}
        with (self.path / "groups.jsonl").open("a", encoding="ascii") as file:
            file.write(json.dumps(entry) + "\n")

    def keep_log(self, instance: str) -> Path:
        """Copy a failed stage's log to where it outlives the launch (one per instance, overwritten by the next)."""
        kept = self.path.parent / f"last-failure-{instance}.log"
        kept.write_bytes(read_log(self.log(instance), 0, -1)[0])
        return kept

    def clear_instance(self, instance: str) -> None:
        """Remove what a dead life of an instance left: sockets, traffic board, shared memory. Logs stay."""
        for pattern in ("cores*", "events", "features*", "http", "kv*", "load", "traffic"):
            for path in self.path.glob(f"{instance}.{pattern}"):
                path.unlink(missing_ok=True)
        self._unlink(f"epd-{self.launch_id}-kv-{instance}-", self.memory_names(instance))

    def remove(self) -> None:
        """Remove directory and shared memory. Any number of calls; those of a fork do nothing."""
        if os.getpid() != self.maker:
            return
        self._unlink(f"epd-{self.launch_id}-")
        shutil.rmtree(self.path, ignore_errors=True)
        for file in self.held:
            file.close()

    def _unlink(self, *names: str) -> None:
        """Shared memory and semaphores (glibc's `sem.`) whose names begin with one of these."""
        for name in names:
            for path in (*self.shm.glob(f"{name}*"), *self.shm.glob(f"sem.{name}*")):
                path.unlink(missing_ok=True)


def held_in(shm: Path, launch_id: str) -> Path:
    """The file that tells, beside a launch's shared memory, whether its launcher lives."""
    return shm / f"epd-{launch_id}-{HELD}"


def launches_in(shm: Path) -> list[str]:
    """Ids of the launches whose shared memory lies there, their launchers dead or alive."""
    return sorted(path.name.removeprefix("epd-").removesuffix(f"-{HELD}") for path in shm.glob(f"epd-*-{HELD}"))


def is_of_this_namespace(path: Path) -> bool:
    """Whether the pids that the run directory names mean something here."""
    try:
        owner = json.loads((path / "launcher.json").read_text(encoding="ascii"))
        return bool(owner["pid_namespace"] == processes.pid_namespace())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def owner_of(path: Path) -> int:
    """Pid of the launcher whose run directory it is. Raises OSError: it has gone."""
    return int(json.loads((path / "launcher.json").read_text(encoding="ascii"))["pid"])


def read_groups(path: Path) -> dict[int, int]:
    """Recorded process groups: pid → start ticks. A torn last line is skipped."""
    return {entry["pid"]: entry["start_ticks"] for entry in _group_lines(path)}


def read_instances(path: Path) -> list[str]:
    """Names under which process groups were recorded, in the order of their first start."""
    return list(dict.fromkeys(str(entry["instance"]) for entry in _group_lines(path)))


def _group_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = (path / "groups.jsonl").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def private_folder(root: Path) -> None:
    """Make the run root, and refuse one that somebody else could write to (it lies in /tmp)."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise ConfigError(f"run directory {root} cannot be made: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if root.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"run directory {root} is not private to this user; remove it or set XDG_RUNTIME_DIR")
