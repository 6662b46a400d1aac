"""The table of families: held against what is tested, what is refused, and the vLLM that is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from epd_serve.demo.families import family_names, read_family
from epd_serve.demo.presets import RANDOM_PRESETS
from epd_serve.engine.support import refusals
from epd_serve.model_families import COLUMNS, FAMILIES, KV, Family, Status, document
from epd_serve.model_support import TESTED

ROOT = Path(__file__).resolve().parents[2]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="reads vLLM's source")


def test_the_document_is_the_table() -> None:
    assert (ROOT / "docs/reference/models.md").read_text(encoding="utf-8") == document(), (
        "make it anew: python -m epd_serve.model_families > docs/reference/models.md"
    )


def test_every_tested_architecture_has_a_row_with_the_preset_that_tests_it() -> None:
    presets = {row.architecture: row.preset for row in FAMILIES if row.preset}
    assert set(presets) == set(TESTED)
    of_families = {read_family(name)["files"]["config.json"]["architectures"][0]: name for name in family_names()}
    assert {**of_families, "Qwen3VLForConditionalGeneration": "tiny"} == presets
    assert "tiny" in RANDOM_PRESETS


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_what_is_tested_of_a_family_is_what_the_end_to_end_tests_ask(row: Family) -> None:
    assert set(TESTED.get(row.architecture, ())) <= set(row.takes)
    for modality in ("image", "video", "audio"):
        is_tested = modality in TESTED.get(row.architecture, ())
        assert (row.cell(modality) is Status.TESTED) == is_tested
    assert {row.cell(column) for column in COLUMNS} <= set(Status)
    assert row.read or row.preset, "who reads `read` has to find what was"


def test_what_the_table_calls_refused_is_refused() -> None:
    flags = {refusal.flag for _, refusal in refusals()}
    assert "--speculative-config" in flags, "MTP"
    assert "--kv-transfer-config" in flags, "state-space layers, by their KV groups"
    assert {row.cell("TP") for row in FAMILIES if row.kv is KV.HYBRID} == {Status.REFUSED}


@needs_vllm
def test_the_families_are_those_of_vllm_and_keep_kv_as_the_table_says() -> None:
    from epd_serve.engine import model_probe

    known = model_probe.architectures()
    for row in FAMILIES:
        if row.architecture in known:  # some vLLM has not each
            assert (row.kv is KV.HYBRID) == model_probe.is_hybrid(row.architecture), row.name
    assert len({row.architecture for row in FAMILIES} & known) > len(FAMILIES) // 2
