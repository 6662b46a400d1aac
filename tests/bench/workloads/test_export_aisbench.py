"""Rows and the dataset entry as AISBench reads them (ais-bench-benchmark 3.1.20260630, datasets/mm_custom.py)."""

from __future__ import annotations

import base64
import importlib.util
import sys
import types
from pathlib import Path

import pytest
from PIL import Image

from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.images import Images
from bench.workloads.requests import ClosedLoop
from epd_serve.errors import ConfigError
from tests.bench.workloads.exports import REQUESTS, SHOWN, UNTIMED, rows

AISBENCH = {
    "ais_bench": (),
    "ais_bench.benchmark": (),
    "ais_bench.benchmark.datasets": ("MMCustomDataset", "MMCustomEvaluator"),
    "ais_bench.benchmark.openicl": (),
    "ais_bench.benchmark.openicl.icl_inferencer": ("GenInferencer",),
    "ais_bench.benchmark.openicl.icl_prompt_template": (),
    "ais_bench.benchmark.openicl.icl_prompt_template.icl_prompt_template_mm": ("MMPromptTemplate",),
    "ais_bench.benchmark.openicl.icl_retriever": ("ZeroRetriever",),
}
"""The modules that AISBench's own `mm_custom_gen.py` imports from, with the names that it takes."""


@pytest.fixture
def exported(tmp_path):
    return export_aisbench(REQUESTS, Images(tmp_path / "cache"), tmp_path / "out")


def entry(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one dataset of a configuration, imported with stand-ins for AISBench's classes."""
    for name, classes in AISBENCH.items():
        module = types.ModuleType(name)
        for one in classes:
            setattr(module, one, type(one, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("exported_datasets", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    (dataset,) = loaded.mm_custom_datasets
    return dataset


def sent_pictures(dataset, row) -> list[str]:
    """The URLs that AISBench makes of a row: each file in base64, put into the template's URL."""
    (turn,) = dataset["infer_cfg"]["prompt_template"]["template"]["round"]
    url = turn["prompt_mm"]["image"]["image_url"]["url"]
    return [url.format(image=base64.b64encode(Path(path).read_bytes()).decode()) for path in row["path"]]


def test_rows_have_the_fields_that_aisbench_reads(exported, tmp_path):
    _, *found = rows(tmp_path / "out")

    assert [sorted(row) for row in found] == [["answer", "max_out_len", "path", "question", "timestamp", "type"]] * 3
    assert [row["question"] for row in found] == [request.text for request in REQUESTS]
    assert [row["timestamp"] for row in found] == [250, 500, 1750]
    assert [len(row["path"]) for row in found] == [2, 0, 1]
    assert {(row["type"], row["answer"], row["max_out_len"]) for row in found} == {("image", "", 64)}
    assert exported.requests == 3


def test_pictures_are_files_in_the_export_with_absolute_paths_and_repeats_are_one_file(exported, tmp_path):
    _, first, _, again = rows(tmp_path / "out")

    assert all(Path(path).is_relative_to(tmp_path / "out") for path in first["path"])
    assert again["path"] == first["path"][:1]
    for path, picture in zip(first["path"], SHOWN, strict=True):
        with Image.open(path) as shown:
            assert shown.size == (picture.width, picture.height)


def test_the_first_row_is_a_sacrifice_that_shares_nothing_with_the_workload(exported, tmp_path):
    sacrifice, *found = rows(tmp_path / "out")

    assert sacrifice["timestamp"] == 0
    assert not set(sacrifice["path"]) & {path for row in found for path in row["path"]}
    assert len(sacrifice["path"]) == 2
    assert any("row 0 of 4" in note for note in exported.notes)


def test_lengths_and_times_act_because_they_are_input_columns(exported, monkeypatch):
    dataset = entry(exported.files[1], monkeypatch)

    assert {"question", "max_out_len", "timestamp"} <= set(dataset["reader_cfg"]["input_columns"])
    assert dataset["reader_cfg"]["output_column"] == "answer"
    assert (dataset["abbr"], dataset["mm_type"], dataset["path"]) == ("mm_custom", "base64", str(exported.files[0]))


def test_aisbench_sends_the_very_bytes(exported, tmp_path, monkeypatch):
    dataset = entry(exported.files[1], monkeypatch)
    pictures = Images(tmp_path / "cache")

    for row, request in zip(rows(tmp_path / "out")[1:], REQUESTS, strict=True):
        assert sent_pictures(dataset, row) == [pictures.data_url(picture) for picture in request.images]


def test_the_export_outlives_the_cache(exported, tmp_path):
    for path in (tmp_path / "cache").rglob("*.jpeg"):
        path.unlink()

    assert all(Path(path).stat().st_size for row in rows(tmp_path / "out") for path in row["path"])


def test_without_arrivals_there_is_no_timestamp(tmp_path, monkeypatch):
    done = export_aisbench(UNTIMED, Images(tmp_path / "cache"), tmp_path / "out", ClosedLoop(7))

    assert all("timestamp" not in row for row in rows(tmp_path / "out"))
    assert "timestamp" not in entry(done.files[1], monkeypatch)["reader_cfg"]["input_columns"]
    assert any("batch_size=7" in note for note in done.notes)


def test_nothing_to_export_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(ConfigError, match="workload is empty"):
        export_aisbench([], Images(tmp_path / "cache"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
