"""`epd-bench aisbench` from end to end, with a stand-in for AISBench's command and a server whose faults are known.

The real AISBench runs the first test too where `EPD_AISBENCH_VENV` names an environment that has it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.aisbench import command, rate
from bench.cli import main
from bench.clients.results import read_records
from bench.clients.target import Target
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError
from tests.bench.aisbench.environments import fake_environment
from tests.bench.clients.known_server import Known, KnownServer
from tests.bench.clients.serving import Served
from tests.waiting import wait_for

GOOD = Known(first_s=0.01, gap_s=0.001, tokens=4)


class Changing(KnownServer):
    """The first answers are good: of the look, the warm-up, its row, and two more. Later ones are `then`."""

    good, then = 5, GOOD

    @property  # type: ignore[override]
    def usual(self) -> Known:
        return GOOD if self.seen <= self.good else self.then

    @usual.setter
    def usual(self, known: Known) -> None:
        pass


@pytest.fixture
def served() -> Iterator[Served]:
    thread = Served(Changing())
    thread.start()
    wait_for(lambda: thread.server.url)
    yield thread
    thread.stop()


@pytest.fixture
def bench(served, tmp_path) -> Callable[..., int]:
    """The command with what every test needs."""
    venv = fake_environment(tmp_path / "venv")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")

    def run(*flags: str) -> int:
        words = ["aisbench", served.server.url, "--venv", str(venv), "--tokenizer", str(tmp_path / "tokenizer")]
        words += ["--workload", "pope-like", "--output-tokens", "4", "--n", "8", "--cache", str(tmp_path / "cache")]
        words += ["--json", str(tmp_path / "r.json"), "--late-ms", "1e9", "--min-samples", "3"]
        return main([*words, *flags])

    monkey_text_tokenizer(tmp_path)
    return run


def monkey_text_tokenizer(folder: Path) -> None:
    """The user's texts are counted by the same tokenizer, so it is a real one: the built-in model's."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(builtin_model_dir()) / name
        if source.is_file():
            (folder / "tokenizer" / name).write_bytes(source.read_bytes())


def result(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return found


def test_rates_are_measured_judged_and_set_beside_aisbenchs_own_numbers(bench, served, tmp_path, capsys):
    flags = ["--rates", "40,80", "--devices", "2", "--slo", "60000:60000", "--out", str(tmp_path / "out")]

    assert bench(*flags) == 0
    found = result(tmp_path)
    assert found["figures"]["40 rps/slo_60000:60000:p90/attainment"] == 1.0
    assert found["figures"]["80 rps/slo_60000:60000:p90/effective_tokens_per_s_per_device"] > 0
    assert found["figures"]["goodput/slo_60000:60000:p90/rps"] == 80
    assert found["figures"]["goodput/slo_60000:60000:p90/rps_per_device"] == 40
    assert found["figures"]["40 rps/aisbench/TTFT/Average"] == 5.5
    assert found["env"]["load"]["client"] == "AISBench 3.1.20260630"
    assert [row["run"] for row in found["rows"]] == ["40 rps", "80 rps"]
    rows = read_records(tmp_path / "r.rows.jsonl")
    assert len(rows) == 16 and all(row.ok and row.output_tokens == 4 for row in rows)
    assert served.server.seen == 1 + 2 * (1 + 9), "a look, and at each rate a warm-up, its row and eight requests"
    shown = capsys.readouterr().out
    assert "goodput so far for 90% within 60000:60000:p90: 80 requests/s" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rate-40", "rate-80"]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (Known(fault="status", status=429), "× status 429: Too Many Requests"),
        (Known(fault="error event", tokens=4), "× no usage: a success to AISBench, yet the server counted no token"),
        (Known(fault="short", tokens=4), "× short: 3 tokens of 4"),
        (Known(fault="garbage"), "× failed: "),
    ],
)
def test_failures_that_aisbench_calls_a_success_too_are_misses(bench, served, tmp_path, capsys, then, said):
    served.server.good, served.server.then = 8, then

    assert bench("--rates", "100", "--min-samples", "1") == int(then.fault != "status"), "refusals are a result"
    assert said in capsys.readouterr().out
    assert result(tmp_path)["figures"]["100 rps/slo_2000:50:p90/attainment"] < 0.7
    assert result(tmp_path)["figures"]["goodput/slo_2000:50:p90/rps"] == 0.0


def test_no_good_answer_is_no_measurement(bench, served, tmp_path, capsys):
    served.server.good, served.server.then = 2, Known(fault="error event", tokens=4)

    assert bench("--rates", "100") == 1
    assert "not valid: not one good answer among 8 requests: 8 × no usage" in capsys.readouterr().err
    assert not result(tmp_path)["rows"][0]["valid"]
    assert len(read_records(tmp_path / "r.rows.jsonl")) == 8


def test_one_request_is_too_few_unless_one_is_enough(bench, capsys):
    assert bench("--rates", "100", "--n", "1", "--min-samples", "2") == 1
    assert "2 are needed: run longer" in capsys.readouterr().err
    assert bench("--rates", "100", "--n", "1", "--min-samples", "1") == 0


def test_a_warm_up_that_fails_ends_it_with_what_aisbench_says(bench, served, capsys):
    served.server.good, served.server.then = 1, Known(fault="status")

    assert bench("--rates", "100,200") == 1
    err = capsys.readouterr().err
    assert "AISBench measured nothing at 100 rps: Exit task because all warmup requests failed" in err


def test_aisbench_that_dies_at_once_is_said_with_its_own_words(bench, capsys):
    assert bench("--rates", "100", "--model", "nothing") == 1
    assert "measured nothing at 100 rps: [TINFER-PARAM-005]. memory usage too high" in capsys.readouterr().err


def test_an_endpoint_that_is_down_is_said_before_anything(bench, served, capsys):
    served.stop()

    assert bench("--rates", "100") == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_an_endpoint_that_dies_ends_the_sweep_and_keeps_what_there_is(bench, served, tmp_path, capsys):
    def die() -> None:
        wait_for(lambda: served.server.seen > 6)
        served.stop()

    killer = threading.Thread(target=die)
    killer.start()
    code = bench("--rates", "20,40")
    killer.join()

    assert code == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert [row["run"] for row in result(tmp_path)["rows"]] == ["20 rps"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_aisbench_and_keeps_the_rates_that_were_finished(bench, tmp_path, monkeypatch, capsys, number):
    def interrupt() -> None:
        wait_for(lambda: list((tmp_path / "out").rglob("hangs")))
        os.kill(os.getpid(), number)

    asked = rate.write_entry
    entries = iter(("known", "hang"))
    monkeypatch.setattr(rate, "write_entry", lambda folder, one: asked(folder, replace(one, model=next(entries))))
    killer = threading.Thread(target=interrupt)
    killer.start()
    try:
        code = bench("--rates", "100,200", "--out", str(tmp_path / "out"))
    except SystemExit as ended:
        code = ended.code
    killer.join()

    assert code == 128 + number
    shown = capsys.readouterr()
    assert "goodput so far for 90% within" in shown.out
    (run,) = result(tmp_path)["rows"]
    assert run["run"] == "100 rps"


def test_a_run_without_an_end_is_ended(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bench.aisbench.rate.limit_s", lambda *about: 2.0)

    assert bench("--rates", "100", "--model", "hang") == 1
    assert "AISBench did not end within 2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rates", "0"], "--rates 0"),
        (["--rates", "4-1"], "--rates 4-1"),
        (["--rates", "1,1"], "each rate once"),
        (["--rates", "1", "--n", "0"], "--n is 0"),
        (["--rates", "1", "--devices", "0"], "--devices is 0"),
        (["--rates", "1", "--slo", "2"], "TTFT:TPOT"),
        (["--rates", "1", "--timeout", "-1"], "--timeout is -1"),
        (["--rates", "1", "--api-key-file", "/none"], "--api-key-file /none cannot be read"),
        (["--rates", "1", "--workload", "nothing-like"], "nothing-like"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_sent(bench, served, capsys, flags, said):
    assert bench(*flags) == 1
    assert said in capsys.readouterr().err
    assert served.server.seen == 0


def test_old_results_are_not_taken_for_new_ones(bench, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rate-100").mkdir()

    assert bench("--rates", "100", "--out", str(tmp_path / "out")) == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_disk_without_room_for_rows_is_said(bench, capsys):
    assert bench("--rates", "100", "--rows", "/dev/full") == 1
    assert "No space left on device" in capsys.readouterr().err


def test_an_interrupted_preparation_sends_nothing(bench, served, monkeypatch, capsys):
    def interrupt(*about: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check_tokenizer", interrupt)
    assert bench("--rates", "100") == 130
    assert "interrupted" in capsys.readouterr().err
    assert served.server.seen == 1, "the look alone"


def test_the_tokenizer_is_where_the_endpoint_says_its_model_lies(tmp_path):
    target = Target("http://127.0.0.1:1")
    served = [("a", "/nowhere"), ("b", str(tmp_path))]

    assert command._model(target, served, "b", None) == ("b", tmp_path)
    assert command._model(target, served, None, tmp_path) == ("a", tmp_path)
    assert command._model(target, [("epd-demo", "epd-demo")], None, None)[1] == builtin_model_dir().absolute()
    with pytest.raises(ConfigError, match="say --tokenizer DIR"):
        command._model(target, served, None, None)
    with pytest.raises(ConfigError, match="say --model"):
        command._model(target, [], None, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    "EPD_AISBENCH_VENV" not in os.environ, reason="EPD_AISBENCH_VENV names no environment with AISBench"
)
def test_the_real_aisbench_does_as_its_stand_in(bench, tmp_path):
    flags = ["--rates", "4", "--venv", os.environ["EPD_AISBENCH_VENV"], "--tokenizer", str(builtin_model_dir())]

    assert bench(*flags) == 0
    rows = read_records(tmp_path / "r.rows.jsonl")
    assert len(rows) == 8 and all(row.ok and len(row.token_s) == 4 for row in rows)
    own = {name for name in result(tmp_path)["figures"] if "/aisbench/" in name}
    assert {"4 rps/aisbench/TTFT/P99", "4 rps/aisbench/Request Throughput"} <= own
