"""EPD's memory tables: sizes by config, and what fits where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.papers.epd_models import IMAGES, MODELS
from bench.papers.memory_fit import PLACES, Room, Subject
from bench.papers.memory_models import folder_subject, weights_of
from bench.papers.memory_tables import epd_cases, figures
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError
from epd_serve.model_sizes import model_sizes
from epd_serve.model_weights import read_model_weights
from tests.checkpoints import QWEN25_VL_7B, qwen25_vl_7b

TOTAL, RUNTIME = 82 * 10**9, 768 << 20


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return figures(epd_cases(TOTAL, RUNTIME))


def test_weights_by_config_are_those_of_the_files(tmp_path: Path) -> None:
    for folder in (qwen25_vl_7b(tmp_path / "q"), builtin_model_dir()):
        config = json.loads((folder / "config.json").read_text())
        sizes = model_sizes(config)
        assert sizes is not None
        counted, read = weights_of(config, sizes), read_model_weights(folder, element_bytes=2, tied=sizes.tied)
        assert counted is not None and read is not None
        assert counted.language == pytest.approx(read.language, rel=0.01)
        assert counted.tower == pytest.approx(read.tower, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tower_b", "language_b"),
    [("MiniCPM-V 2.6", 0.42, 7.6), ("InternVL2-8B", 0.30, 7.7), ("InternVL2-26B", 5.9, 20)],
)
def test_the_papers_models_have_the_parameters_that_their_names_say(
    name: str, tower_b: float, language_b: float
) -> None:
    config = next(one.config for one in MODELS if one.name == name)
    sizes = model_sizes(config)
    assert sizes is not None
    weights = weights_of(config, sizes)
    assert weights is not None
    assert weights.language / 2e9 == pytest.approx(language_b, rel=0.03)
    assert weights.tower / 2e9 == pytest.approx(tower_b, rel=0.15)


@pytest.mark.parametrize("config", [{"num_experts": 8}, {"kv_lora_rank": 512}, {"vision_config": {"patch_size": 14}}])
def test_what_cannot_be_counted_is_not_guessed(config: dict[str, Any]) -> None:
    whole = {**QWEN25_VL_7B, **config}
    sizes = model_sizes(whole)
    assert sizes is not None
    assert weights_of(whole, sizes) is None


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
    case = next(one for one in epd_cases(TOTAL, RUNTIME) if (one.model, one.image) == ("InternVL2-8B", "4032x3024"))
    assert case.rooms["prefill"].kv_share(20) == "OOCL"
    small = Room(case.rooms["together"].subject, "together", 17 * 10**9, RUNTIME)
    assert small.kv_share(5) == "OOM" and small.most_images() == 0 and small.largest_batch(10) == 0
    assert case.rooms["encoder"].kv_tokens(5) == 0


def test_more_never_fits_where_less_does_not() -> None:
    subject = epd_cases(TOTAL, RUNTIME)[2].rooms["together"].subject
    for place in PLACES:
        room = Room(subject, place, TOTAL, RUNTIME)
        most = room.most_images()
        assert room.fits(most, 1) and not room.fits(most + 1, 1)


def test_a_models_folder_gives_a_subject_by_its_files(tmp_path: Path) -> None:
    folder = qwen25_vl_7b(tmp_path / "model")

    subject = folder_subject(str(folder), "1280x720")
    assert isinstance(subject, Subject)
    assert (subject.tokens, subject.patches) == (26 * 46, 4 * 26 * 46)
    assert subject.context == 128000
    largest = folder_subject(str(folder), "largest")
    assert largest.patches == 12845056 // 196
    assert folder_subject(str(folder), "100000x100000").patches <= largest.patches * 1.01
    (folder / "model.safetensors").unlink()
    assert folder_subject(str(folder), "1280x720").weights.language == pytest.approx(subject.weights.language, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "org/name"], "not a folder on this machine"),
        (["--device-memory", "0.1"], "less than the runtime takes"),
    ],
)
def test_wrong_flags_are_named(capsys: Any, flags: list[str], said: str) -> None:
    assert main(["memory-tables", *flags]) == 1
    assert said in capsys.readouterr().err


def test_a_picture_that_says_nothing_is_named(tmp_path: Path) -> None:
    folder = qwen25_vl_7b(tmp_path / "model")
    with pytest.raises(ConfigError, match="--picture 4k"):
        folder_subject(str(folder), "4k")


def test_tables_are_printed_with_the_papers_numbers_and_kept(tmp_path: Path, capsys: Any) -> None:
    assert main(["memory-tables", "--json", str(tmp_path / "r.json")]) == 0

    shown = capsys.readouterr().out
    assert "(77)" in shown and "(490)" in shown and "(86%)" in shown and "OOCL (OOCL)" in shown
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["env"]["kind"].startswith("emulated: computed")
    assert saved["figures"]["kv_tokens/InternVL2-26B/4032x3024/5 pictures/prefill"] > 0
