"""A worker of D whose graphs are being captured answers, touches no device, and takes KV afterwards."""

from __future__ import annotations

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate
from tests.epd_serve.engine.kv.receiver.ends import A, Link, Start
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


def test_hello_is_refused_until_the_graphs_are_captured(start: Start, link: Link) -> None:
    device, gate = FakeDevice(), CaptureGate()
    gate.close()
    d = start(device=device, gate=gate)
    p = link(d, opened=False)
    with device.capturing():
        assert p.hello() == wire.HelloRefused(wire.STARTING)
        p.say(p.stage([(A, [(1, 1)])]))  # from somebody it has never accepted
        assert p.hear() == wire.Credit(p.seq)
    assert not device.broken
    gate.open()
    wait_for(lambda: isinstance(p.hello(), wire.HelloAck), "D, which has captured them")
    d.expect(A)
    p.packet([(A, [(2, 1)])])
    p.say(wire.Done(A, ok=True, packets=1))
    assert d.wait_ended(A) == {A: True}
    assert d.blocks(2).equal(p.blocks(2))
