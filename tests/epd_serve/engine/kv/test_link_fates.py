"""Which transfers of a link may still be sent."""

from __future__ import annotations

from epd_serve.engine.kv.link_fates import Fates
from epd_serve.engine.kv.link_jobs import Outgoing
from tests.epd_serve.engine.kv.fakes import key_of


def out(name: str, target: str = "D0:1") -> Outgoing:
    return Outgoing(key_of(name), name, target)


def test_a_lost_connection_breaks_what_was_on_it_and_nothing_else() -> None:
    fates, on_it, ended, queued = Fates(), out("a"), out("b"), out("c")
    fates.know([on_it, ended, queued], 0.0)
    fates.sent({on_it.key, ended.key})
    fates.done(ended.key)
    fates.connection_lost()
    assert fates.living([on_it, ended, queued]) == [ended, queued]


def test_an_attempt_breaks_only_those_that_waited_for_all_of_it() -> None:
    fates, early, late = Fates(), out("a"), out("b")
    fates.know([early], 1.0)
    fates.know([early, late], 3.0)
    assert fates.unreachable(since=2.0)
    assert fates.living([early, late]) == [late]
    fates.over(early.key)
    assert not fates.unreachable(since=2.0)


def test_transfers_of_a_former_life_break_when_another_answers() -> None:
    fates, old, new = Fates(), out("a", "D0:1"), out("b", "D0:2")
    fates.answered("D0:1")
    assert fates.living([old, new]) == [old, new]
    fates.answered("D0:2", wanted="D0:2")
    assert fates.living([old, new]) == [new]


def test_a_life_that_was_wanted_and_does_not_answer_is_gone() -> None:
    fates, wanted = Fates(), out("a", "D0:1")
    fates.answered("D0:2", wanted="D0:1")
    assert fates.living([wanted]) == []
