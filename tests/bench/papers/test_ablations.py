"""Table 2's rows by switches: what is switched, what is asked of whom, and what the table says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bench.cli import main
from bench.clients.bodies import Requests
from bench.clients.measure import Plan
from bench.clients.sender import Bounds
from bench.papers import ablations
from bench.papers.ablations import Rounds, in_turns, variants_of, warm_up
from bench.papers.table2 import BASELINE, VARIANTS, figures, tables
from bench.record import ROOT
from bench.served import Served as Launch
from bench.workloads.arrivals import Poisson
from deploy.config import DeployConfig
from epd_serve.errors import ConfigError, StageError
from epd_serve.kv.grouping import LinkCost, Step, exposed_s, parse_grouping
from tests.bench.clients.known_server import Known
from tests.bench.clients.serving import Served
from tests.waiting import wait_for


class Bodies:
    """Answers whose time to first token says which server gave it and which run it was of."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def of_run(self, plan: Plan, number: int) -> Requests:
        self.runs.append(number)
        known = msgspec.to_builtins(Known(tokens=3))
        body = {"known": known, "max_tokens": 3, "ignore_eos": True, "stream": True}
        return Requests([("s", body)], plan.dues())


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
    flags = {one.name: one.flags for one in (BASELINE, *VARIANTS)}

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


def test_the_papers_numbers_give_the_papers_percentages() -> None:
    assert [one.paper for one in VARIANTS] == ["-", "-16.6%, -21.7%", "-16.0%, -11.9%", "-31.6%, -26.1%"]


def test_both_get_the_same_requests_in_every_round_and_new_ones_in_the_next(two: tuple[Served, Served]) -> None:
    source, urls = Bodies(), (two[0].server.url, two[1].server.url)
    plan = Plan(Poisson(1.0), count=4, seconds=None, warm_up_s=0.0)

    warm_up(urls, source, plan, count=1)
    found = list(in_turns(urls, "both", source, Rounds(plan, (300.0, 400.0), 2)))

    assert source.runs[2:] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(one["round"], one["rate_rps"], one["n"]) for one in found[::4]] == [
        (0, 300.0, 0),
        (0, 400.0, 0),
        (1, 300.0, 0),
        (1, 400.0, 0),
    ]
    assert len(found) == 16 and all(None not in one.values() for one in found)
    assert two[0].server.seen == two[1].server.seen == 17


def test_another_variant_gets_requests_that_the_baseline_has_not_seen(two: tuple[Served, Served]) -> None:
    source, urls = Bodies(), (two[0].server.url, two[1].server.url)
    plan = Plan(Poisson(1.0), count=4, seconds=None, warm_up_s=0.0)
    for first in (0, 2):
        warm_up(urls, source, plan, count=1, first=first)
        list(in_turns(urls, "any", source, Rounds(plan, (300.0,), 2), first=first))

    before, after = source.runs[:6], source.runs[6:]
    assert not set(before) & set(after)


def test_a_side_that_goes_away_ends_it(two: tuple[Served, Served]) -> None:
    urls = two[0].server.url, two[1].server.url
    two[1].stop()
    plan = Plan(Poisson(1.0), count=4, warm_up_s=0.0, bounds=Bounds(gone_after=2, gone_s=0.0))

    with pytest.raises(StageError, match="gone"):
        list(in_turns(urls, "both", Bodies(), Rounds(plan, (300.0,), 1)))


def test_figures_are_of_what_both_answered_and_ratios_have_intervals() -> None:
    found = figures([*rows(), row("both", 99, None, 1.0)])

    assert found["0.5 rps/both/requests"] == 41 and found["0.5 rps/both/not_whole"] == 1
    assert found["0.5 rps/both/ttft_over_baseline"] == 0.8
    assert found["0.5 rps/both/ttft_over_baseline_low"] == found["0.5 rps/both/ttft_over_baseline_high"] == 0.8
    assert found["0.5 rps/both/tpot_over_baseline_low"] < 1 < found["0.5 rps/both/tpot_over_baseline_high"]
    assert "0.5 rps/both/ttft_over_baseline_low" not in figures(rows(count=5))
    assert found["both/whole"] == 40 / 41
    assert figures([]) == {}


def test_the_table_has_the_paper_beside_it_and_says_where_nothing_shows() -> None:
    text = "\n".join(tables([*rows("prefetch"), *rows("both", factor=1.1)]))

    assert "w/ E-P asynchronous prefetching  40        95.6" in text
    assert "-20.0% (-20.0 to -20.0)" in text and "+10.0% (+10.0 to +10.0)" in text
    assert "no difference shown" in text
    assert "-16.6%, -21.7%" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rates", "1,x"], "--rates 1,x"),
        (["--rates", "0"], "--rates 0"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--seconds", "-1"], "--seconds is -1"),
        (["--output-tokens", "1"], "--output-tokens is 1"),
        (["--only", "grouping"], "--only 'grouping': of layerwise, prefetch, grouped, both"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_starts(capsys: Any, flags: list[str], said: str) -> None:
    assert main(["ablations", *flags]) == 1
    assert said in capsys.readouterr().err


def test_what_was_measured_is_kept_when_a_later_part_fails(
    two: tuple[Served, Served], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    launches = iter((two[0].server.url, two[1].server.url))

    @contextlib.contextmanager
    def fake(layout: str, flags: Any, *, name: str, traced: bool) -> Iterator[Launch]:
        url = next(launches, None)
        if url is None:
            raise StageError("E-P-D did not become ready", stage=layout)
        yield Launch(name, url, "known", {}, 1.0, 1.0, (), tmp_path)

    monkeypatch.setattr(ablations, "served", fake)
    monkeypatch.setattr(ablations, "WorkloadSource", lambda *_: Bodies())
    flags = ["--engine", "sim", "--rates", "400", "--rounds", "1", "--seconds", "0.1", "--only", "prefetch,both"]

    assert main(["ablations", *flags, "--json", str(tmp_path / "r.json")]) == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert figures(found["rows"])["400 rps/prefetch/requests"] > 10
    assert found["env"]["kind"] == "simulated stages: to try the flow"
    assert found["env"]["flags"]["both"] == list(VARIANTS[3].flags)
    assert "did not become ready" in found["env"]["incomplete"]
    assert "did not become ready" in capsys.readouterr().err


def test_variants_are_taken_once() -> None:
    assert [one.name for one in variants_of("both,prefetch,both")] == ["prefetch", "both"]
    with pytest.raises(ConfigError):
        variants_of("")


def test_the_committed_figures_follow_from_their_rows_and_are_of_the_papers_baseline() -> None:
    saved = json.loads((ROOT / "bench" / "results" / "ablations.json").read_text())

    assert figures(saved["rows"]) == pytest.approx(saved["figures"])
    assert saved["env"]["flags"] == {one.name: list(one.flags) for one in (BASELINE, *VARIANTS)}
    assert {row["variant"] for row in saved["rows"]} == {one.name for one in VARIANTS}
