"""Documented commands, run in their smallest form: with the words of the document, and further ones that make it short.

What starts real stages or takes minutes is `slow`. Every `epd-bench` command of the documents has its entry here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from bench.cli import parser as bench_parser
from deploy.cli.command import parser as serve_parser
from deploy.host.ports import free_ports
from epd_serve.demo.presets import builtin_model_dir
from tests.deploy.ray.nodes import ray_nodes
from tests.docs.documents import ROOT, Command
from tests.docs.test_commands import every_command, is_name
from tests.waiting import PATIENCE_S, wait_for

MODULES = {"epd-serve": "deploy.cli", "epd-bench": "bench.cli"}
RESULTS = ROOT / "bench" / "results"
LIMIT_S = 900
SMALL: Mapping[str, str] = {
    "ablations": "--engine sim --rates 4 --seconds 2 --rounds 1 --only both,pixels",
    "change": "--quick --only flips --flips 3",
    "follow": "--quick --only square --periods 1",
    "compare": "",
    "latency": "--engine sim --quick",
    "layouts": "--engine sim --layouts TP1,E-P-D --rates 2 --duration 2 --min-samples 1",
    "load": "--rate 2 --duration 3 --min-samples 1 --late-ms 1000",
    "memory-tables": "",
    "papers": "--quick",
    "workload": "--n 4",
}
"""By the beginning of the command: what makes it short, with stages simulated or none at all."""
CLOSED_LOOP = "--n 8 --min-samples 1 --late-ms 1000"

REAL: Mapping[str, str] = {
    "interference": "--quick --operators norm,decode_attention",
    "memory-tables --real": "--quick",
    "transfer ep": "--quick",
    "transfer pd": "--quick",
}
"""Those that need real stages, or processes that are busy for minutes."""

TESTED_ELSEWHERE: Mapping[str, str] = {
    "plan": "tests/bench/test_planned.py: hours of real stages",
    "workload NAME --rate 1 --export traffic": "tests/bench/workloads/test_traffic.py",
    "load http://127.0.0.1:8000 --workload recorded:traffic.jsonl": "tests/bench/workloads: wants a recording",
    "aisbench": "tests/bench/aisbench: it wants an environment of 2.2 GB",
    "model-check": "tests/bench/model_check, tests/e2e/test_model_check.py: it wants two servers",
    "proxy": "tests/bench/proxy: half an hour",
    "report": "tests/bench: draws what `layouts` has measured, which ends with the same",
}


def bench_words(command: Command) -> str:
    return " ".join(command.words[1:])


def kind(command: Command, table: Mapping[str, object]) -> str | None:
    """The longest entry of a table that a command begins with."""
    fitting = [name for name in table if f"{bench_words(command)} ".startswith(f"{name} ")]
    return max(fitting, key=len, default=None)


def without(flags: Sequence[str], words: Sequence[str]) -> list[str]:
    """The words without these flags and their values."""
    return [word for before, word in pairwise(["", *words]) if before not in flags and word not in flags]


def once(commands: Sequence[Command]) -> list[Command]:
    """Of those that differ by what they write alone, the one that writes most: it runs what the others run."""
    by_what = {
        tuple(without(("--json", "--plot", "--profile"), one.words)): one
        for one in sorted(commands, key=lambda one: len(one.words))
    }
    return list(by_what.values())


EVERY = [one for one in every_command() if "reference/cli.md" not in one.where]  # headings: names of commands
BENCH = [
    command for command in EVERY if command.words[0] == "epd-bench" and not is_name(bench_parser(), command.words[1:])
]
CHOSEN = {command: max((SMALL, REAL, TESTED_ELSEWHERE), key=lambda t: len(kind(command, t) or "")) for command in BENCH}
SERVE = [
    one
    for one in EVERY
    if one.words[:2] == ("epd-serve", "serve") and len(one.words) > 2 and not is_name(serve_parser(), one.words[1:])
]
LAYOUTS = [one for one in EVERY if one.words[:2] == ("epd-serve", "layout") and len(one.words) > 2]
LOOKING = [one for one in EVERY if one.words[:2] in (("epd-serve", "why"), ("epd-serve", "top"))]
DOCTOR = [one for one in EVERY if one.words[:2] == ("epd-serve", "doctor") and "--imports" not in one.words]
PROFILES = [one for one in EVERY if one.words[:2] == ("epd-serve", "profile") and len(one.words) > 2]
PLACES = {
    "/models/Qwen2.5-VL-7B-Instruct": builtin_model_dir(),
    "/models/Qwen3-VL-8B-Instruct": builtin_model_dir(),
    "Qwen2.5-VL-7B-Instruct": builtin_model_dir(),
    "MODEL": builtin_model_dir(),
    "docs/examples/deployment.yaml": ROOT / "docs/examples/deployment.yaml",
    "SPEC": "E-P-D",
    "NAME": "pope-like",
    "A": RESULTS / "ttft.json",
    "B": RESULTS / "ttft-second.json",
    "before.json": RESULTS / "ttft.json",
    "after.json": RESULTS / "ttft-second.json",
    "FILE": "file.json",
    "FILE.png": "file.png",
}
"""What stands in a document for the reader's own, and what it is here."""


def test_every_measurement_of_the_documents_is_run_or_tested_elsewhere():
    assert [str(command) for command in BENCH if kind(command, CHOSEN[command]) is None] == []


@pytest.mark.parametrize("command", LAYOUTS + DOCTOR, ids=str)
def test_what_looks_at_layouts_and_machines_says_something(command, tmp_path):
    done = run(command.words, tmp_path, accepted=(0, 1) if "doctor" in command.words else (0,))

    assert done.stdout.strip()


@pytest.mark.parametrize("target", ["help"])
def test_make_lists_what_there_is(target):
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, check=True)

    assert {"serve", "test", "docs", "reference"} <= {line.split()[0] for line in done.stdout.splitlines() if line}


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in BENCH if CHOSEN[one] is SMALL], ids=str)
def test_a_measurement_without_real_stages_runs(command, tmp_path, endpoint):
    # A plain vLLM is no stage that could be simulated.
    words = without(("--baselines",), command.words)
    words = [word.replace("http://127.0.0.1:8000", endpoint) for word in words]
    if "layouts-monday/" in words or "out/tp1x2" in words:
        pytest.skip("folders of two experiments of the reader's")

    short = CLOSED_LOOP if "--concurrency" in words else SMALL[kind(command, SMALL)]
    run((*words, *shlex.split(short)), tmp_path)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("command", once([one for one in BENCH if CHOSEN[one] is REAL]), ids=str)
def test_a_measurement_of_real_stages_runs(command, tmp_path):
    run((*command.words, *shlex.split(REAL[kind(command, REAL)])), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", SERVE, ids=str)
def test_a_deployment_is_served_as_written_but_simulated(command, tmp_path):
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_nodes()) if "ray" in command.words else None
        environment = cluster.environment if cluster is not None else None
        base = stack.enter_context(simulated(command.words[2:], tmp_path, environment=environment))
        assert httpx.get(f"{base}/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in PROFILES if "--calibrate" not in one.words], ids=str)
def test_a_profile_is_written(command, tmp_path):
    simulated = ("--engine", "sim", "--sim-profile", str(profile(tmp_path)), "--quick", "--parts", "alone")

    run((*command.words, *simulated, "--out", "out.json"), tmp_path)

    assert (tmp_path / "out.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", LOOKING, ids=str)
def test_what_looks_at_a_deployment_sees_it(command, looked_at, tmp_path):
    base, root = looked_at
    name = "41f6d0c8a0d24f2c9a1f"  # the document's request
    body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    httpx.post(f"{base}/v1/chat/completions", json=body, headers={"x-request-id": name}, timeout=PATIENCE_S)
    words = [name if word == "REQUEST_ID" else word for word in command.words]
    short = ("--once",) if words[1] == "top" and "--once" not in words else ()

    done = run((*words, *short, "--run-root", root), tmp_path)

    assert (name if words[1] == "why" else "P0") in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in EVERY if one.words[1:2] == ("demo-model",)], ids=str)
def test_a_model_is_written(command, tmp_path):
    if "--preset" not in command.words:
        pytest.skip("names the command only")

    run(command.words, tmp_path)

    assert (tmp_path / "DIR/config.json").is_file()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory) -> Iterator[str]:
    with simulated(("--layout", "E-P-D"), tmp_path_factory.mktemp("endpoint")) as base:
        yield base


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A deployment and where its run directory is."""
    with tempfile.TemporaryDirectory(prefix="epd-") as root:
        with simulated(("--layout", "E-P-D"), tmp_path_factory.mktemp("looked-at"), root) as base:
            yield base, root


@contextmanager
def simulated(
    words: Sequence[str], folder: Path, below: str | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A deployment by the words of a document, on simulated stages, devices of this machine and free ports.

    Args:
        below: for its run directory.
        environment: of a process that finds a cluster by it, whose nodes share the addresses of this machine.
    """
    port, admin = free_ports(2)
    words = in_place(words, folder)
    instead = {
        "--admin-port": str(admin),
        "--admin-host": "127.0.0.1",
        "--device": "cpu",
        "--host": "127.0.0.1",
        "--mm-store": "arena",
        "--sim-profile": str(profile(folder)),
    }
    words = [instead.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    words = [word for word in words if word != "--detach"]  # it ends with its test
    words = without(("--core-share", "--ray-address"), words)  # simulated stages compute on no cores,
    if any("--limit-mm-per-prompt" in word for word in words):
        words = without(("--stage-args",), words)  # and bound no images
    if words and not words[0].startswith("-"):
        words = words[1:]  # simulated stages have a model of their own
    for key in (folder / "admin.key", folder / "clients.keys"):
        key.write_text("a" * 64)
        key.chmod(0o600)
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="epd-") as own:  # sockets lie in it, whose paths have to be short
        simulate = ["--engine", "sim", "--port", str(port), "--lame-duck-s", "0", "--run-root", below or own]
        if environment is not None:
            simulate += ["--fronts", "here"]
        process = start("epd-serve", ("serve", *words, *simulate), folder, environment)
        try:
            wait_for(lambda: process.poll() is not None or answers(f"{base}/ready?all"))
            assert process.poll() is None, process.communicate()
            yield base
        finally:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, (out, err)


def profile(folder: Path) -> Path:
    """The profile that the page on simulated stages shows."""
    page = (ROOT / "docs/guides/simulation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    path = folder / "profile.json"
    path.write_text(block)
    return path


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def run(words: Sequence[str], folder: Path, accepted: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
    process = start(words[0], in_place(words[1:], folder), folder)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode in accepted, (out[-2000:], err[-2000:])
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def in_place(words: Sequence[str], folder: Path) -> list[str]:
    """The words with the reader's own replaced. A folder after `--model` is one of a model, others are new."""
    placed = [str(PLACES.get(word, word)) for word in words]
    for at, word in enumerate(words):
        if word == "DIR" and at and words[at - 1] == "--model":
            placed[at] = str(builtin_model_dir())
    return placed


def start(
    program: str, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    environment = {**(environment or os.environ), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", MODULES[program], *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
