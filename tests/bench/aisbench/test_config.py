"""What AISBench is told, read back as it reads it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from bench.aisbench.rate import Entry, command_line, model_entry, write_entry
from epd_serve.errors import ConfigError
from tests.bench.aisbench.fake_ais_bench import MODEL_FIELDS, configuration

ENTRY = Entry("http://127.0.0.1:8000", "it's \\ a model", Path("/a folder/t"), api_key="k", rate_rps=0.5, requests=60)


def read_back(tmp_path: Path, entry: Entry) -> dict[str, object]:
    path = tmp_path / "entry.py"
    path.write_text(model_entry(entry))
    (found,) = configuration(path)["models"]
    return dict(found)


def test_the_entry_says_what_was_asked_whatever_characters_it_has(tmp_path):
    found = read_back(tmp_path, ENTRY)

    assert set(found) == MODEL_FIELDS
    assert (found["model"], found["path"], found["url"]) == ("it's \\ a model", "/a folder/t", "http://127.0.0.1:8000")
    assert found["type"] == "VLLMCustomAPIChat" and found["attr"] == "service" and found["stream"] is True
    assert found["retry"] == 1, "it counts attempts"
    assert found["generation_kwargs"] == {"temperature": 0.0, "ignore_eos": True}
    assert found["use_timestamp"] is True and found["request_rate"] == 0.5, "its pacing loop spins at a rate of 0"


@pytest.mark.parametrize(("requests", "at_once"), [(1, 2), (60, 61), (512, 500)])
def test_no_request_waits_outside_of_the_clock_while_that_can_be(tmp_path, requests, at_once):
    entry = Entry("http://h:1", "m", Path("/t"), requests=requests)

    assert read_back(tmp_path, entry)["batch_size"] == at_once


def test_the_command_sends_one_row_more_for_the_warm_up():
    words = command_line(Path("/v/bin/ais_bench"), Path("/x"), Path("/x/results"), 60)

    assert words[0] == "/v/bin/ais_bench" and words[words.index("--num-prompts") + 1] == "61"
    assert words[words.index("--config-dir") + 1] == "/x" and "--mode" in words


def test_the_entry_may_hold_a_key_and_is_for_its_owner(tmp_path):
    write_entry(tmp_path, ENTRY)

    assert stat.S_IMODE((tmp_path / "models" / "epd_bench.py").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "models").write_text("in the way")

    with pytest.raises(ConfigError, match="cannot be written"):
        write_entry(tmp_path, ENTRY)
