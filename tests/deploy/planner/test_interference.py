"""The interference profile: its file, and what it says of operators and of stages."""

from __future__ import annotations

import json

import pytest

from deploy.planner.interference import (
    InterferenceMap,
    InterferenceProfile,
    ProfiledOperator,
    Slowdown,
    read_interference_profile,
)
from epd_serve.errors import ConfigError


def profile() -> InterferenceProfile:
    operators = (
        ProfiledOperator("encoder_matmul", "E", 8e8, 4e6, "compute"),
        ProfiledOperator("decode_attention", "D", 1e8, 7e7, "memory"),
    )
    ratios = {"encoder_matmul": (2.0, 1.2), "decode_attention": (1.5, 1.9)}
    pairs = tuple(
        Slowdown(own, beside, ratio, ratio - 0.1, ratio + 0.1, 5)
        for own, each in ratios.items()
        for beside, ratio in zip(ratios, each, strict=True)
    )
    alone = {"encoder_matmul": 0.002, "decode_attention": 0.01}
    maps = (InterferenceMap(None, alone, pairs), InterferenceMap((0.3, 0.7), alone, pairs))
    device = {"kind": "cpu", "name": "a CPU", "cores": 2}
    return InterferenceProfile(version=1, device=device, measured={"date": "now"}, operators=operators, maps=maps)


def test_what_was_saved_is_read_back_and_another_version_is_refused(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    profile().save(path)
    assert read_interference_profile(path) == profile()

    saved = json.loads(path.read_text())
    for wrong in ({**saved, "version": 2}, {name: value for name, value in saved.items() if name != "version"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="version"):
            read_interference_profile(path)


def test_a_file_of_before_is_read(tmp_path):
    """Its keys are those of every file that there is."""
    path = tmp_path / "profile.json"
    path.write_text("""
        {"version": 1, "kind": "real", "device": {"kind": "npu", "name": "910B3"}, "measured": {"date": "then"},
         "operators": [{"name": "norm", "stages": "EPD", "flops": 4.2e6, "moved_bytes": 2.1e6, "needs": "memory"}],
         "maps": [{"core_shares": [0.3, 0.7], "alone_s": {"norm": 1.2e-4},
                   "slowdowns": [{"operator": "norm", "beside": "norm", "slowdown": 1.4, "p25": 1.3, "p75": 1.5,
                                  "rounds": 5}]}]}""")
    found = read_interference_profile(path)
    assert found.operators == (ProfiledOperator("norm", "EPD", 4.2e6, 2.1e6, "memory"),)
    assert found.map_of((0.3, 0.7)).of("norm", "norm") == Slowdown("norm", "norm", 1.4, 1.3, 1.5, 5)


def test_a_map_is_asked_for_by_its_division_of_the_cores():
    assert profile().map_of((0.5, 0.5)) is None
    found = profile().map_of()
    assert found is not None and found.of("encoder_matmul", "decode_attention").slowdown == 1.2
    with pytest.raises(KeyError):
        found.of("encoder_matmul", "norm")


def test_stages_beside_stages_are_estimated_from_their_operators():
    assert profile().between("D", "E") == 1.5
    assert profile().between("E", "D", (0.3, 0.7)) == 1.2
    assert profile().between("P", "E") is None
    assert profile().between("D", "E", (0.5, 0.5)) is None
