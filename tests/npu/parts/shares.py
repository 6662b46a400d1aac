"""Core shares: what two processes and then two stages read back of theirs, and what a share does to an operator alone.

On CUDA an MPS control daemon of our own runs meanwhile, unless one runs already: it needs no root, only its folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.micro.interference.operators import default_sizes
from bench.micro.interference.processes import OperatorProcess, orders_of
from deploy.memory.check import VISIBLE
from epd_serve.errors import ConfigError
from npu_ops.mps import PIPE_DIRECTORY_ENV, why_no_mps
from tests.npu.launches import CardServing, served
from tests.npu.parts.layouts import in_a_storm
from tests.npu.rig import PartFailed, Rig, Skipped
from tests.waiting import wait_for

SHARES, CPU_SHARES = (0.3, 0.7), (0.5, 0.5)  # a CPU of two cores has one for each
OPERATORS = "prefill_matmul,decode_matmul"
DAEMON_S = 15.0
BENCH_S = 150.0
_TOOL = "nvidia-cuda-mps-control"
_LOG_DIRECTORY_ENV = "CUDA_MPS_LOG_DIRECTORY"


def run(rig: Rig) -> None:
    shares = CPU_SHARES if rig.card.kind == "cpu" else SHARES
    with mps(rig):
        try:
            _processes(rig, shares)
        except ConfigError as error:  # a CPU with one core
            raise Skipped(str(error)) from error
        _operators(rig, shares)
        with served(rig, "(E-PD)", core_share=f"E={shares[0]},PD={shares[1]}") as launch:
            _stages(launch)
            in_a_storm(launch)


@contextlib.contextmanager
def mps(rig: Rig) -> Iterator[None]:
    """MPS for all that this process starts. Raises Skipped where a CUDA machine cannot have it."""
    if rig.card.kind != "cuda" or not why_no_mps():
        yield
        return
    if shutil.which(_TOOL) is None:
        raise Skipped(f"{_TOOL} is not installed: the processes of a GPU take turns, shares would mean nothing")
    # A short path: it holds a socket.
    folder = Path(tempfile.mkdtemp(prefix="epd-mps-", dir="/tmp"))
    os.environ |= {PIPE_DIRECTORY_ENV: str(folder), _LOG_DIRECTORY_ENV: str(folder)}
    # A daemon that is told devices numbers them anew, and its clients' numbers would mean others.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE["cuda"]}
    try:
        started = subprocess.run([_TOOL, "-d"], env=environment, capture_output=True, text=True, timeout=DAEMON_S)
        try:
            wait_for(lambda: not why_no_mps(), "the MPS daemon", DAEMON_S)
        except AssertionError as error:
            raise Skipped(f"MPS does not start: {why_no_mps()}; {started.stdout}{started.stderr}") from error
        rig.row("mps", "started")
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([_TOOL], input="quit\n", text=True, capture_output=True, timeout=DAEMON_S)
        rig.report.keep_logs(rig.part, "mps", folder / "control.log", folder / "server.log")
        for name in (PIPE_DIRECTORY_ENV, _LOG_DIRECTORY_ENV):
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)


def _processes(rig: Rig, shares: tuple[float, float]) -> None:
    orders = orders_of(rig.card.kind, shares)
    for share, order in zip(shares, orders, strict=True):
        process = OperatorProcess(rig.card.kind, 0, default_sizes(rig.card.kind), order)
        try:
            rig.row("a_process_reads_back", process.ready(), share=share)
        finally:
            process.stop()


def _operators(rig: Rig, shares: tuple[float, float]) -> None:
    """Alone with a share against alone without: where they are equal, nothing holds a process to it."""
    words = ("interference", "--device", rig.card.kind, "--operators", OPERATORS, "--rounds", "1", "--seconds", "0.3")
    found = rig.bench(*words, "--core-share", ",".join(map(str, shares)), name="shares", limit_s=BENCH_S)
    for name in OPERATORS.split(","):
        alone = [row for row in found["rows"] if row.get("operator") == name and row["beside"] is None]
        whole_ms = min((row["latency_ms"] for row in alone if row["share"] is None), default=None)
        if whole_ms is None:
            raise PartFailed(f"epd-bench interference did not measure {name} alone: see log.txt")
        for row in alone:
            if row["share"] is not None:
                times = round(row["latency_ms"] / whole_ms, 2)
                rig.row("alone_with_a_share_over_all_cores", times, operator=name, share=row["share"])


def _stages(launch: CardServing) -> None:
    """What every worker read back is what it should have."""
    rig = launch.rig
    if not launch.core_share:
        rig.row("core_grants", "none: fewer CPU cores than stages")
        return
    told: dict[str, list[dict[str, Any]]] = {name: one["cores"] for name, one in launch.instances().items()}
    rig.row("core_grants", told)
    grants = [grant for own in told.values() for grant in own]
    rig.check(len(grants) == len(told), "every worker reads back its share", str(told))
    rig.check(all(grant["enforced"] for grant in grants), "something holds the stages to their shares", str(told))
    if rig.card.kind == "npu":
        fits = all(sum(one["cores"][kind] for one in grants) <= whole for kind, whole in grants[0]["of"].items())
        rig.check(fits, "together they have no more cores than there are", str(told))
