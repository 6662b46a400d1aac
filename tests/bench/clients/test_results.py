"""An interrupted sweep goes on where it was cut, or says why it cannot."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.clients.results import Results, difference, keep_runs, read_records
from epd_serve.errors import ConfigError
from tests.bench.clients.known_server import Known, KnownServer
from tests.bench.clients.test_command import Served, served  # noqa: F401  (a fixture)
from tests.waiting import wait_for

RATES = "200,300,400"


class HangsAfterTheFirstRun(KnownServer):
    hangs = True

    @property
    def usual(self) -> Known:  # type: ignore[override]
        return Known(fault="hang") if self.hangs and self.seen > 12 else Known()


BODY = {"max_tokens": 4, "ignore_eos": True}


def sweep(
    served: Served,  # noqa: F811
    folder: Path,
    *flags: str,
    rates: str = RATES,
    body: Mapping[str, Any] = BODY,
) -> int:
    (folder / "bodies.jsonl").write_text(json.dumps(body))
    given = ["--bodies", str(folder / "bodies.jsonl"), "--rate", rates, "--n", "12", "--min-samples", "1"]
    given += ["--warm-up", "0", "--late-ms", "1e9", "--json", str(folder / "r.json"), *flags]
    return main(["load", served.server.url, *given])


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return found


@pytest.fixture
def interrupted(served: Served, tmp_path: Path) -> Path:  # noqa: F811
    """The folder of a sweep that Ctrl-C ended in the second of its three runs."""
    served.server.__class__ = HangsAfterTheFirstRun

    def interrupt() -> None:
        wait_for(lambda: served.server.under_way)
        wait_for(lambda: served.server.seen > 12)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    code = sweep(served, tmp_path)
    killer.join()
    assert code == 128 + signal.SIGINT
    served.server.hangs = False  # type: ignore[attr-defined]
    return tmp_path


def test_the_missing_rates_are_measured_and_the_others_kept(served, interrupted, capsys):  # noqa: F811
    before = result(interrupted)
    seen = served.server.seen
    first = [row for row in read_records(interrupted / "r.rows.jsonl") if row.run == "200 rps"]
    assert [row["stopped"] for row in before["rows"]] == ["", "interrupted"]

    assert sweep(served, interrupted, "--resume") == 0

    found = result(interrupted)
    assert [(row["run"], row["number"], row["stopped"]) for row in found["rows"]] == [
        ("200 rps", 0, ""),
        ("300 rps", 1, ""),
        ("400 rps", 2, ""),
    ]
    assert found["rows"][0] == before["rows"][0]
    assert served.server.seen == seen + 24, "the first rate was not asked again"
    assert {name.split("/")[0] for name in found["figures"]} == {"200 rps", "300 rps", "400 rps"}
    rows = read_records(interrupted / "r.rows.jsonl")
    assert rows[:12] == first and len(rows) == 36 and all(row.ok for row in rows)
    assert [one["finished_before"] for one in found["env"]["sessions"]] == [[], ["200 rps"]]
    assert "200 rps: measured before" in capsys.readouterr().out
    assert sweep(served, interrupted, "--resume", rates="200,300,400,500") == 0, "further rates come behind"
    assert len(result(interrupted)["rows"]) == 4
    assert len(result(interrupted)["env"]["sessions"]) == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "1"], "seed was 0, is 1"),
        (["--n", "13"], "n was 12, is 13"),
        (["--slo", "800:30"], "slo was 2000:50:p90,2000:80:p90,800:30:p90, is 800:30:p90"),
        (["--devices", "2"], "devices was not given, is 2"),
        (["--kind", "simulated"], "kind was real, is simulated"),
        (["--rate", "300,200"], "200 rps has another place among the rates"),
    ],
)
def test_another_experiment_is_refused_and_named(served, interrupted, capsys, flags, said):  # noqa: F811
    kept, seen = result(interrupted), served.server.seen

    assert sweep(served, interrupted, "--resume", *flags) == 1

    assert said in capsys.readouterr().err
    assert (result(interrupted), served.server.seen) == (kept, seen)


def test_a_sweep_that_left_nothing_begins_anew(served, tmp_path, capsys):  # noqa: F811
    assert sweep(served, tmp_path, "--resume", rates="200") == 0
    assert "nothing there to go on with" in capsys.readouterr().out
    assert len(read_records(tmp_path / "r.rows.jsonl")) == 12


@pytest.mark.parametrize("flags", [["--resume"], ["--resume", "--json", "r.json", "--find-goodput", "0.9"]])
def test_what_cannot_be_resumed_says_so(served, capsys, flags):  # noqa: F811
    assert main(["load", served.server.url, "--bodies", "x", "--rate", "1", *flags]) == 1
    assert "--resume goes on with a sweep" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {}, "env": {}, "rows": [1]}'])
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        Results(tmp_path / "r.json", flag="--json", resume=True)


def test_lines_of_other_runs_and_half_a_line_are_let_go(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"run":"a"}\n{"run":"b"}\n[]\n{"run":"a"')

    keep_runs(path, {"a"}, "--json")

    assert path.read_text() == '{"run":"a"}\n'
    keep_runs(tmp_path / "none", {"a"}, "--json")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_other_requests_is_another_experiment(served, interrupted, capsys):  # noqa: F811
    assert sweep(served, interrupted, "--resume", body={"max_tokens": 4, "ignore_eos": True, "user": "x"}) == 1
    assert "is another experiment: bodies was bodies.jsonl (" in capsys.readouterr().err


def test_the_first_field_that_differs_is_named_with_both_values():
    assert difference({"a": 1, "slo": ["1:2"]}, {"a": 1, "slo": ["1:2"]}) == ""
    assert difference({"warm_up": None}, {"warm_up": 2.0}) == "warm_up was not given, is 2.0"
    assert difference({"gone": 1}, {}) == "gone was 1, is not given"
