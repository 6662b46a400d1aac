"""Which transfers of a link may still be sent."""

from __future__ import annotations

from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.link_transfers import ActiveTransfers
from tests.epd_serve.engine.kv.fakes import key_of


def out(name: str, target: str = "D0:1") -> Outgoing:
    return Outgoing(key_of(name), name, target)


def test_a_lost_connection_breaks_what_was_on_it_and_nothing_else() -> None:
    transfers, on_it, ended, queued = ActiveTransfers(), out("a"), out("b"), out("c")
    transfers.know([on_it, ended, queued], 0.0)
    transfers.sent({on_it.key, ended.key})
    transfers.done(ended.key)
    transfers.connection_lost()
    assert transfers.living([on_it, ended, queued]) == [ended, queued]


def test_an_attempt_breaks_only_those_that_waited_for_all_of_it() -> None:
    transfers, early, late = ActiveTransfers(), out("a"), out("b")
    transfers.know([early], 1.0)
    transfers.know([early, late], 3.0)
    assert transfers.unreachable(since=2.0)
    assert transfers.living([early, late]) == [late]
    transfers.over(early.key)
    assert not transfers.unreachable(since=2.0)


def test_transfers_of_a_former_life_break_when_another_answers() -> None:
    transfers, old, new = ActiveTransfers(), out("a", "D0:1"), out("b", "D0:2")
    transfers.answered("D0:1")
    assert transfers.living([old, new]) == [old, new]
    transfers.answered("D0:2", wanted="D0:2")
    assert transfers.living([old, new]) == [new]


def test_a_life_that_was_wanted_and_does_not_answer_is_gone() -> None:
    transfers, wanted = ActiveTransfers(), out("a", "D0:1")
    transfers.answered("D0:2", wanted="D0:1")
    assert transfers.living([wanted]) == []
