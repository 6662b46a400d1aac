"""The burst of images: text before it is set against text in it."""

from __future__ import annotations

from bench.clients.results import LIMIT_S, Outcome, RequestRecord
from tests.soak.burst import over_idle, phases


def record(kind: str, due: float, first: float, outcome: Outcome = Outcome.OK, fault: str = "") -> RequestRecord:
    return RequestRecord("r", 0, "x", "s", due, due, first + 0.5, outcome, first_byte_s=first, kind=kind, fault=fault)


def test_text_before_the_burst_is_set_against_text_in_it() -> None:
    records = [
        record("text", 0.5, 9.5),  # before all has settled
        record("text", 2.0, 2.1),
        record("text", 11.0, 11.5),
        record("picture", 11.0, 14.0),
    ]
    rows = phases("single", records, 1.0, 10.0)
    assert [(row["kind"], row["phase"], row["first_p99_ms"]) for row in rows] == [
        ("text", "idle", 100.0),
        ("text", "burst", 500.0),
        ("picture", "burst", 3000.0),
    ]
    assert over_idle(rows, "single") == 5.0


def test_a_text_that_fails_in_the_burst_is_no_quick_one() -> None:
    records = [record("text", 2.0, 2.1), record("text", 11.0, 11.01, Outcome.ERROR, "status 429")]
    rows = phases("single", records, 1.0, 10.0)
    assert rows[1]["bad"] == 1 and rows[1]["first_p99_ms"] == LIMIT_S * 1e3 and rows[1]["errors"] == ["status 429: "]
