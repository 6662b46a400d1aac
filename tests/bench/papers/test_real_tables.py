"""EPD's tables from real starts: what a stage's device is divided into, the search, and figures by rows."""

from __future__ import annotations

from typing import Any

import pytest

from bench.papers.memory_tables import computed_beside
from bench.papers.real_tables import DEVICE_BYTES, KV_SHARE, MIB, Sizes, families, figures, largest


@pytest.fixture(scope="module")
def made() -> list[tuple[str, Sizes]]:
    return families()


@pytest.mark.parametrize("most", [1, 2, 8, 9, 30, 95, 200])
@pytest.mark.parametrize(("guess", "step"), [(1, 1), (9, 1), (100, 4)])
def test_the_largest_number_is_found_within_a_step_and_none_is_tried_twice(most: int, guess: int, step: int) -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= most

    found = largest(holds, guess, step)

    assert max(0, most - step) < found <= most or (most <= step and found in (0, most))
    assert len(tried) == len(set(tried))


def test_where_not_even_one_holds_nothing_is_found() -> None:
    assert largest(lambda number: False, 9, 1) == 0


def test_a_device_holds_weights_slab_and_kv_and_what_the_encoder_leaves_goes_to_kv(
    made: list[tuple[str, Sizes]],
) -> None:
    for _, sizes in made:
        with_it, without = sizes.kv_bytes("EPD", "together"), sizes.kv_bytes("PD", "apart")
        assert without - with_it == pytest.approx(KV_SHARE * (sizes.weights.tower - sizes.slab_bytes), abs=2)
        assert sizes.taken_bytes("EPD", "together") + with_it < DEVICE_BYTES
        assert sizes.kv_bytes("E", "apart") == 0 and sizes.taken_bytes("E", "apart") == sizes.weights.tower


def test_the_models_have_the_papers_proportions(made: list[tuple[str, Sizes]]) -> None:
    for _, sizes in made:
        assert sizes.weights.tower / sizes.weights.language == pytest.approx(11.5 / 39.7, rel=0.2)
        assert DEVICE_BYTES / sizes.weights.language == pytest.approx(82e9 / 39.7e9, rel=0.2)


def test_more_fits_by_computation_where_the_encoder_is_apart(made: list[tuple[str, Sizes]]) -> None:
    for name, sizes in made:
        values = computed_beside(name, sizes)["values"]
        assert 1 <= values["2/FAMILY/max_images_together"] < values["2/FAMILY/max_images_encoder_free"]
        assert values["4/FAMILY/kv_share/8 pictures/together"] < values["4/FAMILY/kv_share/8 pictures/encoder_free"] < 1


def rows(start: str, stage: str, **own: Any) -> list[dict[str, Any]]:
    of = {"kind": "real", "family": "F", "start": start}
    held = {"held_bytes": 900 * MIB, "taken_bytes": own["taken"], "kv_bytes": 1, "outside_bytes": own["outside"]}
    return [
        {**of, "instance": stage, **held, "kv_tokens": own["tokens"]},
        {**of, "instance": stage, "requests": own["requests"], "fits": True},
        {**of, "instance": stage, "requests": own["requests"] + 1, "fits": False},
        {**of, "instance": stage, "images": 4, "peak_bytes": own["peak"]},
        {**of, "images": own["images"], "answered": True, "ended": ""},
        {**of, "images": own["images"] + 1, "answered": False, "ended": stage},
    ]


def test_figures_are_the_most_that_fitted_and_what_is_over_what() -> None:
    half = DEVICE_BYTES // 2
    found = figures(
        [
            {"figure": "max_batch/a row of the paper", "computed": 1, "paper": 2},
            *rows("together", "EPD0", taken=half, outside=550 * MIB, tokens=1000, requests=4, peak=half // 2, images=8),
            *rows("apart", "PD0", taken=0, outside=560 * MIB, tokens=1500, requests=6, peak=half // 2, images=90),
            {"kind": "computed", "family": "F", "values": {"2/FAMILY/max_images_together": 9}},
        ]
    )
    assert found["real/table2/F/max_images_together"] == 8
    assert found["real/table2/F/max_images_encoder_free_over_together"] == 11.25
    assert found["real/table3/F/batch_requests_encoder_free_over_together"] == 1.5
    assert found["real/table4/F/kv_tokens_encoder_free_over_together"] == 1.5
    assert found["real/table4/F/kv_share/4 pictures/together"] == 0.5
    assert found["real/table4/F/kv_share/4 pictures/encoder_free"] == 0.75
    assert found["computed/table2/F/max_images_together"] == 9
    assert found["real/devices/F/outside_spread_mib"] == 10
