"""How often a wanted feature is looked up."""

from __future__ import annotations

from epd_serve.engine.ec.lookups import RELOOK_FULL_S, RELOOK_REMOTE_S, RELOOK_S, Lookups


def test_here_often_and_afar_seldom() -> None:
    lookups = Lookups()
    assert lookups.local_due("a", 1.0) and lookups.remote_due("a", 1.0)
    assert not lookups.local_due("a", 1.0 + RELOOK_S / 2)
    assert lookups.local_due("a", 1.0 + RELOOK_S)
    assert not lookups.remote_due("a", 1.0 + RELOOK_S)
    assert lookups.remote_due("a", 1.0 + RELOOK_REMOTE_S)


def test_an_event_makes_a_key_due_at_once() -> None:
    lookups = Lookups()
    lookups.local_due("a", 1.0), lookups.remote_due("a", 1.0)
    lookups.hurry("a")
    assert lookups.local_due("a", 1.0) and not lookups.remote_due("a", 1.0)
    lookups.hurry("a", remote=True)
    assert lookups.remote_due("a", 1.0)


def test_without_room_it_is_tried_again_soon() -> None:
    lookups = Lookups()
    lookups.remote_due("a", 1.0)
    lookups.put_off("a", 1.0)
    assert not lookups.remote_due("a", 1.0)
    assert lookups.remote_due("a", 1.0 + RELOOK_FULL_S)


def test_what_is_not_wanted_any_more_is_forgotten() -> None:
    lookups = Lookups()
    lookups.local_due("a", 1.0), lookups.local_due("b", 1.0)
    lookups.forget_all_but({"b"})
    assert lookups.local_due("a", 1.0) and not lookups.local_due("b", 1.0)
