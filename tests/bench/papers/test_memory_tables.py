"""EPD's memory tables: sizes by config, and what fits where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.papers.memory_tables import MODELS, PAPER_BYTES, PLACES, EpdModel, Room, figures

LARGE = "4032x3024"


def named(name: str) -> EpdModel:
    return next(one for one in MODELS if one.name == name)


def room(model: str, place: str, total_bytes: int = PAPER_BYTES) -> Room:
    return Room(named(model), named(model).slices[LARGE], PLACES[place], total_bytes)


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return figures(MODELS)


@pytest.mark.parametrize(
    ("name", "tower_b", "language_b"),
    [("MiniCPM-V 2.6", 0.42, 7.6), ("InternVL2-8B", 0.30, 7.7), ("InternVL2-26B", 5.9, 20)],
)
def test_the_papers_models_have_the_parameters_that_their_names_say(
    name: str, tower_b: float, language_b: float
) -> None:
    weights = named(name).weights
    assert weights.language / 2e9 == pytest.approx(language_b, rel=0.03)
    assert weights.tower / 2e9 == pytest.approx(tower_b, rel=0.15)


def test_the_order_is_the_papers_for_every_model_and_picture(found: dict[str, float]) -> None:
    for model in MODELS:
        for picture in model.slices:
            where = f"{model.name}/{picture}"
            together, apart = (found[f"pictures_per_request/{where}/{one}"] for one in ("together", "disaggregated"))
            assert together <= apart
            paper = [model.paper[f"pictures_per_request/{picture}/{one}"] for one in ("together", "disaggregated")]
            assert apart > together or paper[0] == paper[1]
            batches = [found[f"max_batch/{where}/{place}"] for place in PLACES]
            assert batches[0] <= min(batches[1:])
            shares = [found[f"kv_share/{where}/5 pictures/{place}"] for place in ("together", "spare", "prefill")]
            assert shares == sorted(shares)


def test_internvl_batches_are_within_a_factor_of_two_of_the_papers(found: dict[str, float]) -> None:
    assert 8 <= found["max_batch/InternVL2-8B/4032x3024/encoder"] <= 30, "15 in EPD's table 3"
    assert 34 <= found["max_batch/InternVL2-8B/787x444/encoder"] <= 134, "67"
    assert 5 <= found["max_batch/InternVL2-8B/787x444/prefill"] <= 20, "10"


def test_out_of_context_and_out_of_memory_nothing_runs() -> None:
    assert room("InternVL2-8B", "prefill").kv_share(20) == 0, "out of context limit"
    small = room("InternVL2-8B", "together", 17 * 10**9)
    assert small.kv_share(5) == small.most_images() == small.largest_batch() == 0


def test_more_never_fits_where_less_does_not() -> None:
    for place in PLACES:
        one = room("MiniCPM-V 2.6", place)
        most = one.most_images()
        assert one.fits(most, 1) and not one.fits(most + 1, 1)


def test_a_device_on_which_nothing_is_left_is_refused(capsys: Any) -> None:
    assert main(["memory-tables", "--device-memory", "0.1"]) == 1
    assert "--device-memory 0.1" in capsys.readouterr().err


def test_a_smaller_device_holds_less(found: dict[str, float]) -> None:
    less = figures(MODELS[1:2], 64 << 30)
    assert all(value <= found[name] for name, value in less.items())
    assert less["kv_tokens/InternVL2-8B/313x234/5 pictures/prefill"] > 0


def test_figures_are_printed_with_the_papers_numbers_and_kept(tmp_path: Path, capsys: Any) -> None:
    assert main(["memory-tables", "--json", str(tmp_path / "r.json")]) == 0

    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if "MiniCPM-V" in line]
    assert {line[-1] for line in lines} >= {"77", "490", "86%", "OOCL"}
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["env"]["kind"].startswith("emulated: computed")
    assert saved["figures"]["kv_tokens/InternVL2-26B/4032x3024/5 pictures/prefill"] > 0
