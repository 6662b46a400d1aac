"""The profile file: what it says, and what is said about a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.sim.main import parsed, profile_of
from epd_serve.sim.profile import Capacity, Line, Profile, read_profile


def written(tmp_path: Path, value: object) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_a_profile_is_read_with_its_defaults(tmp_path: Path) -> None:
    raw = {
        "comment": "measured",
        "encode": {"setup_s": 0.1, "per_unit_s": 0.001},
        "decode_step_s": [[1, 0.02], [3, 0.04]],
        "capacity": {"max_running": 3},
    }
    profile = read_profile(written(tmp_path, raw))
    assert profile.encode == Line(0.1, 0.001) and profile.prefill == Line()
    assert profile.capacity.max_running == 3 and profile.capacity.block_tokens == 32
    assert [profile.decode_s(batch) for batch in (0, 1, 2, 3)] == pytest.approx([0, 0.02, 0.03, 0.04])
    assert profile.decode_s(5) == pytest.approx(0.06), "on as between the last two points"
    assert profile.encode.seconds(100) == pytest.approx(0.2) and profile.encode.seconds(0) == 0


def test_stages_start_in_the_time_of_their_role_or_of_their_device(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path, {"start_s": {"E": 2, "D": 4.5}})).start_s == {Role.E: 2, Role.D: 4.5}
    stages = {"1": {"start_s": {"E": 2}}}
    starts = read_profile(written(tmp_path, {"stages": stages, "start_s": 18.2})).start_s
    assert starts == {**dict.fromkeys(Role, 18.2), Role.E: 2}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"encodes": {}}, "unknown field `encodes`; did you mean encode"),
        ({"capacity": {"max_runing": 1}}, "unknown field `max_runing` - at `$.capacity`; did you mean max_running"),
        ({"capacity": {"max_running": 0}}, "Expected `int` >= 1 - at `$.capacity.max_running`"),
        ({"capacity": {"max_running": 1.5}}, "Expected `int`, got `float` - at `$.capacity.max_running`"),
        ({"jitter": 2}, "Expected `float` <= 1.0 - at `$.jitter`"),
        ({"jitter": True}, "Expected `float`, got `bool` - at `$.jitter`"),
        ({"prefill": 3}, "Expected `object`, got `int` - at `$.prefill`"),
        ({"encode": {"setup_s": -1}}, "Expected `float` >= 0.0 - at `$.encode.setup_s`"),
        ({"decode_step_s": [[2, 1], [1, 1]]}, "growing batch sizes"),
        ({"decode_step_s": [1]}, "Expected `array`, got `int` - at `$.decode_step_s[0]`"),
        ({"stages": {"2": {}}}, "stages has no profile for 1 device"),
        ({"stages": {"1": {"jitter": 2}}}, "`$.jitter`"),
        ({"stages": {"1": 2}}, "Expected `object`, got `int`"),
        ({"stages": {"1": {}}, "start_s": -1}, "Expected `float` >= 0.0 - at `$.start_s`"),
        ({"start_s": {"X": 1}}, "Invalid enum value 'X'"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_wrong_profile_is_refused_by_name(tmp_path: Path, raw: object, said: str) -> None:
    with pytest.raises(ConfigError, match="simulation profile") as refused:
        read_profile(written(tmp_path, raw))
    assert said in str(refused.value)


def test_a_profile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_profile(str(tmp_path / "none.json"))


def test_jitter_is_the_same_in_every_run_and_another_at_every_instance() -> None:
    profile = Profile(jitter=0.5)

    def drawn(instance: str) -> list[float]:
        factor = profile.factors(instance)
        return [factor() for _ in range(4)]

    assert drawn("P0") == drawn("P0") != drawn("P1")
    assert all(0.5 <= one <= 1.5 for one in drawn("P0"))


def test_a_stages_flags_win_over_its_profile() -> None:
    assert profile_of(parsed(["--max-num-seqs", "4"])).capacity == Capacity(max_running=4)
