"""Shared by all tests that need a card: the card, and the report that every result and figure goes into.

Nothing under this folder is collected unless it is asked for (`norecursedirs` in pyproject.toml): `make test-npu`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.npu.card import Card, read_card
from tests.npu.report import ROOT, Report


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("EPD_TEST_REPORT") or ROOT / "build" / "npu-report"
    config.stash[_REPORT] = Report(Path(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if "tests/npu/" in str(item.path)]
    if ours and not (card := read_card()).ids:
        reason = f"no {card.kind} device here: {card.note}; rehearse with EPD_TEST_DEVICE=cpu"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    if outcome.when == "call" or not outcome.passed:
        why = outcome.longreprtext if outcome.failed else str(outcome.longrepr[2]) if outcome.skipped else ""
        item.config.stash[_REPORT].result(
            test=item.nodeid, when=outcome.when, outcome=outcome.outcome, seconds=round(outcome.duration, 2), why=why
        )
    return outcome


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    return request.config.stash[_REPORT]


@pytest.fixture(scope="session")
def card() -> Card:
    return read_card()


_REPORT = pytest.StashKey[Report]()
