"""What there is of runs is read back, and what unfinished ones left is let go."""

from __future__ import annotations

import pytest

from bench.clients.results import Results, difference, keep_runs
from epd_serve.errors import ConfigError
from tests.bench.clients.test_command import Served, served  # noqa: F401  (a fixture)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {}, "env": {}, "rows": [1]}'])
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        Results(tmp_path / "r.json", flag="--json", resume=True)


def test_lines_of_other_runs_and_half_a_line_are_let_go(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"run":"a"}\n{"run":"b"}\n[]\n{"run":"a"')

    keep_runs(path, {"a"}, "--json")

    assert path.read_text() == '{"run":"a"}\n'
    keep_runs(tmp_path / "none", {"a"}, "--json")
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_field_that_differs_is_named_with_both_values():
    assert difference({"a": 1, "slo": ["1:2"]}, {"a": 1, "slo": ["1:2"]}) == ""
    assert difference({"warm_up": None}, {"warm_up": 2.0}) == "warm_up was not given, is 2.0"
    assert difference({"gone": 1}, {}) == "gone was 1, is not given"
