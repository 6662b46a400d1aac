"""`epd-bench` as a command, and what its records say."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import COMMANDS, main, parser
from bench.record import ROOT, busy, environment, flatten, write
from bench.statistic import Spread, percentile
from deploy.agent.cpu_time import cpu_seconds, parts, since
from epd_serve.errors import ConfigError


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_each_measurement_writes_json(capsys, name):
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])

    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert name in ("workload", "report", "memory-tables", "compare") or {"--quick", "--json"} <= set(shown.split())


def test_help_lists_what_a_user_needs_first_and_imports_no_measurement():
    script = """
import sys
from bench.cli import COMMANDS, main, parser
try:
    main(["--help"])
except SystemExit:
    print(sorted(name for name in sys.modules if name.startswith("bench.") or name in ("numpy", "vllm", "torch")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)

    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")]
    assert names[:8] == ["layouts", "report", "load", "plan", "aisbench", "workload", "model-check", "compare"]
    assert done.stdout.splitlines()[-1] == "['bench.cli']"


def test_the_whole_parser_has_every_command_with_its_flags():
    arguments = parser().parse_args(["transfer", "pd", "--quick"])

    assert arguments.quick and callable(arguments.run)


def test_a_measurement_has_to_be_named():
    with pytest.raises(SystemExit) as ended:
        main([])

    assert ended.value.code == 2


def test_ctrl_c_ends_a_measurement_with_its_exit_code_and_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.cli.parser", lambda _: _Parsed(interrupted))

    assert main(["arena"]) == 130
    assert "Traceback" not in capsys.readouterr().err


class _Parsed:
    """A parser of whatever line: its command is `run`."""

    def __init__(self, run):
        self.run = run

    def parse_args(self, argv):
        return argparse.Namespace(run=self.run)


def test_a_result_is_figures_environment_and_rows(tmp_path):
    env = environment(["ttft", "--layouts", "TP1,(E-P)-D"])
    write(tmp_path / "deep" / "r.json", {"a": 1.5, "b": 2}, env, [{"turn": 0}])

    saved = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert saved["env"]["machine"].pop("load_average_1min_after") >= 0
    assert saved == {"figures": {"a": 1.5, "b": 2}, "env": env, "rows": [{"turn": 0}]}
    assert env["kind"] == "real"
    assert env["command"] == "epd-bench ttft --layouts 'TP1,(E-P)-D'"
    assert env["machine"]["cores"] >= 1
    assert {"cpu", "arch"} <= set(env["machine"])


def test_a_result_has_every_flag_also_those_that_nobody_gave_and_no_secret(tmp_path):
    asked = argparse.Namespace(
        seed=0, layout="E-P-D", json=tmp_path, header=["Authorization: Bearer k3y", "x-a:1"], run=main
    )
    env = environment(
        ["load", "--header", "Authorization: Bearer k3y", "--header=api-key:k3y", "--seed", "0"], asked=asked
    )

    assert env["asked"] == {
        "header": ["Authorization: ...", "x-a:1"],
        "json": str(tmp_path),
        "layout": "E-P-D",
        "seed": 0,
    }
    assert "k3y" not in json.dumps(env)
    assert {"cores", "load_average_1min"} <= set(env["machine"])


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    write(path, {"a": 1.0}, {}, [])
    kept = path.read_text()

    def full(self: Path, text: bytes) -> None:
        with self.open("wb") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write(path, {"a": 2.0}, {}, [])
    assert path.read_text() == kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_stays_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"--json /dev/full: No space left on device"):
        write(Path("/dev/full"), {"a": 1.0}, {}, [])
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("wrong", ["1.0", True, None, [1]])
def test_a_figure_is_a_number(tmp_path, wrong):
    with pytest.raises(AssertionError, match="figures are numbers"):
        write(tmp_path / "r.json", {"a": wrong}, {}, [])


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    write(None, {"a": 1.0}, {}, [])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_the_same_shape(path):
    saved = json.loads(path.read_text())

    assert list(saved) == ["figures", "env", "rows"]
    assert saved["figures"] and all(isinstance(value, int | float) for value in saved["figures"].values())
    assert {"kind", "command", "commit", "machine", "versions"} <= set(saved["env"])
    assert saved["rows"]


def test_a_busy_machine_is_said_to_be_busy():
    machine = {"cores": 4, "load_average_1min": 1.2}

    assert busy({"machine": machine}) == ""
    assert busy({"machine": machine | {"load_average_1min": 3.5}}).startswith("A busy machine: load 3.5 on 4 cores")


def test_nested_figures_get_joined_names():
    assert flatten({"unique": {"(E-P)-D": {"median_ms": 2.0}}, "x": 1}) == {"unique/(E-P)-D/median_ms": 2.0, "x": 1}


def test_percentile_is_the_nearest_rank():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(list(range(1, 11)), 90) == 9
    assert percentile([7], 90) == 7


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 100.0]) == Spread(3.0, 2.0, 4.0)
    assert f"{Spread(3.0, 2.0, 4.0):.1f}" == "3.0 (2.0–4.0)"


def test_cpu_time_is_counted_by_part():
    spent = cpu_seconds(parts(os.getpid(), {}))

    assert spent["proxy"] > 0
    assert since({"proxy": 1.0}, {"proxy": 3.0, "E0/api": 2.0}) == {"proxy": 2.0, "E0/api": 2.0}


def test_where_there_is_no_git_a_result_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert environment([])["commit"] == ""


def test_where_we_lie_in_a_checkout_of_something_else_a_result_has_no_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr("bench.record.ROOT", tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()

    found = environment([])
    assert (found["commit"], found["uncommitted_changes"]) == ("", False)
