"""`epd-bench ttft`: from rows of requests to figures, and how targets and phases are found."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from typing import Any

import pytest

from bench.clients.records import Outcome, RequestRecord
from bench.micro import ttft
from bench.micro.measurement import Row
from bench.micro.ttft import phases_of, targets_of
from bench.micro.ttft_figures import VARIANTS, WHOLE, figures, summary, tables
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH
from bench.served import Served, Stage
from bench.workloads.synthetic import demo_image
from epd_serve.errors import ConfigError, StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, refuses, served, streams


def row(target: str, ttft_ms: float, *, turn: int = 0, right: bool | None = True, **more: Any) -> Row:
    empty = {name: {} for name in ("phases_ms", "hidden_ms", "cpu_ms")}
    own = {"target": target, "mode": "unique", "turn": turn, "right": right, "ttft_ms": ttft_ms, "residual_ms": 0.0}
    return {**own, "groups_ms": {"vLLM": ttft_ms}, **empty, **more}


def test_ratios_are_of_medians_to_the_first_target():
    rows = [row("TP1", ms) for ms in (10.0, 12.0, 50.0)] + [row("(E-P)-D", ms) for ms in (20.0, 30.0, 90.0)]

    found = summary(rows)

    assert found["TP1"]["ratio"] == 1.0
    assert (found["(E-P)-D"]["median_ms"], found["(E-P)-D"]["ratio"]) == (30.0, 2.5)
    assert found["(E-P)-D"]["groups_ms"] == {"vLLM": pytest.approx(140 / 3)}


def test_figures_are_named_by_mode_and_target_with_the_idle_share_beside_them():
    named = figures([{"idle_cpu_share": {"TP1 proxy": 0.01}}, row("TP1", 10.0), row("TP1", 8.0, mode="repeated")])

    assert named["unique/TP1/median_ms"] == 10.0 and named["repeated/TP1/median_ms"] == 8.0
    assert named["idle_cpu_share/TP1 proxy"] == 0.01


def test_a_model_with_random_weights_has_no_right_answers():
    rows = [row("TP1", 10.0, right=None)]

    assert "right" not in summary(rows)["TP1"]
    assert next(iter(tables(rows))).splitlines()[1].split()[-1] == "nan%"


def test_a_machine_that_slows_down_does_not_change_the_ratio_of_a_variant():
    variant = VARIANTS["event"]
    rows = [
        row(name, slow * ms, turn=turn, compared=variant.name)
        for turn, slow in enumerate((1.0, 1.0, 9.0))
        for name, ms in ((WHOLE, 10.0), (variant.name, 20.0))
    ]

    named = figures(rows)

    assert {named[variant.figure + end] for end in ("", "_p25", "_p75")} == {2.0}
    assert named[f"{variant.figure}/whole_ms"] == 10.0
    assert any("2.00 (2.00–2.00)" in table for table in tables(rows))


def test_a_monolith_is_asked_past_its_proxy_too(tmp_path):
    monolith = Served("TP1", "http://proxy", "m", {}, 1.0, 1.0, (Stage("EPD0", "EPD", 8001),), tmp_path)
    split = Served("E-PD", "http://proxy", "m", {}, 1.0, 1.0, (Stage("E0", "E", 8001),), tmp_path)

    through, past = targets_of(monolith)
    assert (through.url, through.milestones) == ("http://proxy", MONOLITH)
    assert (past.url, past.milestones) == ("http://127.0.0.1:8001", DIRECT)
    assert [target.milestones for target in targets_of(split)] == [DISAGGREGATED]


def test_phases_and_residual_add_up_to_the_time_to_first_token():
    record = RequestRecord("", 0, "id", "", 10.0, 10.0, 10.5, Outcome.OK, sent_s=10.0, token_s=(10.25,))

    where = phases_of(MONOLITH, record, {"arrived": 10.01, "first_byte": 10.2})

    assert where["ttft_ms"] == pytest.approx(250.0) and where["total_ms"] == pytest.approx(500.0)
    assert sum(where["phases_ms"].values()) + where["residual_ms"] == pytest.approx(where["ttft_ms"])


def asked(mode: str) -> argparse.Namespace:
    more = {"mechanism": False, "preset": "demo", "pause": 0.001}
    return argparse.Namespace(modes=(mode,), warmup=0, requests=3, **more)


@pytest.mark.parametrize(("mode", "requests"), [("unique", 6), ("repeated", 8)])
async def test_targets_take_turns_and_repeated_images_fill_the_caches_first(monkeypatch, tmp_path, mode, requests):
    monkeypatch.setattr(ttft, "IDLE_S", 0.01)
    fake = FakeStage("EPD0", Role.EPD)
    fake.usual = streams(chunk("a "), chunk("b"), DONE)
    images = (demo_image(seed, 32) for seed in itertools.count(1))
    async with served(fake) as url:
        both = [Served(name, url, "m", {"proxy": (os.getpid(),)}, 1.0, 1.0, (), tmp_path) for name in ("one", "two")]
        idle, *rows = await asyncio.to_thread(lambda: list(ttft.measured(both, images, asked(mode))))

    assert len(fake.calls) == requests
    assert [(row["turn"], row["target"]) for row in rows] == [*itertools.product(range(3), ("one", "two"))]
    assert idle["idle_cpu_share"].keys() == {"one proxy", "two proxy"}
    assert not any(row["right"] for row in rows)
    for row in rows:
        assert sum(row["phases_ms"].values()) + row["residual_ms"] == pytest.approx(row["ttft_ms"], abs=0.01)
        assert 0 < row["ttft_ms"] <= row["total_ms"]


async def test_a_failed_request_is_no_row(monkeypatch, tmp_path):
    monkeypatch.setattr(ttft, "IDLE_S", 0.01)
    fake = FakeStage("EPD0", Role.EPD)
    fake.usual = refuses(500, "no")
    async with served(fake) as url:
        one = Served("one", url, "m", {}, 1.0, 1.0, (), tmp_path)
        rows = ttft.measured([one], iter([demo_image(1, 32), demo_image(2, 32)]), asked("unique"))
        assert "idle_cpu_share" in next(rows)
        with pytest.raises(StageError, match="status 500"):
            await asyncio.to_thread(next, rows)


def test_a_missing_mooncake_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(ttft, "what_is_missing", lambda device, master: "Mooncake is not installed")
    monkeypatch.setattr(ttft, "served", lambda *_, **__: pytest.fail("started"))
    parser = argparse.ArgumentParser()
    ttft.MEASUREMENT.add_arguments(parser)

    with pytest.raises(ConfigError, match="--without arena: Mooncake is not installed"):
        next(ttft.measure(parser.parse_args(["--mechanism"])))
