"""`epd-serve profile` on real stages: what it finds is what a stage does."""

from __future__ import annotations

from pathlib import Path

from deploy.cli.command import main
from deploy.planner.profile import read_device_profile


def test_a_profile_tells_back_what_real_stages_took(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    assert main(["profile", "--device", "cpu", "--quick", "--parts", "alone", "--out", str(out)]) == 0
    found = read_device_profile(out)
    stage = found.stages[1]
    assert 0 < stage.prefill.seconds(16) < stage.prefill.seconds(1024) < 10
    assert stage.encode.seconds(36) > 0 and stage.decode_s(16) >= stage.decode_s(1) > 0
    assert stage.capacity.max_running == 32 and stage.capacity.max_model_len == 8192
    assert found.front.seconds(1) > 0 and found.start_s > 1 and found.versions["torch"]
