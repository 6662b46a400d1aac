"""EPD's memory tables: sizes by config, and what fits where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.papers.epd_models import IMAGES, MODELS
from bench.papers.memory_tables import PAPER_BYTES, PLACES, Case, Room, figures


def case(model: str, image: int) -> Case:
    return Case(next(one for one in MODELS if one.name == model), image, PAPER_BYTES)


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return figures([Case(model, at, PAPER_BYTES) for model in MODELS for at in range(len(IMAGES))])


@pytest.mark.parametrize(
    ("name", "tower_b", "language_b"),
    [("MiniCPM-V 2.6", 0.42, 7.6), ("InternVL2-8B", 0.30, 7.7), ("InternVL2-26B", 5.9, 20)],
)
def test_the_papers_models_have_the_parameters_that_their_names_say(
    name: str, tower_b: float, language_b: float
) -> None:
    weights = case(name, 0).model.weights
    assert weights.language / 2e9 == pytest.approx(language_b, rel=0.03)
    assert weights.tower / 2e9 == pytest.approx(tower_b, rel=0.15)


def test_the_order_is_the_papers_for_every_model_and_picture(found: dict[str, float]) -> None:
    for model in MODELS:
        for at, picture in enumerate(IMAGES):
            where = f"{model.name}/{picture}"
            together, apart = (found[f"pictures_per_request/{where}/{one}"] for one in ("together", "disaggregated"))
            assert together <= apart
            assert (apart > together) or model.paper_images[at][0] == model.paper_images[at][1]
            batches = [found[f"max_batch/{where}/{place}"] for place in PLACES]
            assert batches[0] <= min(batches[1:])
            shares = [found[f"kv_share/{where}/5 pictures/{place}"] for place in ("together", "spare", "prefill")]
            assert shares == sorted(shares)


def test_internvl_batches_are_within_a_factor_of_two_of_the_papers(found: dict[str, float]) -> None:
    assert 8 <= found["max_batch/InternVL2-8B/4032x3024/encoder"] <= 30, "15 in EPD's table 3"
    assert 34 <= found["max_batch/InternVL2-8B/787x444/encoder"] <= 134, "67"
    assert 5 <= found["max_batch/InternVL2-8B/787x444/prefill"] <= 20, "10"


def test_out_of_context_is_told_from_out_of_memory() -> None:
    rooms = case("InternVL2-8B", 2).rooms
    assert rooms["prefill"].kv_share(20) == "OOCL"
    small = Room(rooms["together"].model, 13, PLACES["together"], 17 * 10**9)
    assert small.kv_share(5) == "OOM" and small.most_images() == 0 and small.largest_batch() == 0


def test_more_never_fits_where_less_does_not() -> None:
    for room in case("MiniCPM-V 2.6", 2).rooms.values():
        most = room.most_images()
        assert room.fits(most, 1) and not room.fits(most + 1, 1)


def test_a_device_on_which_nothing_is_left_is_refused(capsys: Any) -> None:
    assert main(["memory-tables", "--device-memory", "0.1"]) == 1
    assert "--device-memory 0.1" in capsys.readouterr().err


def test_a_smaller_device_holds_less(found: dict[str, float]) -> None:
    less = figures([Case(MODELS[1], 0, 64 << 30)])
    assert all(value <= found[name] for name, value in less.items())
    assert less["kv_tokens/InternVL2-8B/313x234/5 pictures/prefill"] > 0


def test_tables_are_printed_with_the_papers_numbers_and_kept(tmp_path: Path, capsys: Any) -> None:
    assert main(["memory-tables", "--json", str(tmp_path / "r.json")]) == 0

    shown = capsys.readouterr().out
    assert "(77)" in shown and "(490)" in shown and "(86%)" in shown and "OOCL (OOCL)" in shown
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["env"]["kind"].startswith("emulated: computed")
    assert saved["figures"]["kv_tokens/InternVL2-26B/4032x3024/5 pictures/prefill"] > 0
