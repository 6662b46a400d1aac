"""What all charts of measurements check before anything is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.micro.measurement import check_plot
from epd_serve.errors import ConfigError


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
