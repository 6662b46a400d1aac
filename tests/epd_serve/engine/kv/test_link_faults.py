"""Messages of a link that are lost, late or doubled on purpose, and the moments at which a test may stop it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from epd_serve.kv.faults import Faults, here_of
from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends, PrefillEnd, chunk, key_of, same
from tests.waiting import wait_for


def ends(start: Ends, faults: str, **options: object) -> tuple[DecodeEnd, PrefillEnd]:
    d = start(DecodeEnd)
    return d, start(PrefillEnd, link_options={"faults": Faults(faults)}, **options)


def test_a_packet_that_is_lost_fails_its_transfer(start: Ends) -> None:
    d, p = ends(start, "drop=Packet:1")
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    d.wait_ended(1)
    assert d.failed
    p.wait_over({"a"})


@pytest.mark.parametrize("message", ["Packet", "Done", "Hello"])
def test_what_arrives_twice_counts_once(start: Ends, message: str) -> None:
    d, p = ends(start, f"double={message}:1")
    for name, block in (("a", 5), ("b", 6)):
        d.expect(key_of(name), [block])
        p.step([chunk(d, name, [block], [block], last=True)], finished=[name])
    d.wait_ended(2)
    assert len(d.received) == 2
    same(p, d, {5: 5, 6: 6})
    p.wait_over({"a", "b"})


def test_a_done_that_is_late_still_ends_its_transfer(start: Ends) -> None:
    d, p = ends(start, "delay=Done:0.1s")
    d.expect(key_of("a"), [5])
    began = time.monotonic()
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    assert d.received
    assert time.monotonic() - began >= 0.1


def test_a_done_that_is_late_holds_up_no_packet(start: Ends) -> None:
    d, p = ends(start, "delay=Done:3600s")
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    d.expect(key_of("a"), [5])
    d.expect(key_of("b"), [6])
    p.step([chunk(d, "b", [2], [6], last=True)])
    wait_for(lambda: bool(d.caches["layer.4"][6].any()))
    assert not d.poll()


@pytest.mark.parametrize(("point", "arrived"), [("packet", False), ("done", True)])
def test_a_link_can_be_stopped_before_a_packet_and_before_done(
    start: Ends, tmp_path: Path, point: str, arrived: bool
) -> None:
    armed = tmp_path / "armed"
    armed.write_text("1")
    d, p = ends(start, f"pause={point}:{armed}", grouping=5)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    wait_for(here_of(armed).exists)
    if arrived:
        wait_for(lambda: bool(d.caches["layer.4"][5].any()))
    assert bool(d.caches["layer.0"][5].any()) is arrived
    assert not d.poll()
    here_of(armed).unlink()
    d.wait_ended(1)
    assert d.received
