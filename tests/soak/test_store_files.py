"""The arena against tmpfs files: figures of the committed result, and the files' store under kill -9."""

from __future__ import annotations

import json

import pytest

from bench.record import ROOT
from tests.soak import store_files


def test_the_figures_of_the_committed_result_follow_from_its_rows():
    saved = json.loads((ROOT / "bench" / "results" / "arena-files.json").read_text())

    assert store_files.figures(saved["rows"]) == pytest.approx(saved["figures"], rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("step", ["mapped", "half", "published"])
def test_who_dies_leaves_whole_features_and_room(step: str):
    assert store_files.killed(step)
