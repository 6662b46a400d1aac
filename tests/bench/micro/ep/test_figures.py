"""Exposed time and overlap of E→P transfers, from rows."""

from __future__ import annotations

import pytest

from bench.micro.ep.command import BUSY, cells, figures
from bench.micro.ep.links import WAITING
from bench.micro.measurement import Row


def row(model: str, ms: float, *, mode: str = "arena", image: str = "4k", turn: int = 0) -> Row:
    sent = {"mode": mode, "picture": image, "tokens": 16206, "prefill": model, "round": turn, "load_ms": 10.0}
    waiting = model == WAITING
    return {**sent, "scheduling_ms": 0.0 if waiting else 700.0, "transfer_ms" if waiting else "exposed_ms": ms}


def test_overlap_is_the_part_of_the_transfer_that_the_request_does_not_see():
    (cell,) = cells([row(WAITING, 20.0), row(BUSY, 5.0)])

    assert cell["overlap"] == pytest.approx(0.75)
    assert (cell["transfer"].median, cell["exposed"].median, cell["scheduling_ms"]) == (20.0, 5.0, 700.0)


@pytest.mark.parametrize(("exposed_ms", "overlap"), [(-0.1, 1.0), (21.0, 0.0)])
def test_overlap_stays_between_nothing_and_all(exposed_ms, overlap):
    (cell,) = cells([row(WAITING, 20.0), row(BUSY, exposed_ms)])

    assert cell["overlap"] == overlap


def test_medians_decide():
    rows = [row(WAITING, ms) for ms in (10.0, 20.0, 900.0)] + [row(BUSY, ms) for ms in (0.0, 2.0, 800.0)]

    assert cells(rows)[0]["overlap"] == pytest.approx(0.9)


def test_modes_and_models_do_not_mix():
    named = figures(
        [
            row(WAITING, 20.0),
            row(WAITING, 100.0, mode="mooncake"),
            row(BUSY, 10.0),
            row("idle", 20.0),
            row(BUSY, 10.0, mode="mooncake"),
        ]
    )

    assert named["overlap_4k_arena"] == pytest.approx(0.5)
    assert named["overlap_4k_arena_idle"] == 0.0
    assert named["overlap_4k_mooncake"] == pytest.approx(0.9)
    assert named["exposed_ms_4k_arena"] == named["exposed_ms_4k_mooncake"] == 10.0


def test_exposed_time_below_the_resolution_is_none():
    assert figures([row(WAITING, 20.0), row(BUSY, -0.2)])["exposed_ms_4k_arena"] == 0.0
