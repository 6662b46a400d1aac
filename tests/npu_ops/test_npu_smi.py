"""The tables of npu-smi, as several driver versions print them (`smi_outputs.py` says where the texts come from)."""

from __future__ import annotations

import pytest

from npu_ops.npu_smi import NpuChip, NpuProcess, NpuUsage, parse_mapping, parse_platform, parse_usage, soc_of
from tests.npu_ops.smi_outputs import (
    A2_24_1,
    A2_26_0,
    A2_MAPPING,
    A3_25_2,
    A3_BOARD,
    A3_MAPPING,
    FIRST_910,
    PLATFORM_910B4,
)

MIB = 1 << 20


def test_a_logic_id_names_a_chip_on_a_card() -> None:
    assert parse_mapping(A2_MAPPING) == {0: NpuChip(0, 0, "Ascend 910B1"), 1: NpuChip(1, 0, "Ascend 910B1")}
    assert parse_mapping(A3_MAPPING)[3] == NpuChip(1, 1, "Ascend910")


@pytest.mark.parametrize("table", ["", "\n\n", "dcmi module initialize failed. ret is -8005", "NPU ID  Chip Logic ID"])
def test_what_is_no_table_names_no_chip(table: str) -> None:
    assert parse_mapping(table) == {}
    assert parse_usage(table) == {}


def test_memory_and_users_of_an_a2_board() -> None:
    found = parse_usage(A2_24_1)
    assert found == {
        (0, 0): NpuUsage("910B1", 3437 * MIB, 65536 * MIB),
        (1, 0): NpuUsage("910B1", 64266 * MIB, 65536 * MIB, (NpuProcess(3180736, "rayMyLLM.__in", 60889 * MIB),)),
    }


def test_a_wider_table_with_one_column_more_reads_the_same() -> None:
    user = NpuProcess(1712733, "sglangschedul", 48954 * MIB)
    assert parse_usage(A2_26_0) == {(0, 0): NpuUsage("910B4", 2871 * MIB, 32768 * MIB, (user,))}


def test_each_chip_of_an_a3_card_has_its_memory_and_its_users() -> None:
    found = parse_usage(A3_25_2)
    assert [found[key].used_bytes // MIB for key in ((0, 0), (0, 1), (1, 0), (1, 1))] == [3131, 2886, 3125, 3193]
    assert found[1, 1].processes == (NpuProcess(907864, "", 134 * MIB),), "a name may be blank"
    assert found[1, 0].processes == ()


def test_where_a_chip_has_ddr_and_hbm_the_hbm_counts() -> None:
    assert parse_usage(FIRST_910)[0, 0].total_bytes == 32768 * MIB


@pytest.mark.parametrize(
    ("name", "board", "soc"),
    [
        ("Ascend 910B3", "", "Ascend910B3"),
        ("910B4-1", "", "Ascend910B4-1"),
        ("Ascend910", A3_BOARD, "Ascend910_9392"),
        ("Ascend910", "", ""),
        ("Ascend910", "NPU Name : NA", ""),
        ("Ascend NPU", "", ""),
    ],
)
def test_the_soc_follows_from_the_chip_s_name_and_on_a3_from_the_board_s(name: str, board: str, soc: str) -> None:
    assert soc_of(name, board) == soc


def test_cores_are_in_the_platform_file() -> None:
    assert parse_platform(PLATFORM_910B4) == {"cube": 20, "vector": 40}
    assert parse_platform("ai_core_cnt=8\n") == {}
