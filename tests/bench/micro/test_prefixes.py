"""`epd-bench prefixes`: the work that is measured is done, and its figures are named after it."""

from __future__ import annotations

import argparse

import pytest

from bench.micro import prefixes


def test_every_kind_of_work_has_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS", 160_000)
    monkeypatch.setattr(prefixes, "PROMPTS", 16)
    rows = list(prefixes.measure(argparse.Namespace(rounds=2)))
    found = prefixes.figures(rows)
    assert {"index_mib", "take_in_us", "recognise_us", "look_up_us"} == set(found)
    assert all(found[name] > 0 for name in ("take_in_us", "recognise_us", "look_up_us"))
    assert "look_up_us" in next(iter(prefixes.tables(rows)))
