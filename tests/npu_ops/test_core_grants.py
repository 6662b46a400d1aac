"""What workers are told about cores, and what they say they got, as it travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_ops.core_grants import CoreGrant, CoreOrder, read_grants, write_grant

ORDER = CoreOrder("cpu", "E0", {"E0": 0.3, "P0": 0.7}, (0, 1), report="/run/E0.cores{rank}.json")


def test_an_order_arrives_as_it_was_sent() -> None:
    assert CoreOrder.from_json(ORDER.to_json()) == ORDER
    assert ORDER.share == 0.3


def test_grants_are_read_by_rank(tmp_path: Path) -> None:
    template = str(tmp_path / "E0.cores{rank}.json")
    grants = tuple(CoreGrant(rank, 0.3, {"cube": 7}, {"cube": 24}, (rank,)) for rank in range(2))
    for grant in reversed(grants):
        write_grant(template, grant)
    assert read_grants(template, 2) == grants
    assert {path.name for path in tmp_path.iterdir()} == {"E0.cores0.json", "E0.cores1.json"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rank": 0}'])
def test_what_is_no_grant_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "E0.cores0.json").write_text(text)
    assert read_grants(str(tmp_path / "E0.cores{rank}.json"), 2) == ()


@pytest.mark.parametrize(
    ("grant", "words"),
    [
        (CoreGrant(0, 0.3, {"cube": 7, "vector": 14}, {"cube": 24, "vector": 48}), "7 of 24 cube, 14 of 48 vector"),
        (CoreGrant(0, 0.3, {"sm": 39}), "39 sm"),
        (CoreGrant(0, 0.3, {"cpu": 5}, core_ids=(0, 1, 2, 7, 9)), "cores 0-2,7,9"),
        (CoreGrant(0, 0.3, {"cpu": 1}, core_ids=(4,)), "core 4"),
        (CoreGrant(0, 0.3, {"sm": 132}, enforced=False), "not enforced"),
    ],
)
def test_a_grant_in_words(grant: CoreGrant, words: str) -> None:
    assert grant.summary() == words
