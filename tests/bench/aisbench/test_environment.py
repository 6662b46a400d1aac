"""AISBench's environment: used where it is whole and of the pinned version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.aisbench import environment as subject
from bench.aisbench.environment import MARKER, PINS, check_tokenizer, default_folder, environment, found
from epd_serve.errors import ConfigError
from tests.bench.aisbench.environments import VERSION, fake_environment


def test_the_pins_hold_what_was_learned():
    text = PINS.read_text()

    assert f"ais_bench_benchmark=={VERSION}" in text
    assert "numpy==1.26" in text and "pyarrow==21." in text, "with NumPy below 2, or every run dies"


def test_one_of_the_pinned_version_is_used_as_it_is(tmp_path):
    folder = fake_environment(tmp_path / "own")

    assert environment(folder).version == VERSION and environment(folder).command.is_file()


def test_a_half_made_one_another_version_and_none_are_refused_with_how_it_is_made(tmp_path):
    half, other = fake_environment(tmp_path / "half"), fake_environment(tmp_path / "other", "3.0")
    (half / MARKER).write_text("unfinished")

    for folder in (half, other, tmp_path / "none"):
        assert found(folder) is None
        with pytest.raises(ConfigError, match=r"environment\.sh aisbench"):
            environment(folder)


def test_it_lies_in_the_users_cache_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "epd-serve" / "aisbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "epd-serve" / "aisbench"


def test_pips_variables_reach_pip_and_our_packages_do_not(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")

    assert subject.outside()["PIP_INDEX_URL"] == "https://index.example"
    assert "PYTHONPATH" not in subject.outside() and "PATH" in subject.outside()


def test_a_tokenizer_is_loaded_by_aisbench_itself_before_anything_is_sent(tmp_path):
    bench = environment(fake_environment(tmp_path / "venv"))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()

    check_tokenizer(bench, tmp_path / "good")
    with pytest.raises(ConfigError, match="AISBench cannot load it:\n  no tokenizer in"):
        check_tokenizer(bench, tmp_path / "empty")
    with pytest.raises(ConfigError, match="is no folder"):
        check_tokenizer(bench, Path(os.devnull))
