"""`epd-bench load` as a command: what it leaves behind, what it refuses, and how it ends whatever happens."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.cli import main
from bench.clients.results import read_records
from bench.clients.sender import Bounds
from deploy.host.ports import free_ports
from epd_serve.traffic import Request as Recorded
from epd_serve.traffic import write_traffic
from tests.bench.clients.known_server import Known
from tests.bench.clients.serving import Served
from tests.waiting import wait_for


@pytest.fixture
def served() -> Iterator[Served]:
    thread = Served()
    thread.start()
    wait_for(lambda: thread.server.url)
    yield thread
    thread.stop()


@pytest.fixture
def sent(tmp_path):
    """A file of bodies that ask for these answers, as the flag that names it."""

    def write(*known: Known) -> list[str]:
        lines = [{"known": msgspec.to_builtins(one), "max_tokens": one.tokens, "ignore_eos": True} for one in known]
        (tmp_path / "bodies.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return ["--bodies", str(tmp_path / "bodies.jsonl")]

    return write


def load(served: Served, *flags: str) -> int:
    return main(["load", served.server.url, *flags, "--late-ms", "1e9"])  # a test's machine may be as slow as it is


def result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_leaves_figures_rows_and_a_table(served, sent, tmp_path, capsys):
    flags = [*sent(Known(first_s=0.01, gap_s=0.001)), "--rate", "200", "--n", "30", "--devices", "2"]

    assert load(served, *flags, "--json", str(tmp_path / "r.json")) == 0
    found = result(tmp_path / "r.json")
    assert found["figures"]["200 rps/slo_2000:50:p90/attainment"] == 1.0
    assert "200 rps/slo_2000:50:p90/effective_tokens_per_s_per_device" in found["figures"]
    assert found["rows"][0]["valid"]
    assert found["rows"][0]["repeated_requests"]
    assert found["env"]["load"]["client_on_the_servers_host"]
    rows = read_records(tmp_path / "r.rows.jsonl")
    assert len(rows) == served.server.seen == 30
    assert all(row.ok and row.ttft_s >= 0.01 for row in rows)
    assert "TTFT ≤ 2000 ms, 90 % of its token gaps ≤ 50 ms  100.0%" in capsys.readouterr().out


def test_a_sweep_has_a_run_of_each_rate(served, sent, tmp_path):
    flags = ["--rate", "100-300:100", "--n", "12", "--min-samples", "5", "--rows", str(tmp_path / "r.jsonl")]

    assert load(served, *sent(Known()), *flags, "--json", str(tmp_path / "r.json")) == 0
    assert [row["run"] for row in result(tmp_path / "r.json")["rows"]] == ["100 rps", "200 rps", "300 rps"]
    assert {row.run for row in read_records(tmp_path / "r.jsonl")} == {"100 rps", "200 rps", "300 rps"}


def test_a_closed_loop_is_a_load_too(served, sent, tmp_path):
    flags = ["--concurrency", "3", "--n", "30", "--warm-up", "0", "--json", str(tmp_path / "r.json")]

    assert load(served, *sent(Known()), *flags) == 0
    assert result(tmp_path / "r.json")["figures"]["3 at once/ok"] == 30


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (Known(fault="status"), "30 × status 429; status 429: {"),
        (Known(fault="garbage"), "It works!"),
        (Known(fault="not http"), "220 mail.example"),
        (Known(fault="error event"), "D0 died"),
        (Known(fault="cut"), "30 × cut"),
    ],
)
def test_a_server_without_a_good_answer_is_no_measurement(served, sent, tmp_path, capsys, known, said):
    flags = [*sent(known), "--rate", "300", "--n", "30", "--json", str(tmp_path / "r.json")]

    assert load(served, *flags) == 1
    assert "not valid: not one good answer among 30 requests" in (err := capsys.readouterr().err)
    assert said in err
    assert len(read_records(tmp_path / "r.rows.jsonl")) == 30
    assert not result(tmp_path / "r.json")["rows"][0]["valid"]


def test_refusals_beside_good_answers_are_counted_and_valid(served, sent, tmp_path, capsys):
    flags = [*sent(Known(), Known(fault="status")), "--rate", "300", "--n", "60", "--warm-up", "0"]

    assert load(served, *flags, "--json", str(tmp_path / "r.json")) == 0
    assert result(tmp_path / "r.json")["figures"]["300 rps/slo_2000:50:p90/attainment"] == pytest.approx(0.5, abs=0.02)
    assert "30 × status 429: " in capsys.readouterr().out


def test_one_request_is_too_few_unless_one_is_enough(served, sent, capsys):
    flags = [*sent(Known()), "--rate", "10", "--n", "1"]

    assert load(served, *flags) == 1
    assert "10 are needed: run longer" in capsys.readouterr().err
    assert load(served, *flags, "--min-samples", "1") == 0


def test_an_endpoint_that_is_down_is_said_before_anything_is_sent(sent, capsys):
    (port,) = free_ports(1)

    assert main(["load", f"http://127.0.0.1:{port}", *sent(Known()), "--rate", "1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_an_endpoint_that_dies_ends_the_sweep_and_keeps_what_there_is(served, sent, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.clients.flags.Bounds", _quick_bounds)
    rows = tmp_path / "r.jsonl"

    def die() -> None:
        wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") > 3)
        served.stop()

    killer = threading.Thread(target=die)
    killer.start()
    flags = ["--rate", "100,200", "--duration", "1000", "--rows", str(rows), "--json", str(tmp_path / "r.json")]
    code = load(served, *sent(Known()), *flags)
    killer.join()

    assert code == 1
    assert "the endpoint is gone" in capsys.readouterr().err
    assert [row["run"] for row in result(tmp_path / "r.json")["rows"]] == ["100 rps"]
    assert read_records(rows)[0].ok


def _quick_bounds(**more: Any) -> Bounds:
    return Bounds(**{**more, "gone_after": 3, "gone_s": 0.0})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_good_order(served, sent, tmp_path, capsys, number):
    rows = tmp_path / "r.jsonl"

    def interrupt() -> None:
        wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") > 3)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=interrupt)
    killer.start()
    flags = ["--rate", "100,200", "--duration", "1000", "--rows", str(rows), "--json", str(tmp_path / "r.json")]
    code = load(served, *sent(Known(), Known(tokens=2, gap_s=1000.0)), *flags)
    killer.join()

    assert code == 128 + number
    shown = capsys.readouterr()
    assert "100 rps: " in shown.out
    assert "NOT VALID: interrupted" in shown.out
    assert "what was measured until then" in shown.err
    (run,) = result(tmp_path / "r.json")["rows"]
    kept = read_records(rows)
    assert run["requests_of_the_run"] == len(kept)
    assert {row.outcome for row in kept} == {"ok", "cancelled"}


def test_a_full_disk_ends_the_run_and_says_so(served, sent, capsys):
    assert load(served, *sent(Known()), "--rate", "50", "--duration", "1000", "--rows", "/dev/full") == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_said_after_it_was_printed(served, sent, tmp_path, capsys):
    flags = [*sent(Known()), "--rate", "300", "--n", "30", "--rows", str(tmp_path / "r.jsonl"), "--json", "/dev/full"]

    assert load(served, *flags) == 1
    shown = capsys.readouterr()
    assert "300 rps: " in shown.out
    assert "--json /dev/full: No space left on device" in shown.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--rate R, or --concurrency C"),
        (["--rate", "0"], "--rate 0"),
        (["--rate", "4-1"], "--rate 4-1"),
        (["--rate", "x"], "--rate x"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency is a closed loop"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--rate", "1", "--n", "0"], "--n is 0"),
        (["--rate", "1", "--duration", "-1"], "--duration is -1"),
        (["--rate", "1", "--slo", "2"], "TTFT:TPOT"),
        (["--rate", "1", "--header", "x"], "--header 'x'"),
        (["--rate", "1", "--workload", "pope-like"], "--workload NAME, or --bodies FILE"),
    ],
)
def test_a_wrong_flag_is_named_with_what_it_should_be(served, capsys, flags, said):
    assert load(served, "--bodies", "none.jsonl", *flags) == 1
    assert said in capsys.readouterr().err
    assert served.server.seen == 0


def test_a_workload_is_sent_with_its_pictures_and_other_ones_at_the_next_rate(served, tmp_path):
    flags = ["--workload", "pope-like", "--output-tokens", "4", "--rate", "200,300", "--n", "12", "--warm-up", "0"]
    flags += ["--cache", str(tmp_path / "cache"), "--json", str(tmp_path / "r.json")]

    assert load(served, *flags) == 0
    rows = read_records(tmp_path / "r.rows.jsonl")
    assert {row.spec.rsplit("-", 1)[0] for row in rows} == {"pope-like-0", "pope-like-1"}
    assert result(tmp_path / "r.json")["env"]["load"]["workload"] == "pope-like"
    assert not any(row["repeated_requests"] for row in result(tmp_path / "r.json")["rows"])
    assert served.server.longest_body > 10_000, "a picture was in it"


def test_requests_that_the_stamps_do_not_know_are_counted_aloud(served, sent, tmp_path, capsys):
    traces = tmp_path / "traces"
    traces.mkdir()
    flags = [
        *sent(Known()),
        "--rate",
        "200",
        "--n",
        "12",
        "--warm-up",
        "0",
        "--traces",
        str(traces),
        "--json",
        str(tmp_path / "r.json"),
    ]

    assert load(served, *flags) == 0
    assert "12 of 12 requests are not in the stamps" in capsys.readouterr().out
    assert (tmp_path / "r.rows.phases.jsonl").read_text() == ""


def test_recorded_requests_are_sent_at_their_own_times(served, tmp_path):
    write_traffic(tmp_path / "own.jsonl", [Recorded(f"r{n}", 0.01 * n, 3, 4) for n in range(12)])
    flags = ["--workload", f"recorded:{tmp_path / 'own.jsonl'}", "--n", "12"]

    assert load(served, *flags, "--warm-up", "0", "--json", str(tmp_path / "r.json")) == 0
    rows = sorted(read_records(tmp_path / "r.rows.jsonl"), key=lambda row: row.n)
    assert [later.due_s - rows[0].due_s for later in rows] == pytest.approx([0.01 * n for n in range(12)], abs=1e-5)
