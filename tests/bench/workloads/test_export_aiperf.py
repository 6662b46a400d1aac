"""Rows for aiperf's single_turn (aiperf 0.13, dataset/loader/models.py: SingleTurn)."""

from __future__ import annotations

from bench.workloads.exports import export_aiperf
from bench.workloads.images import Images
from bench.workloads.requests import ClosedLoop
from tests.bench.workloads.exports import REQUESTS, UNTIMED, rows

SINGLE_TURN = {"session_id": str, "text": str, "images": list, "timestamp": (int, float), "output_length": int,
               "extra": dict}  # fmt: skip
"""Those fields of SingleTurn that we use. aiperf takes unknown fields without a word and ignores them."""


def test_rows_have_fields_of_single_turn_only(tmp_path):
    export_aiperf(REQUESTS, Images(tmp_path / "cache"), tmp_path / "out")

    for row in rows(tmp_path / "out"):
        assert all(isinstance(value, SINGLE_TURN[name]) for name, value in row.items())
        assert row["output_length"] > 0 and row["extra"] == {"ignore_eos": True}


def test_pictures_texts_and_times_come_back(tmp_path):
    pictures = Images(tmp_path / "cache")
    done = export_aiperf(REQUESTS, pictures, tmp_path / "out")
    found = rows(tmp_path / "out")

    assert [row["text"] for row in found] == [request.text for request in REQUESTS]
    assert [row["timestamp"] for row in found] == [250, 500.4, 1750]
    assert [row.get("images", []) for row in found] == [
        [pictures.data_url(one) for one in request.images] for request in REQUESTS
    ]
    assert "--fixed-schedule" in done.command and "--custom-dataset-type single_turn" in done.command


def test_each_request_is_a_session_of_its_own(tmp_path):
    """aiperf sends requests of one session one after another."""
    export_aiperf(REQUESTS, Images(tmp_path / "cache"), tmp_path / "out")

    assert len({row["session_id"] for row in rows(tmp_path / "out")}) == 3


def test_a_closed_loop_is_a_flag(tmp_path):
    done = export_aiperf(UNTIMED, Images(tmp_path / "cache"), tmp_path / "out", ClosedLoop(5))

    assert done.command.endswith("--concurrency 5")
    assert all("timestamp" not in row for row in rows(tmp_path / "out"))
