"""The folder of a sweep as runs, whole, interrupted and broken."""

from __future__ import annotations

import json
import shutil

import pytest

from bench.analysis.ratios import run_ratio
from bench.analysis.sweep_results import attainment, read_sweep
from bench.clients.slo import PAPER
from bench.sweep.store import EXPERIMENT, PHASES, RESULT
from epd_serve.errors import ConfigError
from epd_serve.phases.phase import Phase
from tests.bench.analysis.sweeps import RATES, asked, deployment, measured, phases_line, requests, sweep, valid_at

MONOLITH, SPLIT = deployment("TP1x2", baseline=True), deployment("E-P-D", 3)


@pytest.fixture
def whole(tmp_path):
    at = asked(tmp_path / "results", [MONOLITH, SPLIT])
    for one, ttft in ((MONOLITH, 0.4), (SPLIT, 0.2)):
        runs = {f"{rate:g} rps": requests(f"{rate:g} rps", rate, ttft=ttft) for rate in RATES}
        traced = [phases_line("2 rps-0", "2 rps", {"prefill": 12.5})]
        measured(at, one, runs, phases=traced)
    return at


def test_a_run_comes_with_its_figures_requests_and_phases(whole):
    found = read_sweep(whole)
    run = valid_at(found, SPLIT, 2.0)

    assert (found.experiment.real, found.experiment.slos, found.rates) == (True, PAPER, (2.0, 4.0))
    assert [one.label for one in found.experiment.deployments] == ["TP1x2, 2 devices", "E-P-D, 3 devices"]
    assert found.gaps == [] and found.envs["E-P-D"]["deployment"]["ready_s"] == 12.5
    assert run.figure("slo_2000:50:p90/attainment") == 1.0 and 200 < run.figure("ttft_ms/mean") < 400
    assert run.figure("ttft_ms/p12") is None
    assert len(run.requests) == 40
    assert (run.phases.requests, run.phases.mean[Phase.PREFILL]) == (1, 12.5)
    assert valid_at(found, SPLIT, 4.0).phases is None


def test_objectives_without_a_judge_were_judged_by_the_mean(whole):
    asked_at, result_at = whole / EXPERIMENT, whole / SPLIT.slug / RESULT
    plain = json.loads(asked_at.read_text())
    plain["slos"] = [{"ttft_ms": slo["ttft_ms"], "tpot_ms": slo["tpot_ms"]} for slo in plain["slos"]]
    asked_at.write_text(json.dumps(plain))
    result_at.write_text(result_at.read_text().replace(":p90/", ":other/").replace(":mean/", "/"))

    found = read_sweep(whole)
    run = valid_at(found, SPLIT, 2.0)

    assert [str(slo) for slo in found.experiment.slos] == ["2000:50:mean", "2000:80:mean", "800:30:mean"]
    assert attainment(found.experiment.slos[0]).of(run) == 100.0
    assert run_ratio("slo_2000:50:mean/attainment", run, run).samples == 36


def test_an_interrupted_sweep_says_what_is_missing(tmp_path):
    done, begun, never = deployment("TP1x2"), deployment("(E-PD)x2"), deployment("E-P-D")
    at = asked(tmp_path, [done, begun, never])
    measured(at, done, {f"{rate:g} rps": requests(f"{rate:g} rps", rate) for rate in RATES})
    measured(at, begun, {"2 rps": requests("2 rps", 2, good=False)})
    (at / begun.slug / "failed.json").write_text('{"reason": "its stage died"}')
    found = read_sweep(at)

    assert [list(gap.values())[:3] for gap in found.gaps] == [
        ["(E-PD)x2", 4.0, "not measured"],
        ["(E-PD)x2", 2.0, "not valid"],
        ["E-P-D", 2.0, "not measured"],
        ["E-P-D", 4.0, "not measured"],
    ]
    assert found.gaps[0]["why"] == "its stage died"
    assert valid_at(found, begun, 2.0) is None and len(found.of(begun)) == 1


def test_half_a_line_at_the_end_is_left_out(whole):
    with (whole / SPLIT.slug / PHASES).open("a") as file:
        file.write('{"run": "2 rp')

    assert valid_at(read_sweep(whole), SPLIT, 2.0).phases.requests == 1


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no experiment\.json: name the folder"):
        read_sweep(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            PHASES,
            '{"run": "r", "ttft_ms": 1, "e2e_ms": 1, "phases_ms": {}, "exposed_ms": {}}\n{}\n',
            r"phases\.jsonl:2 .*missing required field",
        ),
        (RESULT, '{"figures": {},\n"env": nothing}', r"result\.json cannot be read"),
        (RESULT, '{"figures": {}, "env": {}}', r"result\.json cannot be read: .*`rows`"),
        (RESULT, '{"figures": {}, "env": {}, "rows": [{"run": "2 rps", "rate": 2}]}', "no run of a sweep.*`valid`"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(whole, name, text, said):
    (whole / SPLIT.slug / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sweep(whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": None}, r"\$\.kind"),
        ({"deployments": [{"name": "a"}]}, "`layout`"),
        ({"deployments": [{"name": "a", "layout": "TP1", "devices": 0}]}, r"deployments\[0\]\.devices"),
        ({"rates": ["x"]}, r"rates\[0\]"),
    ],
)
def test_an_experiment_that_is_none_is_refused(whole, change, said):
    plain = json.loads((whole / EXPERIMENT).read_text())
    (whole / EXPERIMENT).write_text(json.dumps({**plain, **change}))

    with pytest.raises(ConfigError, match=rf"experiment\.json cannot be read: .*{said}"):
        read_sweep(whole)


def test_of_several_seeds_a_run_has_the_medians_and_what_is_not_valid_once_is_not_valid(tmp_path):
    layouts = [deployment("TP1x2"), deployment("EP-D")]
    for seed, ttft in ((3, 0.2), (4, 0.6), (5, 0.3)):
        bad = [("EP-D", 4.0)] if seed == 4 else []
        times = {"TP1x2": ttft, "EP-D": ttft}
        sweep(tmp_path / f"seed-{seed}", layouts, times, rates=(2.0, 4.0), bad=bad, seed=seed)

    found = read_sweep(tmp_path)
    alone = read_sweep(tmp_path / "seed-5")
    run = valid_at(found, layouts[0], 2.0)
    assert run.figure("ttft_ms/mean") == valid_at(alone, layouts[0], 2.0).figure("ttft_ms/mean")
    assert run.figures["ttft_ms/mean_least"] < run.figure("ttft_ms/mean") < run.figures["ttft_ms/mean_most"]
    assert valid_at(found, layouts[1], 4.0) is None and valid_at(found, layouts[1], 2.0) is not None
    assert {(gap["deployment"], gap["seed"]) for gap in found.gaps} == {("EP-D", 4)}


def test_of_several_seeds_what_one_has_not_measured_is_a_gap_and_no_run(tmp_path):
    layouts = [deployment("TP1x2"), deployment("EP-D")]
    for seed in (3, 4):
        sweep(tmp_path / f"seed-{seed}", layouts, {"TP1x2": 0.2, "EP-D": 0.2}, rates=(2.0,), seed=seed)
    shutil.rmtree(tmp_path / "seed-4" / layouts[1].slug)

    found = read_sweep(tmp_path)
    assert [run.deployment.name for run in found.runs] == ["TP1x2"]
    assert {(gap["deployment"], gap["what"], gap["seed"]) for gap in found.gaps} == {("EP-D", "not measured", 4)}
