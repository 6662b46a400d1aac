"""Table 2's rows by switches: what is switched, what is asked of whom, and what the table says."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bench.cli import main
from bench.clients.bodies import Requests
from bench.clients.measure import Plan
from bench.clients.sender import Bounds
from bench.clients.target import Request
from bench.papers import ablations
from bench.papers.ablations import BASELINE, TABLE, VARIANTS, WHOLE, both, figures, warm_up
from bench.record import ROOT
from bench.served import Served as Launch
from bench.workloads.requests import Poisson
from deploy.options.config import DeployConfig
from epd_serve.errors import StageError
from epd_serve.kv.grouping import LinkCost, Step, exposed_s, parse_grouping
from tests.bench.clients.known_server import Known
from tests.bench.clients.serving import Served
from tests.waiting import wait_for


class Bodies:
    """Answers whose time to first token says which server gave it and which run it was of."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, plan: Plan, number: int) -> Requests:
        self.runs.append(number)
        known = msgspec.to_builtins(Known(tokens=3))
        body = {"known": known, "max_tokens": 3, "ignore_eos": True, "stream": True}
        return Requests([Request.of(body, "s")], plan.dues())


@pytest.fixture
def two() -> Iterator[tuple[Served, Served]]:
    servers = Served(), Served()
    for one in servers:
        one.start()
        wait_for(lambda one=one: one.server.url)
    yield servers
    for one in servers:
        one.stop()


def rows(variant: str = "both", *, count: int = 40, factor: float = 0.8, rate: float = 0.5) -> list[dict[str, Any]]:
    return [row(variant, n, 100.0 + n, (100.0 + n) * factor, 20.0 + (n % 2) * 0.2 - 0.1, rate) for n in range(count)]


def row(
    variant: str, n: int, base_ttft: float | None, ttft: float, tpot: float | None = 20.0, rate: float = 0.5
) -> dict[str, Any]:
    times = {"baseline_ttft_ms": base_ttft, "ttft_ms": ttft, "baseline_tpot_ms": 20.0, "tpot_ms": tpot}
    return {"variant": variant, "rate_rps": rate, "round": n // 10, "n": n, **times}


def test_the_baseline_sends_kv_after_prefill_and_each_row_switches_what_its_name_says() -> None:
    flags = {one.name: one.flags for one in (BASELINE, *TABLE)}

    assert flags == {
        "baseline": ("--feature-prefetch", "demand", "--kv-grouping", "bulk"),
        "layerwise": ("--feature-prefetch", "demand", "--kv-grouping", "layerwise"),
        "prefetch": ("--feature-prefetch", "event", "--kv-grouping", "bulk"),
        "grouped": ("--feature-prefetch", "demand", "--kv-grouping", "adaptive"),
        "both": ("--feature-prefetch", "event", "--kv-grouping", "adaptive"),
    }
    for _, prefetch, _, grouping in flags.values():
        DeployConfig(feature_prefetch=prefetch, kv_grouping=grouping)


def test_the_baselines_one_packet_leaves_when_the_prompt_is_computed() -> None:
    step, cost = Step(layers=34, layer_bytes=1 << 20, layer_s=0.01), LinkCost(0.001, 1e-9)
    transfer_s = cost.seconds(34 << 20)

    assert exposed_s(parse_grouping(BASELINE.grouping, 0).cuts(step, cost), step, cost) == pytest.approx(transfer_s)
    assert exposed_s(parse_grouping("layerwise", 0).cuts(step, cost), step, cost) < 0.1 * transfer_s


def test_what_is_taken_away_is_all_that_differs_from_the_whole() -> None:
    away = {
        name: set(VARIANTS[name].flags) ^ set(WHOLE.flags) for name in ("demand", "pixels", "all-images", "mooncake")
    }

    assert away == {
        "demand": {"demand", "event"},
        "pixels": {"--send-pixels", "always"},
        "all-images": {"--partial-prefill", "off"},
        "mooncake": {"--mm-store", "mooncake"},
    }
    assert WHOLE.flags == VARIANTS["both"].flags


def test_both_get_the_same_requests_in_a_run_and_new_ones_in_the_next(two: tuple[Served, Served]) -> None:
    source, urls, numbers = Bodies(), (two[0].server.url, two[1].server.url), itertools.count()
    plan = Plan(Poisson(1.0), count=4, seconds=None, warm_up_s=0.0)

    warm_up(urls, source, plan, numbers, count=1)
    found = [list(both(urls, source, plan, rate, next(numbers))) for rate in (300.0, 400.0)]

    assert source.runs == [0, 0, 1, 1, 2, 2]
    assert [[one["n"] for one in run] for run in found] == [[0, 1, 2, 3]] * 2
    assert all(None not in one.values() for run in found for one in run)
    assert two[0].server.seen == two[1].server.seen == 9


def test_a_side_that_goes_away_ends_it(two: tuple[Served, Served]) -> None:
    urls = two[0].server.url, two[1].server.url
    two[1].stop()
    plan = Plan(Poisson(1.0), count=4, warm_up_s=0.0, bounds=Bounds(gone_after=2, gone_s=0.0))

    with pytest.raises(StageError, match="gone"):
        list(both(urls, Bodies(), plan, 300.0, 0))


def test_figures_are_of_what_both_answered_and_ratios_have_intervals() -> None:
    found = figures([*rows(), row("both", 99, None, 1.0)])

    assert found["0.5 rps/both/requests"] == 41 and found["0.5 rps/both/not_whole"] == 1
    assert found["0.5 rps/both/ttft_over_baseline"] == 0.8
    assert found["0.5 rps/both/ttft_over_baseline_low"] == found["0.5 rps/both/ttft_over_baseline_high"] == 0.8
    assert found["0.5 rps/both/tpot_over_baseline_low"] < 1 < found["0.5 rps/both/tpot_over_baseline_high"]
    assert "0.5 rps/both/ttft_over_baseline_low" not in figures(rows(count=5))
    assert found["both/whole"] == 40 / 41
    assert figures([]) == {}


@pytest.mark.parametrize(
    "flags",
    [
        ["--rates", "1,x"],
        ["--rates", "0"],
        ["--rounds", "0"],
        ["--seconds", "-1"],
        ["--output-tokens", "1"],
        ["--only", "grouping"],
    ],
)
def test_a_wrong_flag_is_named_before_anything_starts(capsys: Any, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ablations", *flags])

    assert ended.value.code == 2 and flags[0] in capsys.readouterr().err


def test_what_was_measured_is_kept_when_a_later_part_fails(
    two: tuple[Served, Served], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    launches = iter((two[0].server.url, two[1].server.url))

    @contextlib.contextmanager
    def fake(layout: str, flags: Any, *, name: str, traced: bool) -> Iterator[Launch]:
        url = next(launches, None)
        if url is None:
            raise StageError("E-P-D did not become ready", stage=layout)
        yield Launch(name, url, "known", {}, 1.0, (), tmp_path)

    monkeypatch.setattr(ablations, "served", fake)
    monkeypatch.setattr(ablations, "workload_source", lambda *_: Bodies())
    flags = ["--engine", "sim", "--rates", "400", "--rounds", "1", "--seconds", "0.1", "--only", "prefetch,both"]

    assert main(["ablations", *flags, "--json", str(tmp_path / "r.json")]) == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert figures(found["rows"])["400 rps/prefetch/requests"] > 10
    assert found["env"]["kind"] == "simulated stages: to try the flow"
    assert found["env"]["flags"]["both"] == list(VARIANTS["both"].flags)
    assert "did not become ready" in found["env"]["incomplete"]
    assert "did not become ready" in capsys.readouterr().err


def test_the_committed_figures_follow_from_their_rows_and_are_of_the_papers_baseline() -> None:
    saved = json.loads((ROOT / "bench" / "results" / "ablations.json").read_text())

    assert figures(saved["rows"]) == pytest.approx(saved["figures"])
    assert saved["env"]["flags"] == {one.name: list(one.flags) for one in (BASELINE, *TABLE)}
    assert {row["variant"] for row in saved["rows"]} == {one.name for one in TABLE}
