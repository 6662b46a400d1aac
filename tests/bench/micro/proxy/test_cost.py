"""Where CPU time goes: whose it is, and that a process is really sampled."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.micro.proxy import cost


def test_the_innermost_module_that_is_named_has_the_time() -> None:
    stack = ["deploy.front.process", "uvicorn.protocols.http.httptools_impl", "proxy.pipeline"]
    assert cost.step_of(stack) == "attempts, deadlines, cancelling"
    assert cost.step_of([*stack, "proxy.registry.table", "random"]) == "choice of an instance, its ledger"
    assert cost.step_of([*stack, "proxy.stages.connection"]) == "HTTP with the stage"
    assert cost.step_of(["deploy.front.process", "asyncio.runners"]) == cost.REST


def test_shares_are_of_what_was_measured_and_without_imports() -> None:
    counted = {"uvicorn.server": 3, "proxy.records.records": 1, "importlib._bootstrap proxy.pipeline": 40}
    rows = list(cost.steps([counted], 100.0))
    assert [(row["to"], row["us_per_request"]) for row in rows] == [
        ("HTTP with the client", 75.0),
        ("records, metrics, traces", 25.0),
    ]


@pytest.mark.parametrize("module", [module for modules in cost.STEPS.values() for module in modules])
def test_every_module_that_is_named_is_there(module: str) -> None:
    assert find_spec(module) is not None


def test_a_process_of_the_program_is_sampled_and_no_other(tmp_path: Path) -> None:
    env = cost.sampling("timeit", tmp_path)
    subprocess.run([sys.executable, "-m", "this"], env=env, check=True, capture_output=True)
    assert not list(tmp_path.glob("*.json"))
    subprocess.run([sys.executable, "-m", "timeit", "-n", "20000000"], env=env, check=True, capture_output=True)
    (counted,) = (json.loads(one.read_text(encoding="utf-8")) for one in tmp_path.glob("*.json"))
    assert any("__main__" in stack.split() for stack in counted)
