"""Exposed time and overlap from samples, by the definitions of the design."""

from __future__ import annotations

import pytest

from bench.overlap import BUSY, Sample, cells, figures, lines


def sample(model: str, exposed_ms: float, *, mode: str = "arena", picture: str = "4k", turn: int = 0) -> Sample:
    return Sample(mode, picture, 16206, model, turn, 0.7 if model else 0.0, exposed_ms / 1e3, 0.01)


def test_overlap_is_the_part_of_the_transfer_that_the_request_does_not_see():
    (cell,) = cells([sample("", 20.0), sample(BUSY, 5.0)])

    assert cell.overlap == pytest.approx(0.75)
    assert (cell.transfer_ms.median, cell.exposed_ms.median, cell.scheduling_ms) == pytest.approx((20.0, 5.0, 700.0))


@pytest.mark.parametrize(("exposed_ms", "overlap"), [(-0.1, 1.0), (21.0, 0.0)])
def test_overlap_stays_between_nothing_and_all(exposed_ms, overlap):
    (cell,) = cells([sample("", 20.0), sample(BUSY, exposed_ms)])

    assert cell.overlap == overlap


def test_medians_decide():
    taken = [sample("", ms) for ms in (10.0, 20.0, 900.0)] + [sample(BUSY, ms) for ms in (0.0, 2.0, 800.0)]

    (cell,) = cells(taken)

    assert cell.overlap == pytest.approx(0.9)


def test_modes_and_models_do_not_mix():
    taken = [
        sample("", 20.0),
        sample("", 100.0, mode="mooncake"),
        sample(BUSY, 10.0),
        sample("idle", 20.0),
        sample(BUSY, 10.0, mode="mooncake"),
    ]

    named = figures(cells(taken))

    assert named["overlap_4k_arena"] == pytest.approx(0.5)
    assert named["overlap_4k_arena_idle"] == 0.0
    assert named["overlap_4k_mooncake"] == pytest.approx(0.9)
    assert named["exposed_ms_4k_arena"] == pytest.approx(10.0)


def test_exposed_time_below_the_resolution_is_none():
    assert figures(cells([sample("", 20.0), sample(BUSY, -0.2)]))["exposed_ms_4k_arena"] == 0.0


def test_the_paper_stands_beside_its_own_model_of_p_only():
    found = cells([sample("", 20.0), sample(BUSY, 1.0), sample("idle", 9.0)])

    _, *rows = lines(found, {"4k": (729.724, 0.9978)})

    assert [(row[0], row[-1]) for row in rows] == [(BUSY, "729.7, 99.78%"), ("idle", "")]


def test_a_row_says_whether_it_is_a_transfer_or_what_was_exposed():
    assert sample("", 20.0).row()["transfer_ms"] == 20.0
    assert sample(BUSY, 5.0).row() | {"exposed_ms": 5.0, "prefill": BUSY} == sample(BUSY, 5.0).row()
