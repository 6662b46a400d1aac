"""The timeline picture of a P→D transfer."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from bench.timeline import Bar, bars, check_plot, draw, typical
from epd_serve.errors import ConfigError
from tests.bench.pd_transfers import transfer


def lasts(row: tuple[Bar, ...]) -> list[tuple[float, float, str]]:
    return [(pytest.approx(bar.start_ms), pytest.approx(bar.length_ms), bar.text) for bar in row]


def test_bars_are_in_milliseconds_since_p_began():
    shown = bars(transfer((5, 3), busy_s=0.004, exposed_s=0.002))

    assert lasts(shown.layers)[:2] == [(0.0, 10.0, "1"), (10.0, 10.0, "2")]
    assert lasts(shown.rest) == [(80.0, 5.0, "")]
    assert lasts(shown.packets) == [(50.0, 4.0, "1–5"), (80.0, 4.0, "6–8")]
    assert (shown.prefill_end_ms, shown.done_ms) == pytest.approx((85.0, 87.0))


def test_a_packet_of_one_layer_is_named_after_it():
    assert [bar.text for bar in bars(transfer((7, 1))).packets] == ["1–7", "8"]


def test_a_transfer_without_stamped_steps_is_drawn_from_its_first_packet():
    shown = bars(dataclasses.replace(transfer(), steps=()))

    assert shown.layers == shown.rest == ()
    assert shown.packets[0].start_ms == 0.0


def test_the_typical_transfer_is_neither_the_best_nor_the_worst():
    many = [transfer(exposed_s=seconds) for seconds in (0.000, 0.002, 0.003, 0.090)]

    assert typical(many) in many[1:3]


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="epd-serve[bench] is not installed")
    path = tmp_path / "deep" / "timeline.png"

    draw(path, [("bulk", transfer()), ("adaptive", transfer((5, 2, 1)))], "real: a test")

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
