"""Where features lie in a slab: who goes for whom, and that nobody who is kept does."""

from __future__ import annotations

import itertools
import random

from epd_serve.engine.ec.slab_places import Place, SlabPlaces

UNIT = 512


def nobody(key: str) -> bool:
    return False


def placed(places: SlabPlaces, key: str, units: int, awaited: str = "") -> Place | None:
    return places.reserve(key, units * UNIT, lambda other: other in awaited)


def test_features_lie_beside_one_another_and_are_found_by_key() -> None:
    places = SlabPlaces(4 * UNIT)
    a, b = placed(places, "a", 1), placed(places, "b", 3)
    assert a is not None and b is not None and (a.offset, b.offset) == (0, UNIT)
    assert places.find("a") is a and places.find("c") is None


def test_a_feature_of_odd_size_starts_where_wide_copies_may() -> None:
    places = SlabPlaces(4 * UNIT)
    places.reserve("a", 1, nobody)
    b = places.reserve("b", UNIT + 1, nobody)
    assert b is not None and (b.offset, b.span) == (UNIT, 2 * UNIT)


def test_what_was_used_longest_ago_goes_first() -> None:
    places = SlabPlaces(3 * UNIT)
    a, *_ = placed(places, "a", 1), placed(places, "b", 1), placed(places, "c", 1)
    assert a is not None
    places.use(a)
    made = placed(places, "d", 1)
    assert made is not None and made.offset == UNIT and places.find("b") is None and places.find("a") is a


def test_neighbours_that_nothing_keeps_are_room_for_one_that_is_larger() -> None:
    places = SlabPlaces(4 * UNIT)
    for key in "abcd":
        placed(places, key, 1)
    made = placed(places, "e", 3, awaited="a")
    assert made is not None and made.offset == UNIT and {place.key for place in places} == {"a", "e"}


def test_what_is_left_of_the_room_is_room_again() -> None:
    places = SlabPlaces(4 * UNIT)
    placed(places, "a", 4)
    placed(places, "b", 1)
    assert places.fits(3 * UNIT, lambda key: key == "b") and placed(places, "c", 3, awaited="b") is not None


def test_nothing_that_is_kept_goes() -> None:
    places = SlabPlaces(4 * UNIT)
    copied, promised, cached, _ = (placed(places, key, 1) for key in "abcd")
    assert copied is not None and promised is not None and cached is not None
    copied.copying.add(0)
    promised.promised.add("r")
    cached.cached = True
    assert placed(places, "e", 1, awaited="d") is None and not places.fits(UNIT, lambda key: key == "d")
    copied.copying.discard(0)
    assert placed(places, "e", 2, awaited="d") is None, "not over what is kept beside it"
    assert placed(places, "e", 1, awaited="d") is not None and {place.key for place in places} == set("bcde")


def test_no_two_features_overlap_and_none_is_kept_in_vain() -> None:
    for seed in range(50):
        chance, places = random.Random(seed), SlabPlaces(32 * UNIT)
        for turn in range(200):
            made = placed(places, str(turn), chance.randint(1, 8))
            there = sorted(places, key=lambda place: place.offset)
            assert all(one.offset + one.span <= other.offset for one, other in itertools.pairwise(there))
            assert all(place.offset >= 0 and place.offset + place.span <= places.capacity for place in there)
            if made is not None:
                made.cached = chance.random() < 0.5
            for place in there:
                place.cached = place.cached and chance.random() < 0.9
        for place in places:
            place.cached = False
        assert placed(places, "all", 32) is not None
