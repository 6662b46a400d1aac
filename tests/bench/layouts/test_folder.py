"""The folder of an experiment: whose it is, and what is removed from it."""

from __future__ import annotations

import pytest

from bench.layouts.folder import ASKED, opened
from epd_serve.errors import ConfigError
from tests.bench.layouts.asked import experiment


def begun(path, asked=None):
    with opened(path, asked or experiment(), fresh=False) as folder:
        folder.begin()


def test_the_same_experiment_goes_on_and_another_one_is_refused_with_what_differs(tmp_path):
    begun(tmp_path / "out")
    begun(tmp_path / "out")

    with pytest.raises(ConfigError, match=r"seed is 0 there and 3 here.*--fresh"):
        begun(tmp_path / "out", experiment(seed=3))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for fresh in (False, True):
        with (
            pytest.raises(ConfigError, match=r"holds thesis\.tex"),
            opened(tmp_path, experiment(), fresh=fresh),
        ):
            pass
    assert (tmp_path / "thesis.tex").exists()


def test_anew_removes_the_experiment_and_nothing_else(tmp_path):
    begun(tmp_path)
    for name in ("TP1x2/result.json", "notes/mine.txt", "attainment.png", "result.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    with opened(tmp_path, experiment(seed=3), fresh=True) as folder:
        folder.begin()

    assert sorted(one.name for one in tmp_path.iterdir() if one.name[0] != ".") == [ASKED, "notes", "notes.txt"]
    begun(tmp_path, experiment(seed=3))


def test_two_processes_do_not_measure_into_one_folder(tmp_path):
    with (
        opened(tmp_path, experiment(), fresh=False),
        pytest.raises(ConfigError, match="another epd-bench"),
        opened(tmp_path, experiment(), fresh=False),
    ):
        pass


def test_nothing_is_asked_of_a_folder_before_the_measurement_begins(tmp_path):
    with opened(tmp_path, experiment(), fresh=False):
        pass
    with opened(tmp_path, experiment(seed=3), fresh=False):
        pass
