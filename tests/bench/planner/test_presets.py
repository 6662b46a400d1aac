"""Figures of papers as presets: what the files hold, what comes of one, and what it is worth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.planner import presets
from bench.planner.preset_file import COMPUTED, PROFILES_DIR, Printed, profile_of, read_preset
from bench.planner.presets import PRESETS_DIR, here, report, shape, values, verdict
from bench.planner.readings import cases, rows_of
from deploy.planner.simulate import check_simulated
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from tests.soak.emulation.openpangu_vl_7b_910b import DEVICE

SHIPPED = sorted(PRESETS_DIR.glob("*.json"))
TINY: dict[str, Any] = {
    "paper": "A paper",
    "figure": "F1",
    "source": "§1",
    "shows": "something",
    "reading": "attainment",
    "profile": "openpangu-7b-vl-910b",
    "limit": 0.1,
    "not_simulated": "the rest",
    "printed": [],
    "traffic": [{"name": "texts", "mix": {"images=0@28x28,text=2000,output=4": 1}}],
    "methods": [{"name": "one", "layouts": ["TP1x2"]}, {"name": "two", "layouts": ["EP-D"]}],
    "slos": "2000:400",
    "rates": [1],
    "requests": 40,
}


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "tiny.json"
    path.write_text(json.dumps({**TINY, **changed}))
    return path


def record(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "real.json").write_text(json.dumps({"figures": {}, "env": {}, "rows": rows}))


def real(layout: str, measured: float = 0.9, ttft_ms: float = 100.0) -> dict[str, Any]:
    medians = {f"{of}_{kind}_p50_ms": 100.0 for of in ("predicted", "measured") for kind in ("ttft", "tpot")}
    both = {"attained": [0.95], "measured_attained": [measured], **medians, "measured_ttft_p50_ms": ttft_ms}
    return {"layout": layout, **both}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_preset_can_be_simulated_on_equal_devices(path: Path) -> None:
    preset = read_preset(path)

    layouts = [parse(text) for method in preset.methods for text in method.layouts]
    assert len({layout.device_count for layout in layouts}) == (preset.reading not in COMPUTED)
    for profile in {one.profile or preset.profile for one in preset.traffic}:
        for layout in layouts:
            check_simulated(layout, profile_of(profile))
    assert preset.not_simulated and preset.printed
    assert preset.reading in COMPUTED or (preset.traffic and list(cases(preset, quick=True)))
    names = {one.name for one in preset.methods}
    assert not names or {one.of for one in preset.printed} | {one.over for one in preset.printed} <= names | {""}


def test_every_figure_is_there() -> None:
    found = {path.stem for path in SHIPPED}
    hydra = {f"hydrainfer-{one}" for one in ("t2-f2", "f3", "f4", "f5", "f6", "f9-llava-1.5", "f10", "f11", "f12")}
    epd = {f"epd-{one}" for one in ("f4", "f5", "f6-left", "f6-middle", "f6-right")}
    others = {*(f"modserve-f{one}" for one in range(14, 19)), "epd-serve-f2", "epd-serve-f17", "epd-serve-f17-rule"}
    assert hydra | epd | others <= found
    assert read_preset(PRESETS_DIR / "epd-f6-left.json").methods[4].layouts == ("5E-2P-D",)


@pytest.mark.parametrize("path", sorted(PROFILES_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_a_profile_says_that_it_is_a_papers_and_where_its_numbers_are_from(path: Path) -> None:
    profile = profile_of(path.stem)

    assert profile.how == "paper" and profile.comment


def test_the_npus_profile_is_the_emulations() -> None:
    assert profile_of("openpangu-7b-vl-910b").stages == DEVICE.profile().stages
    assert profile_of("openpangu-7b-vl-910b").front == DEVICE.profile().front


@pytest.mark.parametrize("reading", ["attainment", "goodput", "devices", "latency", "breakdown", "throughput"])
def test_each_simulated_reading_has_rows_of_every_method(tmp_path: Path, reading: str) -> None:
    rows = rows_of(read_preset(written(tmp_path, reading=reading)), quick=True)

    assert {row["method"] for row in rows} == {"one", "two"}
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize("name", ["hydrainfer-t2-f2", "hydrainfer-f3", "hydrainfer-f12"])
def test_what_is_arithmetic_is_said_to_be_computed(name: str) -> None:
    preset = read_preset(PRESETS_DIR / f"{name}.json")

    assert list(report(name, preset, rows_of(preset, quick=True)))[-1].startswith("Computed, unvalidated")


def test_a_preset_runs_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    printed = [{"what": "all of them", "source": "§1", "column": "attained", "of": "two", "over": "one", "value": 2}]
    written(tmp_path, printed=printed)
    monkeypatch.setattr(presets, "PRESETS_DIR", tmp_path)

    assert main(["papers", "tiny", "--quick", "--json", str(tmp_path / "out.json")]) == 0
    shown, kept = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "the rest" in shown and "Simulated, unvalidated" in shown
    assert kept["figures"] == {"tiny/1/low": 1.0, "tiny/1/high": 1.0}
    assert [row["method"] for row in kept["rows"]] == ["one", "two"]


def test_without_names_all_are_listed(capsys: Any) -> None:
    assert main(["papers"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [path.stem for path in SHIPPED]


def test_a_ratio_is_of_each_methods_best_layout() -> None:
    rows = [
        {"traffic": "a", "method": name, "layout": layout, "ttft_ms": ms, "goodput_rps": 1 / ms}
        for name, layout, ms in (("one", "x", 8.0), ("one", "y", 4.0), ("two", "x", 2.0))
    ]
    assert values(Printed("", "", "ttft_ms", of="two", over="one"), rows) == [0.5]
    assert values(Printed("", "", "goodput_rps", of="two", over="one"), rows) == [2.0]
    assert here(Printed("", "", "ttft_ms", best="one"), rows) == "two (1 of 1)"
    assert here(Printed("", "", "ttft_ms", of="one", where={"traffic": "b"}), rows).startswith("no figure")


# --- what it is worth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "reading", "expected"),
    [
        ([real("TP1x2"), real("EP-D")], "attainment", "validated: error 5%"),
        ([real("TP1x2"), real("EP-D", 0.7)], "attainment", "unvalidated: error 25%"),
        ([real("TP1x2"), real("EP-D", 0.7)], "latency", "validated: error 0%"),
        ([real("TP1x2", ttft_ms=200.0), real("EP-D")], "latency", "unvalidated: error 50%"),
        ([real("TP1x2")], "attainment", "unvalidated: real.json has no real run of the shape of EP-D"),
        ([real("TP1x2"), {**real("EP-D"), "measured_attained": None}], "attainment", "unvalidated: real.json has no"),
    ],
)
def test_a_preset_is_validated_by_the_worst_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], reading: str, expected: str
) -> None:
    monkeypatch.setattr(presets, "RESULTS", tmp_path)
    record(tmp_path, *({name: value for name, value in row.items() if value is not None} for row in rows))
    evidence = {"record": "real.json", "layouts": ["TP1x2", "EP-D"]}

    assert verdict(read_preset(written(tmp_path, reading=reading, validated_by=evidence))).startswith(expected)


def test_without_a_record_nothing_is_validated(tmp_path: Path) -> None:
    absent = {"record": "no.json", "layouts": ["TP1x2"]}

    assert verdict(read_preset(written(tmp_path))).startswith("unvalidated")
    assert "no.json" in verdict(read_preset(written(tmp_path, validated_by=absent)))


def test_a_shape_is_the_stages_however_many() -> None:
    assert shape("6EP-2D") == shape("EP-D") and shape("TP4x8") == shape("TP1x2")
    assert shape("(E-PD)x2") != shape("E-PD")


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_preset_gets_the_nearest(capsys: Any) -> None:
    assert main(["papers", "hydrainfer-f55"]) == 1
    assert "hydrainfer-f5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"readings": "goodput"}, "reading"),
        ({"reading": "goodputs"}, "$.reading"),
        ({"limit": 0}, "$.limit"),
        ({"traffic": [{"name": "a", "mix": {}}]}, "$.traffic[0].mix"),
    ],
)
def test_a_malformed_preset_names_file_and_field(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_preset(written(tmp_path, **changed))

    assert "tiny.json" in str(caught.value) and field in str(caught.value)
