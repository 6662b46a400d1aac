"""AISBench's environment: made once, used again, made anew when half made or of other pins. No pip is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.aisbench import environment as subject
from bench.aisbench.environment import MARKER, PINS, SCRIPT, check_tokenizer, default_folder, environment, found
from epd_serve.errors import ConfigError
from tests.bench.aisbench.environments import VERSION, fake_environment


@pytest.fixture
def made(monkeypatch) -> list[list[str]]:
    """Commands that would have been run; each puts AISBench into the folder that it is given, as the script does."""
    ran: list[list[str]] = []

    def run(command: list[Any], limit_s: float, **more: str) -> subprocess.CompletedProcess[str]:
        ran.append([str(word) for word in command])
        folder = Path(more["VENV"])
        shutil.rmtree(folder, ignore_errors=True)
        (fake_environment(folder) / MARKER).write_text(subject._digest(PINS))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subject, "_ran", run)
    return ran


def test_the_pins_hold_what_was_learned():
    text = PINS.read_text()

    assert f"ais_bench_benchmark=={VERSION}" in text
    assert "numpy==1.26" in text and "pyarrow==21." in text, "with NumPy below 2, or every run dies"


def test_it_is_made_from_the_pins_once(tmp_path, made):
    found_one = environment(tmp_path / "venv")

    assert found_one.version == VERSION and found_one.command.is_file()
    assert made == [[str(SCRIPT), "aisbench"]] and SCRIPT.is_file()
    assert environment(tmp_path / "venv") == found_one and len(made) == 1


@pytest.mark.parametrize("marker", ["unfinished", "0" * 64])
def test_a_half_made_one_and_one_of_other_pins_are_made_again(tmp_path, made, marker):
    fake_environment(tmp_path / "venv")
    (tmp_path / "venv" / MARKER).write_text(marker)

    assert found(tmp_path / "venv") is None
    environment(tmp_path / "venv")
    assert len(made) == 1 and found(tmp_path / "venv") is not None


def test_the_users_own_is_used_as_it_is(tmp_path, made):
    folder = fake_environment(tmp_path / "own")

    assert environment(folder).version == VERSION
    assert made == [] and not (folder / MARKER).exists()


def test_the_users_own_of_another_version_is_refused(tmp_path, made):
    with pytest.raises(ConfigError, match=rf"has AISBench 3\.0, its results are read as those of {VERSION}"):
        environment(fake_environment(tmp_path / "own", "3.0"))
    assert made == []


def test_what_the_script_says_is_the_reason(tmp_path, monkeypatch):
    refusal = subprocess.CompletedProcess([], 1, stdout="epd-serve: error: no python3.11 was found")
    monkeypatch.setattr(subject, "_ran", lambda *_, **more: refusal)

    with pytest.raises(ConfigError, match=r"no python3\.11 was found"):
        environment(tmp_path / "venv")
    assert found(tmp_path / "venv") is None


def test_an_installed_epd_bench_makes_none_and_says_so(tmp_path, made, monkeypatch):
    monkeypatch.setattr(subject, "SCRIPT", tmp_path / "none.sh")

    with pytest.raises(ConfigError, match="run it from a checkout"):
        environment(tmp_path / "venv")


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
    with pytest.raises(ConfigError, match="AISBench cannot load a tokenizer from there:\n  no tokenizer in"):
        check_tokenizer(bench, tmp_path / "empty")
    with pytest.raises(ConfigError, match="is no folder"):
        check_tokenizer(bench, Path(os.devnull))
