"""Our TTFT over that of other clients: rounds, ratios, and what is said of a client that is not there or fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.micro.measurement import goal_table
from epd_serve.errors import StageError
from tests.bench.aisbench.environments import fake_environment
from tests.bench.clients.known_server import Known
from tests.bench.clients.serving import Served
from tests.soak import rival_clients
from tests.soak.rival_clients import AISBENCH, GOALS, OURS, VLLM, Compared, compare, in_rounds
from tests.waiting import wait_for


def test_the_order_alternates_between_rounds_and_ratios_are_of_medians():
    asked: list[str] = []

    def client(name: str, *waits: float):  # type: ignore[no-untyped-def]
        def send(url: str, folder: Path) -> list[float]:
            asked.append(name)
            return list(waits)

        return send

    clients = {
        OURS: client(OURS, 0.2, 0.21, 9.0),
        AISBENCH: client(AISBENCH, *[0.2] * 3),
        VLLM: client(VLLM, *[0.42] * 3),
    }
    found = in_rounds(clients, "http://x", 3, Compared(), 3)

    assert asked == [OURS, AISBENCH, VLLM, VLLM, AISBENCH, OURS, OURS, AISBENCH, VLLM]
    figures = found.figures()
    assert figures["aisbench_ttft_ratio"] == 1.05 and figures["vllm_bench_ttft_ratio"] == 0.5
    assert figures["ours_ttft_ms"] == 210.0
    table = goal_table(figures, GOALS)
    assert table.count("met") == 3 and table.count("MISSED") == 1, "the ratio has a bound on either side"


def test_a_client_that_fails_is_left_out_and_said():
    def fails(url: str, folder: Path) -> list[float]:
        raise StageError("no memory", stage="x")

    found = in_rounds({OURS: lambda url, folder: [0.2], VLLM: fails}, "http://x", 2, Compared(), 1)

    assert "vllm_bench_ttft_ratio" not in found.figures()
    assert "vllm_bench: not measured, it failed: no memory" in found.text()
    with pytest.raises(StageError, match="no memory"):
        in_rounds({OURS: fails}, "http://x", 1, Compared(), 1)


def test_clients_that_are_not_there_are_said_and_ours_is_measured(tmp_path, monkeypatch):
    usual = Known(first_s=0.01, gap_s=0.001, tokens=4)
    monkeypatch.setattr(rival_clients, "USUAL", usual)
    monkeypatch.setattr(rival_clients, "RATE_RPS", 200.0)
    monkeypatch.setattr(rival_clients, "REQUESTS", 3)
    monkeypatch.setattr(rival_clients, "QUICK_REQUESTS", 3)
    monkeypatch.setattr(rival_clients, "VLLM_COMMAND", tmp_path / "vllm")
    served = Served()
    served.server.usual = usual
    served.start()
    wait_for(lambda: served.server.url)
    try:
        without = compare(served.server.url, tmp_path / "none", quick=True)
        beside = compare(served.server.url, fake_environment(tmp_path / "venv"))
    finally:
        served.stop()

    assert list(without.ttft_s) == [OURS] and set(without.missing) == {AISBENCH, VLLM}
    assert "environment.sh aisbench" in without.text() and without.figures().keys() == {"ours_ttft_ms"}
    assert len(beside.ttft_s[AISBENCH]) == 6 and beside.figures()["aisbench_ttft_ratio"] > 0


def test_a_client_that_reports_fewer_requests_than_it_sent_is_left_out():
    clients = {OURS: lambda url, folder: [0.2, 0.2], VLLM: lambda url, folder: [0.2, 0.0]}

    assert "1 of 2 requests failed" in in_rounds(clients, "http://x", 1, Compared(), 2).missing[VLLM]
