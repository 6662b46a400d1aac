"""How NPUs are joined, from what npu-smi and hccn_tool print, and what it means for pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.doctor.check import Level
from deploy.doctor.facts import Facts
from deploy.doctor.gather import link_state, parse_topology
from tests.deploy.doctor.machines import NPU, TOPOLOGY, found, serving, troubles


def with_links(**changed: Any) -> Facts:
    return replace(NPU, links=replace(NPU.links, **changed))


def with_environment(**variables: str) -> Facts:
    return replace(NPU, environment=variables)


def test_the_matrix_of_npu_smi_is_read_by_its_header() -> None:
    topology = parse_topology(TOPOLOGY)
    assert len(topology) == 8 * 7
    assert topology[0, 7] == topology[7, 0] == "HCCS"
    assert (3, 3) not in topology


@pytest.mark.parametrize("text", ["", "Error parameter of -t\n", "NPU0       CPU Affinity\nNPU0  X  0-63\n"])
def test_what_is_no_matrix_tells_nothing(text: str) -> None:
    assert parse_topology(text) == {}


@pytest.mark.parametrize(
    ("text", "state"), [("link status: UP\n", "UP"), ("link status: DOWN\n", "DOWN"), ("hccn_tool busy", "unknown")]
)
def test_the_state_of_a_port_is_read_from_hccn_tool(text: str, state: str) -> None:
    assert link_state(text) == state


def test_npus_without_hccs_between_them_are_warned_of() -> None:
    assert found(with_links(topology={(0, 1): "SYS", (1, 0): "SYS"}), "npu topology").level is Level.WARNING
    assert found(with_links(topology={}, note="npu-smi is not on PATH"), "npu topology").level is Level.WARNING


def test_ports_that_are_down_matter_where_roce_is_asked_for() -> None:
    facts = with_links(ports={0: "UP", 1: "DOWN"})
    assert found(facts, "roce ports").level is Level.OK
    asked = replace(facts, environment={"HCCL_INTRA_ROCE_ENABLE": "1"})
    assert "down on NPU 1" in found(asked, "roce ports").seen
    assert found(asked, "roce ports").level is Level.WARNING


def test_a_tool_that_does_not_answer_leaves_the_ports_unknown() -> None:
    facts = with_links(ports={0: "hccn_tool did not answer within 15 s"})
    assert "did not answer" in found(facts, "roce ports").seen


def test_a_container_without_the_cards_addresses_is_told_what_to_mount() -> None:
    facts = replace(NPU, ascend=replace(NPU.ascend, hccn_conf=False))
    assert "-v /etc/hccn.conf:/etc/hccn.conf" in found(facts, "card network").fix


@pytest.mark.parametrize(
    ("variables", "level", "words"),
    [
        ({}, Level.OK, "2 MB"),
        ({"HCCL_INTRA_ROCE_ENABLE": "1"}, Level.OK, "RoCE"),
        ({"ASCEND_BUFFER_POOL": "4:8"}, Level.WARNING, "4:8"),
        ({"ASCEND_BUFFER_POOL": "0:0"}, Level.OK, "HCCS"),
    ],
)
def test_alignment_follows_from_the_way_that_is_taken(variables: dict[str, str], level: Level, words: str) -> None:
    one = found(with_environment(**variables), "alignment")
    assert one.level is level and words in one.seen


@pytest.mark.parametrize(
    ("cann", "hixl", "words"),
    [("9.1.0", True, "can connect"), ("9.1.0", False, "cannot connect"), ("9.0.0", True, "cannot connect")],
)
def test_pairs_on_one_npu_take_shared_memory_whatever_cann_can(cann: str, hixl: bool, words: str) -> None:
    facts = serving(replace(NPU, ascend=replace(NPU.ascend, cann=cann, hixl=hixl)), "E-(P-D)-D")
    one = found(facts, "pairs on one npu")
    assert words in one.seen and "P0→D0: shared memory" in one.seen and "D1" not in one.seen
    assert troubles(facts).keys() <= {"cann and vllm-ascend"}
