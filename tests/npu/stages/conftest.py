"""Stages on the card: a monolith that says what is right, then one layout after the other, each started once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.npu.card import Card
from tests.npu.report import Report
from tests.npu.stages.answers import ONE_AT_A_TIME, TOGETHER, Answer, answered, near_tie_of, noise
from tests.npu.stages.launches import MONOLITH, ORDER, PLANNED, CardServing, served, why_not


@dataclass(frozen=True)
class Reference:
    """What the monolith answered, one request at a time. `together`: in the order of `answers.TOGETHER`.

    Attributes:
        near_tie: see `answers`. kv_tokens: how many its KV cache held.
    """

    alone: dict[str, Answer]
    together: tuple[Answer, ...]
    near_tie: float
    kv_tokens: int


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("card")


@pytest.fixture(scope="session")
def reference(card: Card, scratch: Path, report: Report) -> Reference:
    """Asked before any other layout is started: both would not fit on one device."""
    with served("TP1", MONOLITH, card, scratch, report) as monolith:
        alone = {name: answered(monolith, body)[0] for name, body in ONE_AT_A_TIME.items()}
        pictures = tuple(answered(monolith, body)[0] for body in TOGETHER)
        with ThreadPoolExecutor(len(TOGETHER)) as pool:
            crowded = list(pool.map(lambda body: answered(monolith, body)[0], TOGETHER))
        moved = [noise(one, other) for one, other in zip(pictures, crowded, strict=True)]
        near_tie = near_tie_of(moved)
        report.figure("monolith_logprob_noise", round(max(moved), 4), launch="TP1", near_tie=near_tie)
        stage = monolith.instances()["EPD0"]["stage"]
        return Reference(alone, pictures, near_tie, stage["kv_tokens"] if stage else 0)


@pytest.fixture(scope="session")
def launch(
    request: pytest.FixtureRequest, reference: Reference, card: Card, scratch: Path, report: Report
) -> Iterator[CardServing]:
    """The launch named by the test's parameter (`launches.over`)."""
    name = request.param
    if reason := why_not(name, card):
        pytest.skip(reason)
    with served(name, PLANNED[name], card, scratch, report) as ready:
        yield ready


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Launch by launch, in their order; what needs none first, and within a launch what kills its stages last."""

    def when(item: pytest.Item) -> tuple[int, bool]:
        name = item.callspec.params.get("launch") if hasattr(item, "callspec") else None
        return 1 + ORDER.index(name) if name else 0, "test_faults" in str(item.path)

    ours = [place for place, item in enumerate(items) if "tests/npu/stages/" in str(item.path)]
    for place, item in zip(ours, sorted((items[place] for place in ours), key=when), strict=True):
        items[place] = item
