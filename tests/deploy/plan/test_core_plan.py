"""Core shares of one deployment: who gets which cores, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.launch.ready_message import ready_message
from deploy.options.config import DeployConfig, build_config
from deploy.plan import core_plan
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.core_plan import CorePlan, plan_cores
from deploy.plan.machines import Machine, Machines
from epd_serve.cpu_threads import CPU_THREADS_ENV
from epd_serve.engine.argv import stage_command
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import lower
from npu_ops.core_grants import CoreGrant
from npu_ops.core_sets import core_sets
from npu_ops.discovery import DeviceInventory
from tests.deploy.wired import RUN, Wired


def planned(layout: str, text: str, device: str, cores: int = 0) -> CorePlan:
    parsed = parse(layout)
    sets = core_sets(parsed.device_count, range(cores)) if cores else None
    return plan_cores(text, lower(parsed, range(parsed.device_count)), device, sets, None)


def on_cores(count: int, layout: str, text: str) -> Blueprint:
    here = Machines((Machine("local", DeviceInventory("cpu"), cores=tuple(range(count))),))
    return draw(DeployConfig(layout=layout, device="cpu", core_share=text), machines=here)


def test_without_the_option_neighbours_share_all_cores() -> None:
    blueprint = on_cores(4, "(E-P)-D", "")
    assert [blueprint.cores_of(plan) for plan in blueprint.plans] == [(0, 1), (0, 1), (2, 3)]
    assert not blueprint.core_orders and {plan.core_share for plan in blueprint.plans} == {None}


def test_on_cpu_neighbours_get_cores_of_their_own() -> None:
    blueprint = on_cores(16, "(E-P)-D", "E=0.3,P=0.7")
    assert {plan.id: blueprint.cores_of(plan) for plan in blueprint.plans} == {
        "E0": (0, 1),
        "P0": (2, 3, 4, 5, 6, 7),
        "D0": tuple(range(8, 16)),
    }
    assert [plan.core_share for plan in blueprint.plans] == [0.3, 0.7, None]
    encoder, decoder = (Wired(blueprint).stage(name) for name in ("E0", "D0"))
    assert encoder.core_order is not None and encoder.core_order.report == "/run/x/E0.cores{rank}.json"
    assert json.loads(stage_command(encoder).env[CPU_THREADS_ENV])["cores"] == [0, 1]
    assert decoder.core_order is None


@pytest.mark.parametrize(("layout", "cores"), [("(E-P)-D", 2), ("(E-P-D)", 2), ("(E-P)-D-E", 2)])
def test_too_few_cpu_cores_for_cores_of_their_own_are_refused(layout: str, cores: int) -> None:
    with pytest.raises(
        ConfigError, match=r"share [12] CPU core\(s\), and each needs one of its own .*drop --core-share"
    ):
        on_cores(cores, layout, "auto")


def test_simulated_stages_have_no_cores() -> None:
    with pytest.raises(ConfigError, match="simulated stages compute on no cores: drop --core-share"):
        draw(DeployConfig(layout="(E-P)-D", engine="sim", core_share="auto"))


def test_shares_that_concern_nobody_are_pointed_out() -> None:
    assert planned("E-P-D", "auto", "npu").warnings == (
        "--core-share auto changes nothing: no two stages of this layout share a device",
    )


def test_on_npus_the_workers_find_their_cores_themselves() -> None:
    found = planned("(E-P)-D", "E=0.3,P=0.7", "npu")
    assert set(found.orders) == {"E0", "P0"} and found.warnings == ()
    order = found.orders["P0"]
    assert (order.device, order.share, order.shares) == ("npu", 0.7, {"E0": 0.3, "P0": 0.7})
    assert (order.cores, order.enforced) == ((), True)


@pytest.mark.parametrize("why", ["", "no MPS control daemon at /tmp/nvidia-mps"])
def test_on_cuda_shares_are_enforced_by_mps_or_not_at_all(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_plan, "why_no_mps", lambda: why)
    found = planned("(E-P)-D", "E=0.3,P=0.7", "cuda")
    assert {order.enforced for order in found.orders.values()} == {not why}
    assert len(found.warnings) == bool(why)
    if why:
        assert found.warnings[0].startswith(
            f"core shares are not enforced, the stages of a GPU take turns instead: {why}"
        )


def test_a_share_is_checked_when_the_configuration_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E gets 1\.5"):
        DeployConfig(core_share="E=1.5")
    file = tmp_path / "d.yaml"
    file.write_text("core_share: {E: 0.3, P: 0.7}\n")
    assert build_config({}, str(file)).core_share == "E=0.3,P=0.7"
    file.write_text("core-share: auto\n")
    assert build_config({}, str(file)).core_share == "auto"
    file.write_text("core_share: 0.3\n")
    with pytest.raises(ConfigError, match=r"core_share is 0.3; expected str"):
        build_config({}, str(file))


def test_the_ready_message_shows_what_the_workers_read_back() -> None:
    blueprint = on_cores(8, "(E-P)-D", "E=0.3,P=0.7")
    run, instances = RUN.path, Wired(blueprint).instances()
    grant = CoreGrant(0, 0.3, {"cube": 7, "vector": 14}, {"cube": 24, "vector": 48})
    granted = {**instances, "E0": replace(instances["E0"], cores=(grant, grant))}
    message = ready_message(blueprint, run, granted, 1.0)
    assert "  cores     E0: 7 of 24 cube, 14 of 48 vector   P0: unknown\n" in message
    shared = on_cores(8, "(E-P)-D", "")
    assert "  cores     " not in ready_message(shared, run, Wired(shared).instances(), 1.0)
