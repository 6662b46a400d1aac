"""`epd-bench workload`, and the flags that commands share."""

from __future__ import annotations

import argparse
import errno
import os

import pytest

from bench.cli import main
from bench.workloads import exports
from bench.workloads.profiles import PROFILES
from bench.workloads.requests import ClosedLoop, Poisson
from bench.workloads.workload import add_arguments, arrivals_of, workload
from epd_serve.errors import ConfigError
from tests.bench.workloads.exports import rows


def build(name, *words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(words)
    return workload(name, arguments, arrivals_of(arguments))


def test_a_workload_can_be_read_twice_and_moved_to_another_rate():
    found = build("sharegpt4o-like", "--n", "20", "--rate", "4")

    assert list(found.requests()) == list(found.requests())
    slow, fast = list(found.requests()), list(found.at(Poisson(8)).requests())
    assert [one.text for one in slow] == [one.text for one in fast]
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s / 2, abs=1e-5)


def test_another_seed_gives_other_requests_of_the_same_kind():
    found = build("mme-like", "--n", "5")

    assert list(found.seeded(9).requests()) == list(build("mme-like", "--n", "5", "--seed", "9").requests())
    assert {one.text for one in found.seeded(9).requests()}.isdisjoint(one.text for one in found.requests())


def test_a_run_has_the_profile_s_number_of_requests():
    assert build("multi-image-4k").count == 100
    assert build("azure-bursty", "--concurrency", "3").arrivals == ClosedLoop(3)


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("sharegpt4o-like", ["--n", "0"], "--n is 0"),
        ("sharegpt4o-like", ["--rate", "2", "--concurrency", "2"], "it has no --rate"),
        ("sharegpt4o-like", ["--rate", "0"], "rate is 0"),
    ],
)
def test_flags_that_do_not_go_together_are_told(name, words, says):
    with pytest.raises(ConfigError, match=says):
        build(name, *words)


def test_the_list_has_every_workload(capsys):
    assert main(["workload", "--list"]) == 0

    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:] if line.strip()}
    assert set(PROFILES) <= set(shown)
    assert "EPD-Serve §4.1" in shown["visualwebinstruct-like"]


def test_one_workload_is_shown_with_the_source_of_each_number(capsys):
    assert main(["workload", "visualwebinstruct-like", "--rate", "3"]) == 0

    shown = capsys.readouterr().out
    assert "text inputs contain 63.1 tokens on average" in shown and "chosen: " in shown


@pytest.mark.parametrize("client", ["aisbench", "vllm", "aiperf"])
def test_a_workload_is_exported_and_the_command_for_it_shown(tmp_path, capsys, client):
    cache, out = str(tmp_path / "cache"), tmp_path / "out"
    words = ["workload", "mme-like", "--n", "3", "--rate", "2", "--cache", cache, "--export", client, str(out)]

    assert main(words) == 0
    assert len(rows(out)) == 3 + (client == "aisbench")
    assert "run:  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "NAME is missing"),
        (["sharegpt"], "did you mean 'sharegpt4o-like'"),
        (["mme-like", "--export", "guidellm", "out"], "no client is called 'guidellm'"),
    ],
)
def test_a_mistake_is_one_line_and_a_failure(capsys, words, says):
    assert main(["workload", *words]) == 1
    assert says in capsys.readouterr().err


def test_an_export_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = ["workload", "mme-like", "--n", "1", "--cache", str(tmp_path / "cache"), "--export", "vllm"]

    assert main([*words, str(tmp_path / "file" / "out")]) == 1
    assert "file/out cannot be written" in capsys.readouterr().err


def test_a_full_disk_is_named_and_leaves_no_half_export(tmp_path, capsys, monkeypatch):
    class Full:
        def dumps(self, *_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exports, "json", Full())
    words = ["workload", "mme-like", "--n", "1", "--cache", str(tmp_path / "cache"), "--export", "vllm"]

    assert main([*words, str(tmp_path / "out")]) == 1
    assert "No space left on device: free some space" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
