"""`epd-serve store` against running launches: the right one is found, its features are listed, counted and removed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.second_tier import recorded_pool
from deploy.cli.command import main
from deploy.cli.store_command import NAMESPACE, Segment, parse_metrics, size
from deploy.host.environment import module_command, module_environment
from deploy.host.parent_death_exec import parent_death_exec
from deploy.host.ports import exposed, listeners
from store.arena import Arena
from store.mooncake.client import MooncakeConfig
from tests.deploy import fake_master
from tests.deploy.launched import FakeLaunch
from tests.waiting import PATIENCE_S

DATA = bytes(3000)


def arena_of(one: FakeLaunch) -> Arena:
    return Arena.attach(Path("/dev/shm") / f"epd-{one.run_path.name}-arena", prefault=False)


def ask(capsys: pytest.CaptureFixture[str], root: Path, *argv: str) -> tuple[int, str, str]:
    code = main(["store", *argv, "--run-root", str(root)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def ask_json(capsys: pytest.CaptureFixture[str], root: Path, *argv: str) -> Any:
    code, out, err = ask(capsys, root, *argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_without_a_launch_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, tmp_path, "ls")
    assert (code, out) == (1, "")
    assert err == "epd-serve: no launch of this user runs here that keeps features\n"


def test_features_are_listed_counted_and_removed_unless_leased(
    launch: Callable[..., FakeLaunch], capsys: pytest.CaptureFixture[str]
) -> None:
    one = launch("(E-P)-D")
    one.wait_ready()
    root = one.root
    assert "keeps no features now" in ask(capsys, root, "ls")[1]
    arena = arena_of(one)
    for name in ("held", "free", "also"):
        assert arena.put(name * 16, DATA, shape=(3, 500), dtype="bfloat16")
    lease = arena.lease("held" * 16)
    assert lease is not None

    code, out, _ = ask(capsys, root, "ls")
    assert code == 0
    header, *rows = out.splitlines()
    assert header.split() == ["key", "shape", "dtype", "size", "leased", "idle"]
    held = next(row for row in rows if row.startswith("heldheldheldheld "))
    assert held.split()[1:5] == ["3×500", "bfloat16", "3.0", "kB"]
    assert len(rows) == 3

    stat = ask_json(capsys, root, "stat")
    assert (stat["arena"]["features"], stat["arena"]["leased"], stat["arena"]["puts"]) == (3, 1, 3)
    assert stat["pool"] is None
    assert "3 features, 1 leased" in ask(capsys, root, "stat")[1]

    cleared = ask_json(capsys, root, "clear")
    assert (cleared["removed"], cleared["leased"]) == (2, 1)
    assert [row["key"] for row in ask_json(capsys, root, "ls")] == ["held" * 16]
    lease.release()
    assert "removed 1 features; 0 stay" in ask(capsys, root, "clear")[1]
    arena.close()


@pytest.mark.slow
def test_of_several_launches_one_has_to_be_named(
    launch: Callable[..., FakeLaunch], capsys: pytest.CaptureFixture[str]
) -> None:
    one = launch("(E-P)-D")
    one.wait_ready()
    first = one.run_path.name
    two = launch("E-PD")
    two.wait_ready()
    code, _, err = ask(capsys, one.root, "stat")
    assert code == 2
    assert "several launches run; name one by --launch" in err
    (named,) = re.findall(rf"{first} \([^)]*?((?:\w+, )*\w+)\)", err)
    assert sorted(named.split(", ")) == ["D0", "E0", "P0"], "in whatever order they came up"
    assert ask_json(capsys, one.root, "stat", "--launch", first)["launch"] == first
    assert "no single launch 'zzz'" in ask(capsys, one.root, "stat", "--launch", "zzz")[2]


@pytest.mark.slow
def test_the_second_tier_is_asked_over_http(
    launch: Callable[..., FakeLaunch], capsys: pytest.CaptureFixture[str]
) -> None:
    one = launch("(E-P)-D", "+mm_store=mooncake", "master=")
    one.wait_ready()
    pool = ask_json(capsys, one.root, "stat")["pool"]
    assert (pool["features"], pool["clients"], pool["used_bytes"]) == (3, 2, 1000)
    assert "127.0.0.1:14027  1.0 kB of 4.1 kB" in ask(capsys, one.root, "stat")[1]


def test_metrics_of_a_master_are_read() -> None:
    report = parse_metrics(fake_master.METRICS + "master_odd NaN\nother 5\n")
    assert report.segments == (Segment("127.0.0.1:14027", 1000, 4096),)
    assert (report.features, report.capacity_bytes) == (3, 4096)
    assert parse_metrics("").segments == ()


def test_the_namespace_that_is_cleared_is_the_one_that_stages_use() -> None:
    assert MooncakeConfig(master="m:1").namespace == NAMESPACE


def test_our_modules_are_found_where_the_working_directory_has_others_of_their_name(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").write_text("raise RuntimeError('not ours')")
    command = module_command(*parent_death_exec(["/bin/true"]))
    subprocess.run(command, env=module_environment(), cwd=tmp_path, check=True, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.mooncake
def test_clear_reaches_the_second_tier(launch: Callable[..., FakeLaunch], capsys: pytest.CaptureFixture[str]) -> None:
    one = launch("(E-P)-D", "+mm_store=mooncake")
    one.wait_ready()
    master, _ = recorded_pool(one.run_path)
    owner = textwrap.dedent(
        f"""
        import sys
        import numpy as np
        from store.feature import FeatureMeta
        from store.mooncake.client import MooncakeConfig
        from store.mooncake.tier import MooncakeStore
        data = np.zeros(4096, dtype=np.uint8)
        pool = MooncakeStore.connect(MooncakeConfig(master="{master}", segment_bytes=16 << 20), data)
        pool.put_from(FeatureMeta("k" * 64, (3000,), "uint8", 3000), data.ctypes.data, on_failure=lambda: None)
        print("stored", flush=True)
        sys.stdin.read()
        pool.close()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "stored"
        assert any(port.everywhere for port in listeners([process.pid])), "as Mooncake binds them"
        assert asyncio.run(exposed([process.pid], "127.0.0.1")) == [], "and as we narrow them"
        pool = ask_json(capsys, one.root, "stat")["pool"]
        assert (pool["features"], len(pool["segments"])) == (1, 1)
        assert ask_json(capsys, one.root, "clear")["pool_removed"] == 1
        assert ask_json(capsys, one.root, "stat")["pool"]["features"] == 0
    finally:
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(12, "12 B"), (8_600_000, "8.6 MB"), (116e6, "116.0 MB"), (999_999, "1.0 MB"), (5e12, "5000.0 GB")],
)
def test_sizes_are_decimal(nbytes: int, shown: str) -> None:
    assert size(int(nbytes)) == shown
