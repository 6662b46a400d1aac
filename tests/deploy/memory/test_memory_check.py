"""Stages that do not fit and devices in use: refused with a table and one change, before a process is started."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.command import main
from deploy.memory.check import OneStage, Outcome, share_memory
from deploy.memory.plan import memory_table, show_memory
from deploy.options.config import DeployConfig
from deploy.options.stage_args import parse_stage_args
from deploy.plan.blueprint import draw
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.model_facts import read_model_facts
from epd_serve.placement import lower
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties, DeviceUser
from tests.checkpoints import qwen25_vl_7b

GIB = 1 << 30
NO_VIDEO = "all:--limit-mm-per-prompt '{\"video\": 0}'"
PYTHON = DeviceUser(1234, "/usr/bin/python3", 44 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen25_vl_7b(tmp_path_factory.mktemp("models") / "Qwen2.5-VL-7B")


def planned(
    model: Path,
    layout: str,
    *stage_args: str,
    gib: int = 64,
    free: Sequence[int] = (),
    users: tuple[DeviceUser, ...] = (),
    kind: str = "npu",
    devices: int = 4,
) -> Outcome:
    """On 910B devices of 64 GiB; `free`, `users`: of the first of them."""
    plans = lower(parse(layout), range(devices))
    ids = tuple(range(devices))
    found = [
        DeviceProperties(
            index,
            "910B3",
            total_bytes=gib * GIB,
            free_bytes=(free[index] if index < len(free) else gib) * GIB,
            users=users if index == 0 else (),
        )
        for index in ids
    ]
    inventory = DeviceInventory("npu" if kind == "npu" else "cuda", ids, ("910B3",) * devices)
    return share_memory(
        plans, read_model_facts(str(model)), inventory, parse_stage_args(stage_args, plans), properties=found
    )


@pytest.mark.parametrize("layout", ["(E-P)-D", "(E-PD)", "(E-D)-P", "(E-P-D)", "(E-PD)x2", "(E:tp2-P:tp2)-D"])
def test_every_colocated_layout_of_a_7b_model_fits_on_64_gib(model: Path, layout: str) -> None:
    outcome = planned(model, layout, NO_VIDEO)
    assert outcome.plan is not None and outcome.warnings == ()
    for group in outcome.plan.groups:
        shares = [grant.share for grant in group.division.grants]
        if len(shares) > 1:
            assert sum(share or 0 for share in shares) < 1
            assert group.division.taken <= group.division.total
        assert all(grant.tokens >= 128000 for grant in group.division.grants if grant.need.kv_token)


def test_neighbours_are_told_share_and_cache_and_the_others_nothing(model: Path) -> None:
    plans = planned(model, "(E-P)-D", NO_VIDEO).shared(lower(parse("(E-P)-D"), range(2)))
    encode, prefill, decode = plans
    assert encode.memory_share is not None and encode.kv_cache_bytes is None
    assert prefill.memory_share is not None and prefill.kv_cache_bytes is not None
    assert decode.memory_share is None and decode.kv_cache_bytes is None


def test_an_encoder_without_room_for_the_longest_clip_is_a_warning(model: Path) -> None:
    (warning,) = planned(model, "(E-P)-D").warnings
    assert warning.startswith("E0 lacks") and "--max-model-len below 128000" in warning and '"video' in warning


def refused(model: Path, *arguments: object, **other: object) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(model, *arguments, **other)  # type: ignore[arg-type]
    return str(caught.value)


def change_of(text: str) -> tuple[str, ...]:
    """The `--stage-args` of the change that a refusal names."""
    found = re.search(r"^Change: --stage-args ('.*?'|\".*\") \(", text, re.MULTILINE)
    assert found is not None, text
    return tuple(shlex.split(found[1]))


@pytest.mark.parametrize("case", [("(E-P-D)", 64), ("(E-PD)", 32), ("TP1", 24), ("EP-D", 24)])
def test_the_change_that_a_refusal_names_makes_it_fit(model: Path, case: tuple[str, int]) -> None:
    layout, gib = case
    text = refused(model, layout, gib=gib)
    assert "not fit on npu device 0" in text and "weights" in text
    outcome = planned(model, layout, *change_of(text), gib=gib)
    assert outcome.plan is not None
    assert all(not group.division.missing for group in outcome.plan.groups)


def test_stages_too_heavy_for_one_device_are_told_to_part(model: Path) -> None:
    text = refused(model, "(E-P-D)", gib=32)
    assert "E0, P0 and D0 do not fit" in text and "fewer stages per device" in text


def test_a_model_too_heavy_for_a_device_is_told_its_width(model: Path) -> None:
    text = refused(model, "TP1", gib=12)
    assert "EPD0 does not fit" in text and re.search(r"fits on \d+ devices of its own", text)
    assert planned(model, "TP4", NO_VIDEO, "all:--max-model-len 8192", gib=12).plan is not None


def test_a_device_in_use_is_refused_with_pids_and_free_devices(model: Path) -> None:
    text = refused(model, "(E-P)-D", NO_VIDEO, free=(20,), users=(PYTHON,))
    assert "npu device 0 is in use by others (pid 1234 python3 (44.0 GiB))" in text
    assert "ASCEND_RT_VISIBLE_DEVICES=1,2" in text
    text = refused(model, "TP1", NO_VIDEO, free=(20,), users=(PYTHON,), kind="cuda", devices=1)
    assert "name devices that are free in CUDA_VISIBLE_DEVICES" in text


def test_a_device_in_use_with_room_left_is_a_warning_and_less_cache(model: Path) -> None:
    idle = planned(model, "(E-PD)", NO_VIDEO)
    used = planned(model, "(E-PD)", NO_VIDEO, free=(40,), users=(PYTHON,))
    assert used.plan is not None and idle.plan is not None
    assert "is used by others too (pid 1234" in used.warnings[0] and "40.0 GiB" in used.warnings[0]
    assert used.plan.grants()["PD0"].kv < idle.plan.grants()["PD0"].kv


def test_an_instance_alone_on_a_device_in_use_keeps_to_what_is_free(model: Path) -> None:
    (plan,) = planned(model, "TP1", NO_VIDEO, free=(40,), users=(PYTHON,)).shared(lower(parse("TP1"), range(1)))
    assert plan.memory_share is not None and plan.memory_share * 64 < 40


def test_memory_that_no_shown_process_holds_is_said(model: Path) -> None:
    (warning,) = planned(model, "(E-PD)", NO_VIDEO, free=(50,)).warnings
    assert "14.0 GiB, no process is shown" in warning
    assert planned(model, "(E-PD)", NO_VIDEO, free=(61,)).warnings == ()  # the driver's own


def test_the_operators_shares_win_and_have_to_stay_below_one(model: Path) -> None:
    outcome = planned(model, "(E-PD)", NO_VIDEO, "PD:--gpu-memory-utilization 0.5")
    assert outcome.grants["PD0"] == (0.5, None)
    with pytest.raises(ConfigError, match=r"sum to 1\.10; they have to stay below 1"):
        planned(model, "(P-D)", NO_VIDEO, "P:--gpu-memory-utilization 0.6", "D:--gpu-memory-utilization 0.5")


def test_a_model_that_tells_nothing_gets_fixed_shares_and_a_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    outcome = planned(tmp_path, "(E-P)-D")
    assert outcome.plan is None
    assert outcome.grants == {"E0": (0.1, None), "P0": (0.8, None)}
    assert "does not tell the sizes" in outcome.warnings[0]
    assert planned(tmp_path, "E-P-D").warnings == ()


def test_a_device_that_tells_no_memory_gets_fixed_shares(model: Path) -> None:
    plans = lower(parse("(E-PD)"), range(1))
    inventory = DeviceInventory("npu", (0,), ("910B3",))
    silent = [DeviceProperties(0, "910B3", note="npu-smi did not answer within 15 s")]
    outcome = share_memory(
        plans, read_model_facts(str(model)), inventory, parse_stage_args((), plans), properties=silent
    )
    assert outcome.plan is None and "did not answer within 15 s" in outcome.warnings[0]


def host(gib: float, free: float) -> list[DeviceProperties]:
    return [DeviceProperties(0, "cpu", total_bytes=int(gib * GIB), free_bytes=int(free * GIB))]


def on_host(folder: Path, layout: str, properties: list[DeviceProperties], *stage_args: str) -> Outcome:
    plans = lower(parse(layout), range(8))
    return share_memory(
        plans,
        read_model_facts(str(folder)),
        DeviceInventory("cpu"),
        parse_stage_args(stage_args, plans),
        shm_mib=256,
        properties=properties,
    )


def test_host_memory_is_counted_over_all_stages(model: Path) -> None:
    fits = on_host(model, "(E-P)-D", host(64, 60), "all:--max-model-len 8192")
    assert fits.plan is not None and fits.warnings == () and fits.grants == {}
    (warning,) = on_host(model, "(E-P)-D", host(64, 20), "all:--max-model-len 8192").warnings
    assert "of host memory, 20.0 GiB are available now" in warning
    with pytest.raises(ConfigError, match=r"E0, P0 and D0 take .* of host memory, this machine has 24\.0 GiB"):
        on_host(model, "(E-P)-D", host(24, 20), "all:--max-model-len 8192")


def test_a_request_longer_than_the_cache_of_a_cpu_stage_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"P0 has 1\.0 GiB of KV cache, .* needs 6\.8 GiB") as caught:
        on_host(model, "(E-P)-D", host(64, 60))
    assert change_of(str(caught.value)) == ("all:--max-model-len 16384",)


def test_a_joined_stage_is_planned_as_what_it_is(model: Path) -> None:
    plans = lower(parse("TP1"), (0,))
    inventory = DeviceInventory("npu", (0, 1), ("910B3",) * 2)
    small = [DeviceProperties(index, "910B3", total_bytes=16 * GIB, free_bytes=16 * GIB) for index in (0, 1)]
    facts = read_model_facts(str(model))
    outcome = share_memory(plans, facts, inventory, OneStage(Role.E, (1,), ()), properties=small)
    assert outcome.plan is not None
    (group,) = outcome.plan.groups
    assert group.plans[0].devices == (1,) and group.division.grants[0].need.kv_token == 0
    with pytest.raises(ConfigError, match="does not fit on npu device 1"):
        share_memory(plans, facts, inventory, OneStage(Role.P, (1,), ()), properties=small)


def test_the_built_in_model_is_planned_on_cpu() -> None:
    blueprint = draw(DeployConfig(layout="E-P-D", device="cpu"))
    assert blueprint.memory is not None
    assert {plan.memory_share for plan in blueprint.plans} == {None}
    assert blueprint.memory.grants()["P0"].kv == GIB


def test_a_cpu_stage_is_planned_with_the_kv_cache_that_it_is_told() -> None:
    told = DeployConfig(layout="E-P-D", device="cpu", stage_args=("P:--kv-cache-memory-bytes 64M",))
    memory = draw(told).memory
    assert memory is not None
    assert [memory.grants()[name].kv for name in ("P0", "D0")] == [64 << 20, GIB]


def test_simulated_stages_have_no_plan() -> None:
    assert draw(DeployConfig(layout="E-P-D", engine="sim")).memory is None


def test_the_table_lies_in_the_run_directory_and_is_said_to_neighbours(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    shared, apart = planned(model, "(E-PD)", NO_VIDEO).plan, planned(model, "E-P-D", NO_VIDEO).plan
    assert shared is not None and apart is not None
    show_memory(apart, tmp_path, said.append)
    assert said == [] and (tmp_path / "memory.txt").read_text() == memory_table(apart) + "\n"
    show_memory(shared, tmp_path, said.append)
    assert memory_table(shared) in said[0]


def test_the_layout_command_plans_for_a_machine_that_is_not_here(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["layout", "(E-P)-D", "--model", str(model), "--device", "npu", "--device-memory"]
    assert main([*command, "64", "--stage-args", NO_VIDEO]) == 0
    assert re.search(r"^  E0 +0 +1\.3 GiB", capsys.readouterr().out, re.MULTILINE)
    assert main([*command, "16"]) == 2
    assert "do not fit on npu device 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "org/name", "--device", "npu", "--device-memory", "64"], "not a folder on this machine"),
        (["--model", "", "--device-memory", "64"], None),
    ],
)
def test_the_layout_command_says_what_it_lacks(
    arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "E-P-D", *arguments]) == (2 if message else 0)
    assert (message or "") in capsys.readouterr().err


def test_a_size_without_a_kind_of_device_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "E-P-D", "--model", str(model), "--device-memory", "64"]) == 2
    assert "--device-memory needs --device npu or cuda" in capsys.readouterr().err


def test_a_preview_without_the_encoder_has_the_towers_memory_for_kv(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["layout", "E-P-D", "--model", str(model), "--device", "cuda", "--device-memory", "64"]
    shown = []
    for more in ((), ("--encoder-free",)):
        assert main([*command, *more, "--json"]) == 0
        shown.append({one["id"]: one for one in json.loads(capsys.readouterr().out)["instances"]})
    today, free = shown
    assert free["E0"] == today["E0"]
    for name in ("P0", "D0"):
        freed = today[name]["weights_bytes"] - free[name]["weights_bytes"]
        assert freed == today["E0"]["weights_bytes"] and free[name]["kv_bytes"] >= today[name]["kv_bytes"] + freed
    assert main(["layout", "EP-D", *command[2:], "--encoder-free"]) == 2
    assert "--encoder-free" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--feature-slab", "off"), ("--feature-slab-mib", "8")], ids=" ".join)
def test_the_slab_is_counted_as_its_flags_say(
    model: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    command = ["layout", "E-P-D", "--model", str(model), "--device", "cuda", "--device-memory", "64", "--json"]
    command += ["--stage-args", NO_VIDEO]
    shown = []
    for more in ((), flags):
        assert main([*command, *more]) == 0
        shown.append({one["id"]: one for one in json.loads(capsys.readouterr().out)["instances"]})
    usual, told = shown
    assert (told["E0"], told["D0"]) == (usual["E0"], usual["D0"]), "who prefills takes one"
    slab = 2 * 16384 * 3584 * 2  # twice vLLM's cache: its largest item, of rows as wide as the language model
    freed = usual["P0"]["activation_bytes"] - told["P0"]["activation_bytes"]
    assert freed == slab - (8 << 20 if flags[1] == "8" else 0)
    assert told["P0"]["kv_bytes"] == usual["P0"]["kv_bytes"] + freed


@pytest.mark.parametrize("flags", [{"feature_slab": "off"}, {"feature_slab_mib": 8}], ids=str)
def test_a_launch_plans_with_the_slab_that_its_workers_take(flags: dict[str, Any]) -> None:
    usual, told = (draw(DeployConfig(layout="E-PD", device="cpu", **more)).memory for more in ({}, flags))
    assert usual is not None and told is not None
    needs = [one.grants()["PD0"].need.activations for one in (usual, told)]
    assert needs[0] != needs[1]
