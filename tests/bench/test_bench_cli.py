"""`epd-bench` as a command, and what its records say."""

from __future__ import annotations

import json
import os

import pytest

from bench.cli import main
from bench.phases import DIRECT
from bench.processes import cpu_seconds, parts, since
from bench.record import record, write
from bench.served import Served
from bench.statistic import percentile
from bench.ttft import Target, summarise


def test_each_measurement_has_help(capsys):
    for name in ("startup", "ttft", "arena"):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])

        assert ended.value.code == 0
        assert "--output" in capsys.readouterr().out


def test_a_measurement_has_to_be_named():
    with pytest.raises(SystemExit) as ended:
        main([])

    assert ended.value.code == 2


def test_a_record_carries_command_machine_and_kind(tmp_path):
    write(tmp_path / "deep" / "r.json", record(["ttft", "--layouts", "TP1,(E-P)-D"]))

    saved = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert saved["kind"] == "real"
    assert saved["command"] == "epd-bench ttft --layouts 'TP1,(E-P)-D'"
    assert saved["machine"]["cores"] >= 1
    assert {"cpu", "arch"} <= set(saved["machine"])


def test_percentile_is_the_nearest_rank():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(list(range(1, 11)), 90) == 9
    assert percentile([7], 90) == 7


def test_cpu_time_is_counted_by_part():
    spent = cpu_seconds(parts(os.getpid(), {}))

    assert spent["proxy"] > 0
    assert since({"proxy": 1.0}, {"proxy": 3.0, "E0/api": 2.0}) == {"proxy": 2.0, "E0/api": 2.0}


def test_ratios_are_of_medians_to_the_first_target(tmp_path):
    launch = Served("TP1", "http://proxy", "m", {}, 1.0, 1.0, (), tmp_path)
    targets = [Target(name, "http://proxy", launch, DIRECT) for name in ("TP1", "(E-P)-D")]
    rows = [row("TP1", ttft) for ttft in (10.0, 12.0, 50.0)] + [row("(E-P)-D", ttft) for ttft in (20.0, 30.0, 90.0)]

    figures = summarise(rows, targets)

    assert figures["TP1"]["ratio"] == 1.0
    assert (figures["(E-P)-D"]["median_ms"], figures["(E-P)-D"]["ratio"]) == (30.0, 2.5)
    assert figures["(E-P)-D"]["groups_ms"] == {"vLLM": pytest.approx(140 / 3)}


def row(target: str, ttft: float) -> dict[str, object]:
    empty = {name: {} for name in ("phases_ms", "hidden_ms", "cpu_ms")}
    return {"target": target, "right": True, "ttft_ms": ttft, "residual_ms": 0.0, "groups_ms": {"vLLM": ttft}, **empty}
