"""The device memory that packets pass through: bounded, and one packet's at a time."""

from __future__ import annotations

import threading

import pytest

from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.transport import LinkError
from tests.epd_serve.engine.kv.fakes import HOST
from tests.waiting import PATIENCE_S


def test_more_than_there_is_is_an_error_of_the_link_and_takes_nothing() -> None:
    memory = PacketMemory(HOST, 64)
    with pytest.raises(LinkError, match="65 bytes at once, where packets pass through 64"), memory.borrow(65):
        raise AssertionError
    with memory.borrow(64) as whole:
        assert whole.numel() == 64


def test_links_of_one_worker_have_it_one_after_the_other() -> None:
    memory = PacketMemory(HOST, 64)
    borrowed = threading.Event()

    def another() -> None:
        with memory.borrow(8) as bytes_:
            assert bytes_.eq(7).all()
            borrowed.set()

    thread = threading.Thread(target=another)
    with memory.borrow(64) as mine:
        thread.start()
        assert not borrowed.wait(0.05)
        mine.fill_(7)
    assert borrowed.wait(PATIENCE_S)
    thread.join()
