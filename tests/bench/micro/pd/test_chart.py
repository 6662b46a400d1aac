"""The timeline chart of a P→D transfer, and the checks that all charts share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.micro.measurement import check_plot
from bench.micro.pd.command import draw, typical
from epd_serve.errors import ConfigError
from tests.bench.micro.pd.transfers_made import row


def test_the_typical_transfer_is_neither_the_best_nor_the_worst():
    many = [row("bulk", ms) for ms in (0.0, 2.0, 3.0, 90.0)]

    assert typical(many) in many[1:3]


def test_the_chart_is_a_png_with_a_panel_per_mode_of_the_nearest_length(tmp_path):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    path = tmp_path / "deep" / "timeline.png"
    rows = [row(mode, 1.0, tokens=tokens) for tokens in (256, 900) for mode in ("bulk", "adaptive")]

    draw(path, [*rows, {"kind": "emulated figures"}], "real: a test")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_file_is_refused_before_measuring(tmp_path):
    with pytest.raises(ConfigError, match=r"name a file that ends in \.png"):
        check_plot(tmp_path / "timeline.svg")


def test_without_matplotlib_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ConfigError, match=r"epd-serve\[bench\]"):
        check_plot(tmp_path / "timeline.png")


def test_measuring_does_not_import_matplotlib():
    script = "import sys, bench.cli; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "False False"
