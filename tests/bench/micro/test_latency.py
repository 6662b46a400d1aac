"""Figures of `epd-bench latency` from its rows, and one of its parts over simulated stages."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest

from bench.micro.latency import GOALS, MEASUREMENT, figures, measure
from bench.micro.measurement import Row, resolve
from bench.micro.over_vllm import OURS, times
from tests.bench.clients.made import row


def tp1(server: str, at_once: int, turn: int, ttft_ms: float, token_ms: float, *, starved: bool = False) -> Row:
    times: Row = {"ttft_ms": ttft_ms, "token_ms": token_ms, "starved": starved}
    return {"part": "tp1", "what": server, "round": turn, "kind": f"{at_once} at once", "core_us": [9.0], **times}


def every_row() -> list[Row]:
    rows: list[Row] = []
    for turn, slow in enumerate((1.0, 1.0, 9.0)):  # a machine that is busy in one round
        load: Row = {"round": turn, "load": 0.1}
        rows.append({"part": "ready", **load, "seconds": 30.0 * slow})
        for what, loaded in itertools.product(("E0", "P0"), (False, True)):
            seconds = (4.0 + (what == "P0")) * (2 if loaded else 1) * slow
            rows.append({"part": "restart", "what": what, "round": turn, "loaded": loaded, "seconds": seconds})
        rows += [{"part": "waiting", "what": what, "round": turn, "share": 0.01 * at} for at, what in enumerate("EPD")]
        for kind, error in (("new image", 0.001), ("text", -0.004)):
            line = {"run": "", "ttft_ms": 9.0, "e2e_ms": 9.0, "phases_ms": {"prefill": 10.0}, "sum_error": error}
            rows.append(
                {"part": "phases", "kind": kind, "exposed_ms": {"prefill": 9.0, "E→P": 1.0, "HTTP D": 2.0}, **line}
            )
        for at_once in (1, 8):
            rows.append(tp1(OURS, at_once, turn, 40.0 * at_once * slow, 12.0 * slow))
            rows.append(tp1("plain vLLM, one thread", at_once, turn, 32.0 * slow, 10.0 * slow))
            rows.append(tp1("plain vLLM, two threads", at_once, turn, 20.0 * slow, 20.0 * slow))
        for server, slower in ((OURS, 2.0), ("plain vLLM, one thread", 1.0), ("plain vLLM, two threads", 1.5)):
            one: Row = {"what": server, "round": turn, "starved": False, "core_us": [9.0, 9.0]}
            for kind, ttft_ms in (("new image", 20.0), ("repeated image", 15.0 * slower), ("text", 10.0)):
                rows.append({"part": "epd", "kind": kind, **one, "ttft_ms": ttft_ms * slower, "token_ms": slower})
    return rows


def test_figures_are_medians_of_the_worst_kind_and_ratios_within_a_round():
    assert figures(every_row()) == pytest.approx(
        {
            "ready_s": 30.0,
            "restart_s": 5.0,
            "restart_loaded_s": 10.0,
            "waiting_core_share": 0.02,
            "phases_sum_error": 0.004,
            "tp1_ttft_over_vllm": 10.0,  # eight at once are worse
            "tp1_tpot_over_vllm": 1.2,  # of the setting that is best per token
            "hops_exposed_ms": 3.0,
            "epd_ttft_new_over_vllm": 2.0,
            "epd_ttft_repeat_over_vllm": 4.0,
            "epd_ttft_text_over_vllm": 2.0,
            "epd_token_over_vllm": 2.0,
        }
    )
    assert figures(every_row()).keys() == {goal.figure for goal in GOALS}


def test_where_enough_rounds_met_cores_of_one_speed_only_those_count():
    rows = [tp1(name, 1, turn, 10.0, 2.0) for turn in range(8) for name in (OURS, "one")]
    for one in rows[-6:]:  # of three rounds
        one["core_us"] = [9.0, 16.0]
    rows[-1]["ttft_ms"] = rows[-3]["ttft_ms"] = rows[-5]["ttft_ms"] = 5.0
    assert figures(rows)["tp1_ttft_over_vllm"] == 1.0
    alone = [tp1(OURS, 1, turn, 10.0, 2.0) for turn in range(10, 20)]
    assert figures([*rows[-6:], *alone])["tp1_ttft_over_vllm"] == 2.0
    rows[0]["ttft_ms"] = 30.0
    assert figures(rows[:2] + rows[-6:])["tp1_ttft_over_vllm"] == 2.0


def test_a_part_that_was_not_asked_for_has_no_figure():
    waiting = [one for one in every_row() if one["part"] == "waiting"]

    assert figures(waiting).keys() == {"waiting_core_share"}


def test_plain_vllm_that_starves_its_own_front_end_is_no_baseline():
    rows = [tp1(OURS, 1, turn, 40.0, 12.0) for turn in range(2)]
    rows += [tp1("one", 1, turn, 1.0, 1.0, starved=True) for turn in range(2)]

    assert figures(rows) == {}
    fed = [*rows, tp1("one", 1, 1, 20.0, 10.0)]
    assert figures(fed) == {"tp1_ttft_over_vllm": 2.0, "tp1_tpot_over_vllm": 1.2}


@pytest.mark.parametrize(("gap", "starved"), [(0.01, False), (0.0, True)])
def test_an_answer_that_comes_at_once_is_starved(gap: float, starved: bool):
    found = times([row(0, ttft=0.1, gap=gap, tokens=5)])

    assert found["starved"] is starved
    assert (found["ttft_ms"], found["token_ms"]) == pytest.approx((100.0, 20.0 + 4 * gap * 1e3 / 5))


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    MEASUREMENT.add_arguments(parser)
    arguments = parser.parse_args(["--engine", "sim", "--quick", *words])
    resolve(arguments)
    return arguments


def test_a_killed_stage_and_the_phases_are_measured_from_outside():
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in measure(asked("--only", "phases,restart")):
        rows.setdefault(one["part"], []).append(one)

    assert [(one["what"], one["loaded"]) for one in rows["restart"]] == [("E0", False), ("E0", True)]
    assert all(one["seconds"] > 0 for one in rows["restart"])
    assert {one["kind"] for one in rows["phases"]} == {"new image", "repeated image", "text"}
    assert all("stages, not told apart" in one["phases_ms"] for one in rows["phases"])
