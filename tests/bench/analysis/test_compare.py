"""`epd-bench compare`: what it finds different, what it does not, and what it refuses to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.cli import main
from tests.bench.analysis.loads import ENV, requests, result


def compared(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and rows by figure. A and B are `a*` and `b*`."""
    (a,), (b,) = ([one for one in tmp_path.iterdir() if one.name in (name, f"{name}.json")] for name in ("a", "b"))
    code = main(["compare", str(a), str(b), "--json", str(tmp_path / "out.json"), *flags])
    if code:
        return code, {}
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    return code, {"/".join(filter(None, (row["of"], row["figure"]))): row for row in rows}


def test_a_slower_run_is_worse_by_as_much_as_it_is_slower(tmp_path, capsys):
    result(tmp_path / "a.json", requests())
    result(tmp_path / "b.json", requests(slower=1.3, seed=1))

    code, found = compared(tmp_path)

    assert code == 0
    mean = found["1 rps/ttft_ms/mean"]
    assert mean["over"] == "paired requests"
    assert mean["ratio"] == pytest.approx(1.3, rel=0.01)
    assert 1.28 < mean["low"] < mean["ratio"] < mean["high"] < 1.32
    assert {mean["verdict"], found["1 rps/tpot_ms/p50"]["verdict"]} == {"worse"}
    assert found["1 rps/ttft_ms/max"]["verdict"] == "no interval"
    assert found["1 rps/ttft_ms/p99"]["verdict"] == "no interval", "two requests lie beyond it"
    assert found["1 rps/requests"]["better"] == ""
    shown = capsys.readouterr().out
    assert "worse" in shown and "(simulated)" in shown
    assert "requests_of_the_run" not in shown and "truncated" not in shown and "too few requests" in shown
    assert json.loads((tmp_path / "out.json").read_text())["figures"]["1 rps/ttft_ms/mean/low"] == mean["low"]


def test_two_runs_of_the_same_show_no_difference(tmp_path, capsys):
    result(tmp_path / "a.json", requests(seed=1))
    result(tmp_path / "b.json", requests(seed=2))

    _, found = compared(tmp_path)

    assert found["1 rps/ttft_ms/p50"]["verdict"] == "no difference shown"
    assert found["1 rps/output_tokens_per_s"]["verdict"] == "no difference shown"
    assert "no difference shown" in capsys.readouterr().out


def test_the_same_requests_drawn_together_tell_more_than_others(tmp_path):
    result(tmp_path / "a.json", requests(seed=1))
    result(tmp_path / "b.json", requests(seed=2, slower=1.03))
    _, together = compared(tmp_path)
    result(tmp_path / "b.json", [_renamed(one) for one in requests(seed=2, slower=1.03)])
    _, apart = compared(tmp_path)

    paired, unpaired = together["1 rps/ttft_ms/mean"], apart["1 rps/ttft_ms/mean"]
    assert (paired["over"], unpaired["over"]) == ("paired requests", "requests")
    assert paired["ratio"] == unpaired["ratio"]
    assert paired["high"] - paired["low"] < 0.2 * (unpaired["high"] - unpaired["low"])
    assert (paired["verdict"], unpaired["verdict"]) == ("worse", "no difference shown")


def _renamed(one: Any) -> Any:
    return msgspec.structs.replace(one, spec=f"other-{one.n}")


def test_rows_that_do_not_give_the_figure_give_no_interval(tmp_path):
    result(tmp_path / "a.json", requests())
    result(tmp_path / "b.json", requests())
    path = tmp_path / "b.rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[100:]))

    _, found = compared(tmp_path)

    assert found["1 rps/ttft_ms/mean"]["low"] is None
    assert found["1 rps/ttft_ms/mean"]["why"] == "the requests that were kept do not give it"


def test_without_rows_ratios_are_shown_and_said_to_have_no_interval(tmp_path, capsys):
    for name in ("a", "b"):
        result(tmp_path / f"{name}.json", requests())
        (tmp_path / f"{name}.rows.jsonl").unlink()

    _, found = compared(tmp_path)

    assert found["1 rps/ttft_ms/mean"]["ratio"] == 1.0
    assert "its requests were not kept" in capsys.readouterr().out


def test_one_request_is_too_few_for_any_interval(tmp_path):
    for name in ("a", "b"):
        result(tmp_path / f"{name}.json", requests(count=1))

    _, found = compared(tmp_path)

    assert all(row["low"] is None for row in found.values())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "real"}, "kind: A has simulated, B has real"),
        ({"load": {**ENV["load"], "seed": 1}}, "seed: A has 0, B has 1"),
        ({"load": {**ENV["load"], "workload": "v"}}, "workload: A has w, B has v"),
        ({"load": {**ENV["load"], "slos": ["1:1"]}}, "slos: A has"),
        ({"load": {**ENV["load"], "duration_s": 5}}, ""),
    ],
)
def test_what_cannot_be_compared_is_refused_by_field_unless_forced(tmp_path, capsys, changed, said):
    result(tmp_path / "a.json", requests())
    result(tmp_path / "b.json", requests(), env=changed)

    code, _ = compared(tmp_path)
    assert code == (1 if said else 0)
    assert said in capsys.readouterr().err
    if said:
        assert not (tmp_path / "out.json").exists()
        assert compared(tmp_path, "--force")[0] == 0
        assert f"NOT COMPARABLE, forced: {said}" in capsys.readouterr().out


def test_other_rates_are_refused(tmp_path, capsys):
    result(tmp_path / "a.json", requests("1 rps"))
    result(tmp_path / "b.json", requests("2 rps"))

    assert compared(tmp_path)[0] == 1
    assert "no figure in common: 1 rps and 2 rps" in capsys.readouterr().err


def test_what_has_to_be_known_beside_the_ratios_is_said(tmp_path, capsys):
    result(tmp_path / "a.json", requests())
    other = {
        "commit": "def",
        "uncommitted_changes": True,
        "machine": {**ENV["machine"], "cpu": "z", "load_average_1min": 3.9},
        "versions": {"python": "4"},
    }
    result(tmp_path / "b.json", requests(), env=other)

    assert compared(tmp_path)[0] == 0
    shown = capsys.readouterr().out
    for text in (
        "machine/cpu: A has y, B has z",
        "commit: A has abc, B has def",
        "versions/python: A has 3, B has 4",
        "B was measured with uncommitted changes",
        "B: A busy machine: load 3.9 on 4 cores",
    ):
        assert text in shown


def test_other_numbers_of_devices_are_compared_per_device(tmp_path, capsys):
    result(tmp_path / "a.json", requests("1 rps"), devices=1)
    result(tmp_path / "b.json", requests("2 rps"), devices=2)

    _, found = compared(tmp_path)

    for name in ("output_tokens_per_s_per_device", "slo_2000:50:p90/effective_tokens_per_s_per_device"):
        tokens = found[f"1 rps per device/{name}"]
        assert (tokens["ratio"], tokens["low"], tokens["high"]) == pytest.approx((0.5, 0.5, 0.5), rel=1e-3)
    assert "devices: A has 1, B has 2" in capsys.readouterr().out


def test_folders_are_compared_entry_by_entry(tmp_path, capsys):
    for side, entries in (("a", ("TP1", "E-P-D", "old")), ("b", ("TP1", "E-P-D"))):
        for name in entries:
            env = {"deployment": {"name": name, "layout": name, "devices": 2}}
            result(tmp_path / side / f"slug-{name.lower()}", requests(), env=env)

    code, found = compared(tmp_path)

    assert code == 0
    assert found["TP1/1 rps/ttft_ms/p50"]["verdict"] == "no difference shown"
    assert "E-P-D/1 rps/ttft_ms/p50" in found
    assert "only in one of them: old" in capsys.readouterr().out
    alone = [str(tmp_path / "a" / "slug-tp1"), str(tmp_path / "b" / "slug-e-p-d")]
    assert main(["compare", *alone]) == 0, "two entries of different names"


def test_folders_of_other_experiments_are_refused(tmp_path, capsys):
    for side, seconds in (("a", 60), ("b", 30)):
        result(tmp_path / side / "slug", requests(), env={"deployment": {"name": "TP1"}})
        (tmp_path / side / "experiment.json").write_text(
            json.dumps({"duration_s": seconds, "seed": 0, "rates": [seconds]})
        )

    assert compared(tmp_path)[0] == 1
    assert "duration_s: A has 60, B has 30" in capsys.readouterr().err
    (tmp_path / "b" / "experiment.json").write_text("[")
    assert compared(tmp_path)[0] == 1
    assert "experiment.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file or folder"),
        ("{", "cannot be read"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `figures`"),
        ('{"figures": {"a": "1"}, "env": {}, "rows": []}', "Expected `float`, got `str`"),
    ],
)
def test_what_is_no_result_is_named(tmp_path, capsys, text, said):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)

    assert main(["compare", str(path), str(path)]) == 1
    assert f"{path}" in (err := capsys.readouterr().err) and said in err


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
    assert "has no results" in capsys.readouterr().err
