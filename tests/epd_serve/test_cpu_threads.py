"""How many threads a stage on CPU gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploy.host.environment import stage_environment
from epd_serve.cpu_threads import COUNT_ENV, THREAD_FLOP, WAIT_ENV, cpu_threads
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.engine.argv import HCCL_PORTS_ENV, V2_RUNNER_ENV
from epd_serve.roles import Role
from epd_serve.stage_work import OUTPUT_TOKENS, StageWork, read_stage_work

CORES = tuple(range(8))


def work(*, encode: float = 1e15, prefill: float = 1e15, token: float = 1e15) -> StageWork:
    return StageWork(encode=encode, prefill=prefill, decode=token * OUTPUT_TOKENS)


@pytest.mark.parametrize(("threads_worth", "count"), [(0.01, 1), (1, 1), (3, 3), (8, 8), (1000, 8)])
def test_a_thread_for_so_much_work_and_none_without_a_core(threads_worth: float, count: int) -> None:
    made = cpu_threads(work(token=threads_worth * THREAD_FLOP), Role.PD, CORES, 1)
    assert (made.cores, made.count) == (CORES, count)
    assert replace(made, cores=CORES[:2]).count == min(2, count), "on other cores, while it runs"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("threads_worth", "tp", "all_compute"), [(8, 1, True), (3, 1, False), (4, 2, True)])
def test_the_server_of_a_stage_that_only_decodes_keeps_off_cores_that_all_compute(
    role: Role, threads_worth: float, tp: int, all_compute: bool
) -> None:
    flop = threads_worth * THREAD_FLOP
    made = cpu_threads(work(encode=flop, prefill=flop, token=flop), role, CORES, tp)
    assert made.apart is (role is Role.D and all_compute)


@pytest.mark.parametrize("role", Role)
def test_the_smallest_step_of_a_role_decides(role: Role) -> None:
    small = {"encode": 2 * THREAD_FLOP, "prefill": 3 * THREAD_FLOP, "token": 4 * THREAD_FLOP}
    assert cpu_threads(work(**small), role, CORES, 1).count == (4 if role.decodes else 3 if role.prefills else 2)


def test_a_model_of_which_too_little_is_known_gets_all_cores() -> None:
    assert cpu_threads(None, Role.EPD, CORES, 1).count == 8
    assert cpu_threads(None, Role.EPD, CORES, 2).count == 4


def test_the_demo_model_decodes_with_one_thread() -> None:
    assert cpu_threads(read_stage_work(builtin_model_dir()), Role.EPD, CORES, 1).count == 1


@pytest.mark.parametrize("name", [COUNT_ENV, WAIT_ENV, *HCCL_PORTS_ENV, V2_RUNNER_ENV])
def test_what_the_operator_has_set_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added = dict.fromkeys((COUNT_ENV, WAIT_ENV, *HCCL_PORTS_ENV, V2_RUNNER_ENV, "OTHER"), "ours")
    monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("OTHER", "theirs")
    made = stage_environment(added, Path("/run/x"), "cpu")
    assert {key: made[key] for key in added} == {**added, name: "theirs"}
