"""`why` and `top` on a running deployment of simulated stages: two front doors, an encoder added, a stage killed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.command import main
from tests.deploy.cli.trace_format import check
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.sim_load import CHAT, TEXT, in_flight, load, more
from tests.waiting import PATIENCE_S, wait_for

LAYOUT = "E-2P-D"


def said(capfd: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    capfd.readouterr()
    assert main([*words, "--run-root", str(folder)]) == 0
    return capfd.readouterr().out


@pytest.mark.slow
def test_every_retry_and_refusal_of_a_run_with_a_kill_is_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "access.jsonl"
    flags = ("--workers", "2", "--proxy", f"access_log={log}", "--proxy", "key_limits.requests_per_minute=100000")
    with launched(tmp_path, LAYOUT, *flags) as (client, _):
        with load(str(client.base_url)) as found:
            more(found)
            status = json.loads(said(capfd, tmp_path, "status", "--json"))
            (victim,) = (one["pid"] for one in status["instances"] if one["id"] == "P0")
            os.killpg(victim, signal.SIGSTOP)
            wait_for(lambda: in_flight(str(client.base_url)).get("P0"), "a request that prefills at P0")
            os.killpg(victim, signal.SIGKILL)
            more(found, 40)
        refused = client.post(CHAT, json=TEXT, headers={"x-request-id": "hurried", "x-epd-deadline-ms": "1"})
        failed: list[dict[str, Any]] = []

        def explained() -> bool:
            told = said(capfd, tmp_path, "why", "--order", "failed", "--limit", "200", "--json")
            failed[:] = json.loads(told)["requests"]
            return any(one["client_id"] == "hurried" for one in failed)

        wait_for(explained, "the refusal to be remembered")
        assert refused.status_code == 504
        retried = [one for one in failed if one["retried"]]
        assert retried
        for one in retried:
            told = json.loads(said(capfd, tmp_path, "why", one["id"], "--json"))["request"]
            failures = [event for event in told["events"] if event["event"] in ("failed", "encode_failed")]
            assert failures and all(event["code"] and event["stage"] for event in failures), told
        why = said(capfd, tmp_path, "why", "hurried")
        assert "deadline" in why and "504" in why
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["id"] for line in lines} >= {one["id"] for one in retried}
    assert found.errors == []


class Terminal:
    """`epd-serve top` on a terminal of its own."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._own, theirs = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "top", "--run-root", str(folder), "--every", "0.3"],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self._own, keys.encode())

    def until(self, text: str) -> None:
        """Until it has shown this since the last key."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline and self.process.poll() is None, self.shown[-3000:]
            if select.select([self._own], [], [], 0.1)[0]:
                self.shown += os.read(self._own, 65536).decode(errors="replace")


@pytest.mark.slow
def test_a_terminal_shows_a_deployment_until_it_is_told_to_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with launched(tmp_path, LAYOUT) as (client, _):
        assert client.post(CHAT, json=TEXT).status_code == 200
        once = said(capfd, tmp_path, "top", "--once")
        assert {"E0", "P0", "P1", "D0"} <= {line.split()[0] for line in once.splitlines() if line.split()}
        terminal = Terminal(tmp_path, 80, 24)
        terminal.until("P1")
        terminal.press("s")
        terminal.until("sorted by pending")
        terminal.press("f")
        terminal.until("D only")
        terminal.resize(120, 40)
        terminal.until("node")
        assert main(["scale", "E=2", "--run-root", str(tmp_path)]) == 0
        terminal.press("f")
        terminal.until("start E1")
        terminal.press("q")
        assert terminal.process.wait(PATIENCE_S) == 0


def test_without_a_terminal_it_says_what_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "--once" in capsys.readouterr().err
    assert main(["top", "--every", "0"]) == 2


@pytest.mark.slow
def test_the_last_requests_are_written_as_a_timeline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    with launched(tmp_path, LAYOUT, "--workers", "2", "--trace-dir", str(tmp_path / "stamps")) as (client, _):
        answers = [client.post(CHAT, json=TEXT, headers={"x-request-id": f"a/{n}"}) for n in range(3)]
        wait_for(lambda: "running" not in said(capfd, tmp_path, "why"), "the last record")
        told = said(capfd, tmp_path, "trace", "--last", "3", "--out", str(out))
        events = check(out.read_text())
        assert "3 requests" in told and "--trace-dir" not in told
        roots = [event for event in events if event["ph"] == "X" and event["name"] == CHAT]
        assert {event["args"]["client_id"] for event in roots} == {"a/0", "a/1", "a/2"}
        assert {"prefill call", "answer call"} <= {event["name"] for event in events}
        said(capfd, tmp_path, "trace", "a/1", "--out", str(out))
        assert sum(event["name"] == CHAT for event in check(out.read_text())) == 1
        assert main(["trace", "nobody", "--run-root", str(tmp_path)]) == 1
        assert main(["trace", "--run-root", str(tmp_path)]) == main(["trace", "a/1", "--last", "1"]) == 2
    assert {answer.status_code for answer in answers} == {200}
