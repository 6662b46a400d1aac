"""What is remembered of requests that have ended: never more than may be, and the telling ones for longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import ConfigError
from proxy.config.limits import RecordLimits
from proxy.records.record import Record
from proxy.records.records import SLOW_FOR_S, KeptRecords


def ended(name: int, *, total_s: float = 0.01, clock: float = 0.0, status: int = 200) -> Record:
    return Record(str(name), clock=clock, total_s=total_s, status=status, outcome=str(status))


def names(kept: KeptRecords) -> set[int]:
    return {int(one.id) for one in kept}


def test_the_newest_are_there() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    for name in range(100):
        kept.add(ended(name))
    assert {96, 97, 98, 99} <= names(kept) and len(kept) <= 8


def test_what_failed_or_was_slow_stays_when_others_have_gone() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    kept.add(ended(0, status=502))
    kept.add(ended(1, status=429))
    kept.add(ended(2, total_s=30.0))
    for name in range(3, 1000):
        kept.add(ended(name))
    assert {0, 1, 2} <= names(kept)


def test_a_client_s_own_mistakes_are_no_failures_of_ours() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    kept.add(ended(0, status=400))
    kept.add(ended(1, total_s=30.0))
    kept.add(ended(2, total_s=30.0))
    for name in range(3, 100):
        kept.add(ended(name))
    assert 0 not in names(kept)


def test_a_request_that_was_tried_again_counts_as_failed() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    repeated = ended(0)
    repeated.again("retry", stage="P0")
    kept.add(repeated)
    for name in range(1, 100):
        kept.add(ended(name))
    assert 0 in names(kept)


def test_slow_ones_are_forgotten_after_an_hour() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    for name in range(2):
        kept.add(ended(name, total_s=30.0))
    for name in range(2, 50):
        kept.add(ended(name, total_s=1.0, clock=2 * SLOW_FOR_S))
    assert not {0, 1} & names(kept) and len(kept) == 6


def test_those_that_stayed_are_forgotten_when_their_own_hour_is_over() -> None:
    kept = KeptRecords(RecordLimits(requests=8))
    kept.add(ended(0, total_s=30.0))
    kept.add(ended(1, total_s=30.0, clock=SLOW_FOR_S / 2))
    for name in range(2, 50):
        kept.add(ended(name, total_s=1.0, clock=1.2 * SLOW_FOR_S))
    assert {0, 1} & names(kept) == {1}
    for name in range(50, 100):
        kept.add(ended(name, total_s=2.0, clock=2 * SLOW_FOR_S))
    assert not {0, 1} & names(kept)


def test_nothing_is_remembered_where_nothing_may_be() -> None:
    for limits in (RecordLimits(requests=0), RecordLimits(size_bytes=0)):
        kept = KeptRecords(limits)
        kept.add(ended(0))
        assert len(kept) == 0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from([200, 429, 500]), st.integers(0, 40)), max_size=120),
    st.integers(1, 40),
    st.integers(1, 40_000),
)
def test_neither_count_nor_bytes_are_ever_exceeded(
    requests: list[tuple[float, int, int]], most: int, most_bytes: int
) -> None:
    kept = KeptRecords(RecordLimits(most, most_bytes))
    for name, (total_s, status, events) in enumerate(requests):
        record = ended(name, total_s=total_s, status=status, clock=100.0 * name)
        for _ in range(events):
            record.note("queued", s=1.0, line="serve")
        kept.add(record)
        assert len(kept) <= most and kept.size_bytes <= most_bytes
        every = list(kept)
        assert len(every) == len(kept) and sum(one.size_bytes for one in every) == kept.size_bytes


def test_a_record_comes_back_as_it_was() -> None:
    kept = KeptRecords(RecordLimits())
    record = Record("r", client_id="mine", tenant="t", media={"image": 2})
    record.attempted("E-P-D", "P0", "D0")
    record.note("queued", s=0.5, line="serve")
    kept.add(record)
    (one,) = kept
    again = one.record()
    assert again.headers() == record.headers() and again.phases_ms() == record.phases_ms()
    assert again.media == {"image": 2} and (one.id, one.client_id) == ("r", "mine")


@pytest.mark.parametrize("field", ["requests", "size_bytes"])
def test_a_negative_bound_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RecordLimits(**{field: -1})
    assert refused.value.param == field
