"""What a stage tells of its prefix cache: changes in order, and all of it to who has missed something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.cache_ledger import HASHES_PER_REPORT, PROMPT_BYTES, CacheLedger, packed, short, unpacked
from epd_serve.wire import CacheReport, announcements, encode


def ledger() -> CacheLedger:
    return CacheLedger("P0", "life", 16)


def heard(reports: list[CacheReport]) -> list[tuple[int, str, list[int], list[int]]]:
    """As they arrive on the other side."""
    arrived = [announcements.decode(encode(report)) for report in reports]
    return [
        (one.seq, one.part, sorted(unpacked(one.stored)), sorted(unpacked(one.removed)))
        for one in arrived
        if isinstance(one, CacheReport)
    ]


def test_only_what_has_changed_is_told_and_only_once() -> None:
    cache = ledger()
    assert cache.take() == []
    cache.is_now(1, True)
    cache.is_now(2, True)
    cache.is_now(1, True)
    assert heard(cache.take()) == [(1, "", [1, 2], [])]
    cache.is_now(1, False)
    cache.is_now(3, False)
    cache.is_now(2, False)
    cache.is_now(2, True)
    assert heard(cache.take()) == [(2, "", [2], [1])]
    assert cache.take() == []


def test_who_asks_is_told_all_in_pieces_that_a_subscriber_takes() -> None:
    cache = ledger()
    for number in range(HASHES_PER_REPORT + 1):
        cache.is_now(number, True)
    cache.take()
    cache.is_now(0, False)
    cache.prompt(b"nodenode", [7])
    cache.tell_whole()
    *pieces, prompts = cache.take()
    assert [one.part for one in pieces] == ["first"] and sorted(unpacked(pieces[0].stored))[:2] == [1, 2]
    assert [one.nodes for one in prompts.prompts] == [b"nodenode"] and prompts.part == ""
    cache.is_now(0, True)
    cache.tell_whole()
    assert [one.part for one in cache.take()] == ["first", "more", ""]


def test_a_cache_that_was_cleared_says_so() -> None:
    cache = ledger()
    cache.is_now(1, True)
    cache.take()
    cache.cleared()
    assert heard(cache.take()) == [(2, "first", [], [])]


def test_prompts_are_remembered_up_to_a_bound_and_told_up_to_it() -> None:
    cache = ledger()
    long = list(range(PROMPT_BYTES // 16))  # half of what is kept
    for number in range(3):
        cache.prompt(number.to_bytes(8), long[:-2])
    (report,) = cache.take()
    assert len(report.prompts) == 2, "at once no more than fits"
    cache.prompt((9).to_bytes(8), long[:-2])
    cache.take()
    cache.tell_whole()
    assert [one.nodes for one in cache.take()[-1].prompts] == [(1).to_bytes(8), (9).to_bytes(8)]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from(["", "take", "whole", "clear"]))))
def test_who_hears_everything_knows_what_is_held(steps: list[tuple[int, bool, str]]) -> None:
    cache, held, known = ledger(), set[int](), set[int]()

    def hear() -> None:
        for report in cache.take():
            if report.part == "first":
                known.clear()
            known.difference_update(unpacked(report.removed))
            known.update(unpacked(report.stored))

    for number, is_held, then in steps:
        cache.is_now(number, is_held)
        (held.add if is_held else held.discard)(number)
        if then == "clear":
            cache.cleared()
            held.clear()
        elif then == "whole":
            cache.tell_whole()
        elif then:
            hear()
    hear()
    assert known == held


def test_hashes_are_60_bits_in_8_bytes() -> None:
    assert short(bytes(24) + b"\xff" * 8) == 2**60 - 1
    assert len(packed([1, 2**60 - 1])) == 16 and list(unpacked(packed([1, 2**60 - 1]))) == [1, 2**60 - 1]
