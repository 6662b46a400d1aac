"""Two encoders, four P and four D on hosts of their own: a feature goes where its request is, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from bench.micro.ep.fetched import METADATA, fetched_and_needed, figures


def test_a_feature_is_fetched_by_the_prefill_that_has_its_request():
    row = fetched_and_needed(METADATA)

    assert row["needed_bytes"] > 0
    assert figures([row])["fetched_over_needed"] <= 1.1
    assert list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*")) == []


def test_where_no_request_can_come_before_its_feature_all_who_prefill_fetch_it():
    row = fetched_and_needed({})

    assert 3 < figures([row])["fetched_over_needed"] <= 4
