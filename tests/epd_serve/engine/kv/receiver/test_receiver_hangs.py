"""D's listener ends the stage rather than die, or give back blocks to which its device may still write."""

from __future__ import annotations

import threading

import pytest

from epd_serve import wire
from epd_serve.engine import vital_thread
from epd_serve.engine.kv import receiver as receiver_module
from npu_ops import fences
from npu_ops.fences import DeviceHungError
from tests.epd_serve.engine.kv.receiver.ends import A, Decode, Link, Start
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


class OneThreadDevice(FakeDevice):
    """Lets in no thread but the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._maker = threading.get_ident()

    def enter_thread(self) -> None:
        if threading.get_ident() != self._maker:
            raise RuntimeError("no context for this thread")
        super().enter_thread()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(vital_thread, "end_stage", reasons.append)
    return reasons


def test_a_device_that_refuses_the_listener(start: Start, ended: list[str]) -> None:
    start(device=OneThreadDevice())
    wait_for(lambda: ended)
    assert "epd-kv-receiver failed: RuntimeError: no context" in ended[0]


def test_a_packet_whose_copy_never_ends(
    start: Start, link: Link, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    d = start(device=FakeDevice())
    p, gate = link(d), threading.Event()
    hang(d, gate, monkeypatch)
    monkeypatch.setattr(fences, "DEADLINE_S", 0.2)
    d.expect(A)
    p.say(p.stage([(A, [(1, 1)])]))
    wait_for(lambda: ended)
    assert "DeviceHungError" in ended[0]
    assert p.silent() and not d.poll(), "nothing says that the copy has ended"
    gate.set()


def test_blocks_are_not_given_back_under_a_copy_that_never_ends(
    start: Start, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = start(device=FakeDevice())
    p, gate = link(d), threading.Event()
    hang(d, gate, monkeypatch)
    monkeypatch.setattr(receiver_module, "HUNG_S", 0.2)
    d.expect(A)
    p.say(p.stage([(A, [(1, 1)])]))
    wait_for(lambda: d.receiver._copying.locked())
    d.receiver.expect([], [A])  # the scheduler has given it up
    with pytest.raises(DeviceHungError):
        d.poll()
    gate.set()
    assert p.hear() == wire.Credit(p.seq)
    assert d.wait_ended(A) == {A: False}


def hang(d: Decode, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    device = d.device
    assert isinstance(device, FakeDevice)
    monkeypatch.setattr(device, "upload", lambda target, source: device.run(gate.wait))
