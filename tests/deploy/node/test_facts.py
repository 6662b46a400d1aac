"""What a machine says of itself before it is a node, and which differences keep two of them apart."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deploy.node.facts import NodeFacts, differences, node_facts
from deploy.options.config import DeployConfig
from deploy.plan.machines import Machine
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError
from npu_ops.discovery import DeviceInventory

SIM = DeployConfig(engine="sim")


def test_a_machine_of_virtual_devices_lends_as_many_as_it_is_told_to() -> None:
    facts = node_facts(SIM, "a", 3)
    assert (facts.machine.id, facts.machine.inventory.kind, facts.machine.inventory.ids) == ("a", "cpu", (0, 1, 2))
    assert facts.machine.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert facts.machine.doubts == () and facts.machine.properties
    assert node_facts(SIM, "a").machine.inventory.ids == tuple(range(len(facts.machine.cores)))


def test_they_are_the_same_in_writing() -> None:
    facts = node_facts(SIM, "a", 2)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=NodeFacts) == facts


def test_what_is_wrong_with_a_machine_is_said_by_its_name() -> None:
    with pytest.raises(ConfigError, match="node a") as caught:
        node_facts(DeployConfig(device="npu"), "a")
    assert caught.value.param == "--device"


def test_machines_that_agree_have_no_differences_whatever_devices_they_have() -> None:
    assert differences(node_facts(SIM, "a", 1), node_facts(SIM, "b", 8)) == []


@pytest.mark.parametrize("what", ["epd-serve", "python", "vllm", "device"])
def test_each_version_has_to_be_the_same(what: str) -> None:
    one = node_facts(SIM, "a")
    (line,) = differences(one, replace(one, versions={**one.versions, what: "another"}))
    assert what in line and "another" in line


def test_weights_are_the_same_by_their_content_and_not_by_where_they_are(tmp_path: Path) -> None:
    here, there = (NodeFacts(Machine(name, DeviceInventory("cpu")), {}, f"model-{name}", "one") for name in "ab")
    assert differences(here, there) == []
    (line,) = differences(here, replace(there, revision="another"))
    assert "weights" in line and "another" in line
    (line,) = differences(here, replace(there, revision=""))
    assert "weights" in line, "by the name, where nothing else is known"
    shutil.copytree(builtin_model_dir(), tmp_path / "demo")
    found = node_facts(DeployConfig(model=str(tmp_path / "demo"), engine="sim"), "a")
    assert found.model == "demo" and found.revision and not found.no_model


def test_a_machine_without_the_model_says_so(tmp_path: Path) -> None:
    config = DeployConfig(model=str(tmp_path / "nowhere"), engine="sim")
    facts = node_facts(config, "a")
    assert facts.no_model
    assert differences(node_facts(SIM, "b"), facts)
