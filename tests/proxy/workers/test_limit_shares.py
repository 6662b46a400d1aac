"""What each of several proxy processes may do."""

from __future__ import annotations

from proxy.config.limits import AdmissionLimits, KeyLimits
from proxy.workers.wire import share_of
from tests.proxy.fakes import settings


def test_limits_that_each_counts_are_divided_and_rounded_up() -> None:
    each = share_of(settings(max_in_flight=10, key_limits=KeyLimits(4, 1)), 3)
    assert each.max_in_flight == 4
    assert each.key_limits == KeyLimits(2, 1)
    assert share_of(settings(key_limits=KeyLimits(10, 61)), 4).key_limits == KeyLimits(3, 16)
    assert share_of(settings(admission=AdmissionLimits(text_queue=3)), 3).admission.text_queue == 1
    assert each.processes == 3


def test_no_limit_stays_none_and_what_is_no_limit_stays_as_it_is() -> None:
    whole = settings(key_limits=KeyLimits(0, 0, best_priority=0))
    each = share_of(whole, 3)
    assert each.key_limits == KeyLimits(0, 0, best_priority=0)
    assert each.media == whole.media
    assert each.timeouts == whole.timeouts


def test_of_one_process_nothing_changes() -> None:
    assert share_of(settings(), 1) == settings()
