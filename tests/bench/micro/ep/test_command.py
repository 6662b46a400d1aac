"""`epd-bench transfer ep`: its parts, figures and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bench.cli import main
from bench.micro.ep.command import MEASUREMENT, PARTS, figures
from bench.micro.measurement import Row

ROWS: Mapping[str, Sequence[Row]] = {
    "transfers": [{"event_ms": 0.2}],
    "idle": [
        {"picture": picture, "round": 0, "admission_ms": 9.0, "local_ms": 2.0, "memcpy_ms": 4.0, "copy_ms": 0.1}
        for picture in ("1080p", "4k")
    ],
    "gaps": [{"kind": kind, "round": 0, "gap_p99_ms": 2.0, "gaps": 9} for kind in ("alone", "beside")],
    "store": [
        {
            "store": "arena",
            "size": "8m",
            "taken_ms": {"copy in": [1.0], "put": [1.5], "copy out": [1.0], "get": [1.4], "get, no checksum": [1.0]},
        },
        {
            "store": "mooncake",
            "size": "8m",
            "taken_ms": {"raw client": [2.0], "fetch": [2.1], "fetch, no checksum": [2.0]},
        },
    ],
    "duplicates": [{"clients": 64, "encodes": 1, "encodes_when_known": 0}],
    "fetched": [{"fetched_bytes": 100, "needed_bytes": 100}],
    "tiles": [
        {"kind": "real", "round": 0, "encoders": of, "ttft_ms": 900.0 / of, "tower_ms": 700.0 / of} for of in (1, 2)
    ],
}
CONTRACT = {
    "exposed_ms_1080p",
    "exposed_ms_4k",
    "exposed_ms_slab_1080p",
    "exposed_ms_slab_4k",
    "copy_in_step_ms_4k",
    "decode_gap_p99_beside_features",
    "put_over_memcpy_8m",
    "get_over_memcpy_8m",
    "mooncake_get_over_raw_client_8m",
    "encodes_for_64_duplicates",
    "event_p50_ms",
    "fetched_over_needed",
    "tile_ttft_over_one",
}


def test_every_figure_of_the_contract_follows_from_the_rows_of_its_part_and_has_a_goal():
    named = figures([{"part": part, **row} for part, own in ROWS.items() for row in own])

    assert named.keys() >= CONTRACT
    assert {goal.figure for goal in (*MEASUREMENT.goals, *MEASUREMENT.required)} >= CONTRACT


@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_has_figures_of_its_own(part):
    named = figures([{"part": part, **row} for row in ROWS[part]])

    assert named and named.keys() == PARTS[part].figures(ROWS[part]).keys()


def test_one_encode_too_many_fails_the_command():
    (once, known) = MEASUREMENT.required

    assert (once.figure, once.met(1), once.met(2)) == ("encodes_for_64_duplicates", True, False)
    assert (known.figure, known.met(0), known.met(1)) == ("encodes_for_a_known_feature", True, False)


@pytest.mark.parametrize("flags", [["--modes", "arenas"], ["--pictures", "8k"], ["--only", "arena"]])
def test_an_unknown_part_mode_or_image_is_named(capsys, flags):
    with pytest.raises(SystemExit):
        main(["transfer", "ep", *flags])

    assert flags[0] in (message := capsys.readouterr().err) and flags[1] in message
