"""Phases of real requests add up to what their client measured: nothing that one waits for is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.clients.phases import durations, joined, spans_of
from bench.clients.results import RequestRecord
from bench.clients.sender import ask
from bench.workloads.synthetic import demo_body, demo_image, text_body
from epd_serve.phases.phase import Phase
from epd_serve.phases.stamps import Stamp, Timeline, read_stamps
from tests.e2e.serving import MODEL, serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
LAYOUT, ROUNDS, REPORT_S = "(E-P)-D", 3, 10.0
KINDS = ("new image", "repeated image", "text")
Asked = dict[str, list[tuple[RequestRecord, list[Stamp]]]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Records of requests that were sent one at a time, with their stamps."""
    traces = tmp_path_factory.mktemp("traces")
    with serving(LAYOUT, "--trace-dir", str(traces)) as launch:
        ask(launch.url, demo_body(MODEL, demo_image(99, 224)))  # first-time imports
        records: dict[str, list[RequestRecord]] = {kind: [] for kind in KINDS}
        for turn in range(ROUNDS):
            image, text = demo_body(MODEL, demo_image(turn, 224)), text_body(MODEL, tokens=32, answer=8, stream=True)
            for kind, body in zip(KINDS, (image, image, text), strict=True):
                records[kind].append(ask(launch.url, body))
        wait_for(lambda: _ended(traces) == 1 + ROUNDS * len(KINDS), "the last stamp", REPORT_S)
        timeline = Timeline(read_stamps(traces))
    return {kind: [(one, timeline.named(one.id)) for one in own] for kind, own in records.items()}


def _ended(traces: Path) -> int:
    return sum(stamp.event == "done" for stamp in read_stamps(traces))


@pytest.mark.parametrize("kind", KINDS)
def test_phases_add_up_to_the_request_within_two_percent(asked: Asked, kind: str) -> None:
    for record, stamps in asked[kind]:
        found = joined(record, Timeline(stamps))
        assert found is not None and record.last_s is not None
        whole_ms = 1e3 * (record.last_s - record.due_s)
        assert sum(found["exposed_ms"].values()) == pytest.approx(whole_ms, rel=0.02)
        assert abs(found["sum_error"]) <= 0.02, "of the time to first token, too"


@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_is_where_it_happens(asked: Asked, kind: str) -> None:
    language = {Phase.PREPROCESS_P, Phase.PREFILL_QUEUE, Phase.PREFILL, Phase.PREPROCESS_D, Phase.FIRST_TOKEN}
    encoding = {Phase.DECODE_MEDIA, Phase.PREPROCESS_E, Phase.ENCODE}
    for record, stamps in asked[kind]:
        phases = durations(spans_of(stamps, record)).keys()
        assert language | {Phase.HTTP_CLIENT, Phase.PROXY, Phase.PD, Phase.ANSWER_D} <= phases
        assert encoding & phases == (encoding if kind == "new image" else set())
        assert (Phase.EP in phases) is (kind != "text")
