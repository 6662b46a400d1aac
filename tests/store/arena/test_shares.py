"""Shares of tenants in a full arena: who gives when somebody needs room."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.arena import Arena, Lease
from store.arena.table import FREE
from store.errors import StoreFullError
from store.keys import tenant_of

PAGE = 4096
PAGES = 12
LOUD, QUIET, THIRD = 0xFFF, 2, 3

tenants = st.sampled_from((LOUD, QUIET, THIRD, 4))
numbers = st.integers(0, 7)


def name(tenant: int, number: int) -> str:
    return f"{tenant:03x}-{number:064x}"


def put(arena: Arena, key: str, pages: int = 1) -> bool:
    return arena.put(key, bytes(pages * PAGE), shape=(pages,), dtype="uint8")


@contextmanager
def made_arena(*, slots: int = 64) -> Iterator[Arena]:
    path = f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena"
    arena = Arena.create(path, PAGES * PAGE, slots=slots, owners=4, prefault=False)
    try:
        yield arena
    finally:
        arena.close()
        Arena.unlink(path)


def pages_of(arena: Arena) -> dict[str, int]:
    return {entry.meta.key: entry.meta.nbytes // PAGE for entry in arena.entries()}


def held(arena: Arena) -> Counter[int]:
    """Pages by tenant, by the arena's own columns."""
    columns, sums = arena._table, Counter[int]()
    for slot in range(columns._geometry.slots):
        if columns.state[slot] != FREE:
            sums[columns.tenant[slot]] += columns.nbytes[slot] // PAGE
    return sums


def by_key(pages: dict[str, int]) -> Counter[int]:
    sums: Counter[int] = Counter()
    for key, size in pages.items():
        sums[tenant_of(key)] += size
    return sums


class Clock:
    """CLOCK_MONOTONIC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 10_000.0
        monkeypatch.setattr(time, "monotonic_ns", lambda: round(self.now_s * 1e9))


@given(st.lists(st.tuples(tenants, st.integers(0, 30)), min_size=30, max_size=90))
@settings(deadline=None, max_examples=50)
def test_who_is_within_its_share_loses_nothing_to_another(puts: list[tuple[int, int]]) -> None:
    """Features of one size, so that room is never cut up."""
    with made_arena() as arena:
        for tenant, number in puts:
            before, new = pages_of(arena), name(tenant, number)
            put(arena, new)
            gone = before.keys() - pages_of(arena).keys()
            sums = by_key({**before, new: 1})
            for whose in map(tenant_of, gone):
                assert sums[whose] > PAGES / len(sums), "had more than its share"
                assert sums[whose] == max(sums.values()), "and more than anybody else"
            assert len(gone) <= 1 and (not gone or sum(sums.values()) > PAGES), "no more goes than is needed"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), tenants, numbers, st.integers(1, 5)),
            st.tuples(st.just("put"), tenants, numbers, st.just(1)),
            st.tuples(st.sampled_from(("use", "lease", "release", "remove")), tenants, numbers, st.just(0)),
        ),
        min_size=30,
        max_size=90,
    )
)
@settings(deadline=None, max_examples=80)
def test_any_sizes_pins_and_uses(steps: list[tuple[str, int, int, int]]) -> None:
    leases: dict[str, Lease] = {}
    with made_arena() as arena:
        for what, tenant, number, size in steps:
            key = name(tenant, number)
            match what:
                case "put":
                    _put_and_judge(arena, key, size, leases)
                case "use":
                    arena.touch([key])
                case "lease":
                    if key not in leases and (lease := arena.lease(key)) is not None:
                        leases[key] = lease
                case "release":
                    if key in leases:
                        leases.pop(key).release()
                case "remove":
                    if key not in leases:
                        arena.remove(key)
            pages = pages_of(arena)
            assert held(arena) == by_key(pages), "each row says whose it is"
            assert arena.stats().used_bytes == PAGE * sum(pages.values()) <= PAGE * PAGES
            assert leases.keys() <= pages.keys(), "what is pinned stays"
        for lease in leases.values():
            lease.release()


def _put_and_judge(arena: Arena, key: str, size: int, leases: dict[str, Lease]) -> None:
    before, tenant = pages_of(arena), tenant_of(key)
    order = [entry.meta.key for entry in arena.entries() if entry.meta.key not in leases]
    try:
        stored = put(arena, key, size)
    except StoreFullError:
        stored = False
        assert leases, "only pins can fill an arena"
        after = pages_of(arena)
        assert after.keys() <= leases.keys(), "nobody waits for a share"
    else:
        assert stored == (key not in before)
        after = pages_of(arena)
    gone = [one for one in order if one not in after]
    for whose in {tenant_of(one) for one in gone}:
        idle = [one for one in order if tenant_of(one) == whose]
        assert [one for one in idle if one not in after] == idle[: sum(tenant_of(one) == whose for one in gone)], (
            "of each tenant the least recently used"
        )
    wanted = by_key({**before, key: size} if stored else before | {key: size})
    most = max((wanted[tenant_of(one)] for one in order), default=0)
    if gone and most > PAGES / len(wanted):
        assert [one for one in gone if wanted[tenant_of(one)] == most], "who had most gave first"
    for whose in {tenant_of(one) for one in gone} - {tenant}:
        if wanted[whose] <= PAGES / len(wanted):
            own = [one for one in after if tenant_of(one) == tenant and one not in leases]
            assert own == [key] * stored, "what is within a share goes only when the other has nothing idle"


def test_one_alone_has_everything(arena: Arena) -> None:
    for number in range(200):
        put(arena, name(LOUD, number))
    assert list(pages_of(arena)) == [name(LOUD, number) for number in range(168, 200)], "all 32 slots"


@pytest.mark.parametrize("others", [0, 1, 2, 5])
def test_tenants_that_want_everything_come_to_hold_the_same(others: int) -> None:
    with made_arena() as arena:
        for number in range(100):
            put(arena, name(LOUD, number))
        for number in range(100):
            for other in range(others):
                put(arena, name(100 + other, number))
        assert set(held(arena).values()) == {PAGES // (others + 1)} | ({PAGES} if not others else set())


def test_what_one_leaves_of_its_share_the_others_have() -> None:
    with made_arena() as arena:
        for number in range(100):
            for whose in (LOUD, THIRD):
                put(arena, name(whose, number))
            if number == 50:
                put(arena, name(QUIET, 0), 2)
        assert held(arena) == {QUIET: 2, LOUD: 5, THIRD: 5}


def test_what_was_just_used_is_spared_and_then_the_loud_one_gives(
    arena_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    made = Arena.create(arena_path, PAGES * PAGE)
    arena = Arena.attach(arena_path, spare_s=1.0)
    for number in range(3):
        put(arena, name(QUIET, number))
    for number in range(9):
        put(arena, name(LOUD, number))
    for whose in (LOUD, QUIET, THIRD):
        with pytest.raises(StoreFullError, match="just used"):
            put(arena, name(whose, 9))
    assert held(arena) == {QUIET: 3, LOUD: 9}
    for number in range(100, 140):
        clock.now_s += 0.2
        with suppress(StoreFullError):
            put(arena, name(LOUD, number))
    assert held(arena) == {QUIET: 3, LOUD: 9}
    for number in range(200, 240):  # the last of them a burst
        with suppress(StoreFullError):
            put(arena, name(LOUD, number))
    assert held(arena)[LOUD] == PAGES, "what is in use comes before what is only kept"
    arena.close()
    made.close()


def test_where_all_of_a_tenant_is_leased_it_takes_what_others_only_keep() -> None:
    with made_arena() as arena:
        for number in range(PAGES):  # are gone, and count no more
            put(arena, name(100 + number, 0))
        for number in range(PAGES):
            arena.remove(name(100 + number, 0))
        for number in range(2):
            put(arena, name(QUIET, number), 2)
        for number in range(4):
            put(arena, name(LOUD, number), 2)
        leases = [arena.lease(name(LOUD, number)) for number in range(4)]
        of_loud = {name(LOUD, number) for number in range(4)}
        put(arena, name(QUIET, 2), 2)
        assert set(pages_of(arena)) == of_loud | {name(QUIET, 1), name(QUIET, 2)}, "its own oldest"
        put(arena, name(THIRD, 0))
        put(arena, name(THIRD, 1), 2)
        assert set(pages_of(arena)) == of_loud | {name(QUIET, 2), name(THIRD, 1)}, "its own, once it had some"
        put(arena, name(LOUD, 4), 2)
        assert set(pages_of(arena)) == of_loud | {name(LOUD, 4), name(THIRD, 1)}
        for lease in leases:
            assert lease is not None
            lease.release()


def test_a_feature_larger_than_a_share_is_stored_nevertheless() -> None:
    with made_arena() as arena:
        for number in range(PAGES):
            put(arena, name(number + 10, 0))
        assert put(arena, name(LOUD, 0), 6)
        assert put(arena, name(LOUD, 1), 6)
        assert set(pages_of(arena)) >= {name(LOUD, 1)} and name(LOUD, 0) not in pages_of(arena)
        assert len(held(arena)) == 1 + PAGES - 6


def test_what_nobody_used_for_long_counts_for_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with made_arena() as arena:
        for number in range(6):
            put(arena, name(QUIET, number))
        clock.now_s += 400
        arena.touch([name(QUIET, 0)])
        clock.now_s += 400
        for number in range(100):
            put(arena, name(LOUD, number))
        assert held(arena) == {QUIET: 1, LOUD: PAGES - 1}


def test_small_features_that_take_every_slot_are_more_than_a_share() -> None:
    with made_arena(slots=6) as arena:
        put(arena, name(QUIET, 0), 3)
        for number in range(5):
            put(arena, name(LOUD, number))
        put(arena, name(QUIET, 1))
        assert name(LOUD, 0) not in pages_of(arena) and name(QUIET, 0) in pages_of(arena)


def test_names_of_no_tenant_are_one_tenant() -> None:
    with made_arena() as arena:
        for number in range(4):
            put(arena, name(QUIET, number))
        for number in range(100):
            put(arena, f"vllm's own {number}")
        assert held(arena) == {QUIET: 4, 0: 8}


def test_writers_that_are_killed_leave_every_row_with_its_tenant(
    arena: Arena, arena_path: Path, python: Callable[..., object]
) -> None:
    for seed in range(4):
        child = python(CHURN_UNTIL_KILLED, arena_path, seed)
        assert child.stdout.readline() == "full\n"  # type: ignore[attr-defined]
        time.sleep(0.01 * seed)  # anywhere in its work
        child.kill()  # type: ignore[attr-defined]
        child.wait()  # type: ignore[attr-defined]
        arena.reserve("takes back what the dead hold", 60 * PAGE).abandon()  # type: ignore[union-attr]
        assert held(arena) == by_key(pages_of(arena))
    for number in range(40):
        put(arena, name(QUIET, number))
    assert held(arena)[QUIET] >= 16


CHURN_UNTIL_KILLED = """
import itertools, random, sys
from store.arena import Arena
arena, rng = Arena.attach(sys.argv[1]), random.Random(sys.argv[2])
for number in itertools.count():
    key = f"{rng.choice((5, 6, 7)):03x}-{rng.randrange(1 << 60):064x}"
    arena.put(key, bytes(rng.randrange(1, 4) * 4096), shape=(1,), dtype="uint8")
    if number == 100:
        print("full", flush=True)
"""
