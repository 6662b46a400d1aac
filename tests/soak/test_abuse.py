"""The short run of `python -m tests.soak.abuse`: a tenant that behaves beside others that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.abuse import main


@pytest.mark.slow
def test_nothing_fails_memory_is_bounded_and_nobody_else_is_turned_away(tmp_path: Path) -> None:
    main(["--quick", "--json", str(tmp_path / "abuse.json")])
    figures = json.loads((tmp_path / "abuse.json").read_text())["figures"]  # speed is the command's to judge
    assert figures["answers_5xx"] == figures["hanging"] == figures["tenant_bad_among_abuse"] == 0
    assert figures["rss_peak_mb"] <= figures["rss_allowed_mb"]
    assert figures["slow_bodies_answered_408"] > 0 and figures["silent_connections_closed"] > 0
