"""The interference profile as a file: what is saved is loaded, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_ops.interference_profile import (
    InterferenceMap,
    InterferenceProfile,
    ProfiledOperator,
    ProfileError,
    Slowdown,
    load_profile,
)


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
    return InterferenceProfile({"kind": "cpu", "name": "a CPU", "cores": 2}, operators, maps, "real", {"date": "now"})


def test_what_was_saved_is_loaded(tmp_path):
    profile().save(tmp_path / "deep" / "profile.json")

    assert load_profile(tmp_path / "deep" / "profile.json") == profile()


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


def broken(path: str, value: Any) -> dict[str, Any]:
    """The file with one value replaced, or taken away by `...`."""
    profile_json: dict[str, Any] = json.loads(json.dumps(as_json()))
    *way, last = path.split("/")
    at: Any = profile_json
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    key: Any = int(last) if isinstance(at, list) else last
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return profile_json


def as_json() -> dict[str, Any]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as scratch:
        profile().save(Path(scratch) / "p")
        found: dict[str, Any] = json.loads((Path(scratch) / "p").read_text())
    return found


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", 2, "version is 2, and this EPD-Serve reads 1"),
        ("version", ..., "version is missing"),
        ("kind", "guessed", "kind is 'guessed': one of real"),
        ("device", ..., "device is no JSON object"),
        ("operators", [], "operators: none"),
        ("operators/1/name", "encoder_matmul", "or one of them twice"),
        ("operators/0/needs", "luck", r"operators\[0\].needs is 'luck'"),
        ("operators/0/moved_bytes", 0, r"operators\[0\].moved_bytes is 0"),
        ("operators/0/flops", True, r"operators\[0\].flops is True"),
        ("maps", [], "maps: there is none"),
        ("maps/1/core_shares", [0.3, 1.7], r"maps\[1\].core_shares is \[0.3, 1.7\]"),
        ("maps/0/alone_s/norm", 0.1, "alone_s names 'norm'"),
        ("maps/0/alone_s/encoder_matmul", 0, "alone_s.encoder_matmul is 0"),
        ("maps/0/slowdowns/0", ..., r"maps\[0\].slowdowns holds 3 of 4"),
        ("maps/0/slowdowns/1/beside", "encoder_matmul", "holds a pair twice"),
        ("maps/0/slowdowns/1/beside", "norm", "names 'norm', of which alone_s says nothing"),
        ("maps/0/slowdowns/0/slowdown", 9.0, "outside of its quartiles"),
        ("maps/0/slowdowns/0/p25", float("nan"), r"slowdowns\[0\].p25 is nan"),
        ("maps/0/slowdowns/0/rounds", 0, "rounds is 0"),
        ("maps/0/slowdowns/0/rounds", 1.5, "rounds is no int"),
        ("maps/0/slowdowns/0", 7, r"slowdowns\[0\] is no JSON object"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(tmp_path, path, value, says):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(broken(path, value)))

    with pytest.raises(ProfileError, match=rf"{says}.*measure again with `epd-bench interference --profile`"):
        load_profile(file)


def test_a_file_that_is_not_there_or_no_json_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"nothing.json cannot be read: No such file"):
        load_profile(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text('{"version": 1')
    with pytest.raises(ProfileError, match=r"half.json is no JSON"):
        load_profile(tmp_path / "half.json")
