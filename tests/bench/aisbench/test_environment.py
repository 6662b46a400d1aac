"""AISBench's environment: made once, used again, made anew when half made or of other pins. No pip is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.aisbench import environment as subject
from bench.aisbench.environment import MARKER, PINS, check_tokenizer, default_folder, environment, found
from epd_serve.errors import ConfigError
from tests.bench.aisbench.environments import VERSION, fake_environment


@pytest.fixture
def steps(monkeypatch) -> list[list[str]]:
    """Commands that would have been run; the second one puts AISBench into the folder that the first names."""
    ran: list[list[str]] = []

    def run(command: list[Any], limit_s: float) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        ran.append(words)
        if "pip" in words:
            fake_environment(Path(words[0]).parents[1])
        return subprocess.CompletedProcess(words, 0, stdout="")

    monkeypatch.setattr(subject, "_ran", run)
    return ran


@pytest.fixture
def failing(monkeypatch) -> Callable[[str, str], None]:
    """Make the step that has this word fail with this output."""

    def fail(word: str, output: str) -> None:
        def run(command: list[Any], limit_s: float) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, int(word in [str(one) for one in command]), stdout=output)

        monkeypatch.setattr(subject, "_ran", run)

    return fail


def test_the_pins_hold_what_was_learned():
    text = PINS.read_text()

    assert f"ais_bench_benchmark=={VERSION}" in text
    assert "numpy==1.26" in text and "pyarrow==21." in text, "with NumPy below 2, or every run dies"


def test_it_is_made_from_the_pins_once(tmp_path, steps):
    made = environment(tmp_path / "venv")

    assert made.version == VERSION and made.command.is_file()
    assert [words[1:3] for words in steps] == [["-m", "venv"], ["-m", "pip"], ["-c", subject._LOOKS_AT_ITSELF]]
    assert steps[1][-2:] == ["-r", str(PINS)]
    assert environment(tmp_path / "venv") == made and len(steps) == 3


def test_a_half_made_one_is_made_again(tmp_path, steps):
    fake_environment(tmp_path / "venv")
    (tmp_path / "venv" / MARKER).write_text("unfinished")

    assert found(tmp_path / "venv") is None
    environment(tmp_path / "venv")
    assert len(steps) == 3 and found(tmp_path / "venv") is not None


def test_one_of_other_pins_is_made_again(tmp_path, steps):
    environment(tmp_path / "venv")
    other = tmp_path / "pins.txt"
    other.write_text(f"ais_bench_benchmark=={VERSION}\nnumpy==1.26.3\n")

    assert found(tmp_path / "venv", other) is None
    environment(tmp_path / "venv", other)
    assert steps[4][-1] == str(other)


def test_the_users_own_is_used_as_it_is(tmp_path, steps):
    folder = fake_environment(tmp_path / "own")

    assert environment(folder).version == VERSION
    assert steps == [] and not (folder / MARKER).exists()


def test_the_users_own_of_another_version_is_refused(tmp_path, steps):
    with pytest.raises(ConfigError, match=rf"has AISBench 3\.0, its results are read as those of {VERSION}"):
        environment(fake_environment(tmp_path / "own", "3.0"))
    assert steps == []


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path, steps):
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="no environment with AISBench, and not empty"):
        environment(tmp_path)
    assert (tmp_path / "thesis.tex").exists() and steps == []


@pytest.mark.parametrize(
    ("word", "output", "said"),
    [
        ("venv", "ensurepip is not available", "python3-venv"),
        ("pip", "ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("pip", "NewConnectionError: Temporary failure in name resolution", "check the network"),
        ("pip", "ERROR: No matching distribution found for ais_bench_benchmark", "no network, or an index without it"),
        ("-c", "ModuleNotFoundError: pyarrow", "cannot be imported:\n  ModuleNotFoundError"),
    ],
)
def test_what_fails_is_said_with_the_fix_and_tried_again_next_time(tmp_path, failing, word, output, said):
    failing(word, output)

    with pytest.raises(ConfigError, match=said):
        environment(tmp_path / "venv")
    assert found(tmp_path / "venv") is None
    assert (tmp_path / "venv" / MARKER).read_text() == "unfinished"


def test_a_disk_without_room_is_said_before_anything_is_downloaded(tmp_path, steps, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    with pytest.raises(ConfigError, match=r"0\.0 GB free, AISBench's environment takes 4 GB"):
        environment(tmp_path / "venv")
    assert steps == []


def test_a_python_that_does_not_fit_is_said(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(subject, "PYTHONS", ("1.0",))

    with pytest.raises(ConfigError, match=r"AISBench needs Python 1\.0"):
        environment(tmp_path / "venv")


def test_an_installed_epd_bench_has_no_pins_and_says_so(tmp_path, steps):
    with pytest.raises(ConfigError, match="run it from a checkout"):
        environment(tmp_path / "venv", tmp_path / "none.txt")


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
