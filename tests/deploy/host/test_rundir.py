"""Run directories and the reaper: names that fit, privacy, and proof before anything is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host import launches, rundir
from deploy.host.environment import LAUNCH_ENV, run_root
from deploy.host.launches import reap_dead
from deploy.host.rundir import RunDir
from epd_serve.errors import ConfigError
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[3]
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]


CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
LAUNCHER = """
import sys, time
from pathlib import Path
import deploy.host.rundir
deploy.host.rundir.shm_root = lambda: Path(sys.argv[2])
run = deploy.host.rundir.RunDir.create(Path(sys.argv[1]))
run.arena.touch()
run.record_group("E0", 1)
print(run.launch_id, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of /dev/shm, where dead launches of others may lie."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for module in (rundir, launches):
        monkeypatch.setattr(module, "shm_root", lambda: folder)
    return folder


def make_dead(run: RunDir) -> None:
    """What the kernel does to the locks of a launcher that ends."""
    for file in run.held:
        file.close()


def test_a_run_directory_is_private_and_leaves_with_its_shared_memory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    assert run.path.parent.stat().st_mode & 0o077 == 0
    assert run.ipc("D0.kvw{rank}") == f"ipc://{run.path}/D0.kvw{{rank}}"
    run.arena.touch()
    run.remove()
    run.remove()
    assert not run.path.exists()
    assert not run.arena.exists()


def test_a_root_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="not private"):
        RunDir.create(root)


def test_shared_memory_that_cannot_be_written_is_refused(tmp_path: Path, shm: Path) -> None:
    shm.rmdir()
    with pytest.raises(ConfigError, match=f"{shm}/.*: No such file"):
        RunDir.create(tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_root_too_long_for_sockets_is_refused_and_not_left_behind(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 25)
    with pytest.raises(ConfigError, match="too long for sockets; give a shorter one by --run-root or XDG_RUNTIME_DIR"):
        RunDir.create(root)
    assert list(root.iterdir()) == []


def test_the_root_is_xdg_runtime_dir_or_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_root() == tmp_path / f"epd-serve-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such")
    assert run_root() == Path(f"/tmp/epd-serve-{os.getuid()}")


def test_what_a_dead_life_left_is_cleared_without_its_log(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    names = (
        "E1.log",
        "E1.events",
        "E1.features0",
        "E1.http",
        "E1.kv",
        "E1.kvw0",
        "E1.kvnews0",
        "E1.load",
        "E1.traffic",
        "E10.events",
    )
    for name in names:
        run.socket(name).touch()
    memory = run.memory_names("E1")
    left = [run.shm / name for name in (f"epd-{run.launch_id}-kv-E1-0-D0", f"{memory}psm_1", f"sem.{memory}mp-2")]
    kept = [run.shm / f"{run.memory_names('E10')}psm_1", run.shm / f"sem.{run.memory_names('E10')}mp-2", run.arena]
    for path in (*left, *kept):
        path.touch()
    run.clear_instance("E1")
    assert {name for name in names if run.socket(name).exists()} == {"E1.log", "E10.events"}
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    run.remove()
    assert not any(path.exists() for path in kept)


def test_a_living_launch_is_not_reaped(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    assert reap_dead(tmp_path / "root") == []
    assert run.path.exists()
    run.remove()


@pytest.fixture
def contained(tmp_path: Path, shm: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a PID namespace of its own, with our run root and our shared memory."""
    tried = subprocess.run([*CONTAINED, "true"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespace for this user: {tried.stderr.strip()}")
    argv = [*CONTAINED, sys.executable, "-c", LAUNCHER, str(tmp_path / "root"), str(shm)]
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    yield launcher
    launcher.kill()
    launcher.wait(PATIENCE_S)


@pytest.mark.parametrize("run_directory", ["kept", "lost"])
def test_a_launch_of_another_container_is_reaped_when_it_is_dead_and_not_before(
    tmp_path: Path, shm: Path, contained: subprocess.Popen[str], run_directory: str
) -> None:
    assert contained.stdout is not None
    launch_id, root = contained.stdout.readline().strip(), tmp_path / "root"
    if run_directory == "lost":
        shutil.rmtree(root)
    assert reap_dead(root) == [] and (shm / f"epd-{launch_id}-arena").exists()
    contained.kill()  # and with it, soon, all of its namespace
    wait_for(lambda: reap_dead(root) == [launch_id])
    assert list(shm.iterdir()) == [] and not (root / launch_id).exists()


def test_pids_that_a_dead_launch_of_another_container_recorded_mean_nothing_here(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    same_number = subprocess.Popen(SLEEP, start_new_session=True)
    run.record_group("E0", same_number.pid)  # even the start would fit
    (run.path / "launcher.json").write_text(json.dumps({"pid": 1, "pid_namespace": "pid:[1]"}))
    make_dead(run)
    try:
        assert reap_dead(tmp_path / "root") == [run.launch_id]
        assert same_number.poll() is None
    finally:
        same_number.kill()
        same_number.wait()


def test_a_directory_without_a_lock_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "root" / "other").mkdir(parents=True)
    assert reap_dead(tmp_path / "root") == []
    assert (tmp_path / "root" / "other").exists()


def test_a_dead_launch_loses_processes_directory_and_shared_memory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    run.arena.touch()
    group = subprocess.Popen(SLEEP, start_new_session=True)
    run.record_group("E0", group.pid)
    marked = subprocess.Popen(SLEEP, env={**os.environ, LAUNCH_ENV: run.launch_id})
    make_dead(run)
    assert reap_dead(tmp_path / "root") == [run.launch_id]
    assert (group.wait(PATIENCE_S), marked.wait(PATIENCE_S)) == (-9, -9)
    assert not run.path.exists()
    assert not run.arena.exists()


def test_a_process_group_whose_number_was_reused_is_left_alone(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    with (run.path / "groups.jsonl").open("a") as file:
        file.write(json.dumps({"instance": "E0", "pid": stranger.pid, "start_ticks": 1}) + "\n")
        file.write('{"torn')
    make_dead(run)
    try:
        assert reap_dead(tmp_path / "root") == [run.launch_id]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_fork_of_who_made_it_removes_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "root")
    run.arena.touch()
    child = os.fork()
    if child == 0:
        run.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert run.path.exists() and run.arena.exists()
    run.remove()
    assert not run.path.exists() and not run.arena.exists()
