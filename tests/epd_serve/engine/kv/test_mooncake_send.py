"""KV by Mooncake, P's end: which bytes go where, and what a link that failed still owes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from epd_serve import wire
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.mooncake_writes import Write
from epd_serve.engine.kv.regions import Layers, flat_regions, layers_of, pieces_of
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.plan import LayerPacket, Run
from tests.epd_serve.engine.kv.fakes import (
    HOST,
    SCRATCH,
    DecodeEnd,
    Ends,
    PrefillEnd,
    caches,
    chunk,
    key_of,
    same,
    shape,
)
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork, Fault
from tests.waiting import PATIENCE_S

BLOCKS = 16


class Pair:
    """P's end and D's memory, joined by Mooncake over TCP.

    Args:
        heads_axis: of caches with heads, of which D's worker is the first of two; else both have whole blocks.

    Attributes:
        writes: (source, target, bytes) of all that was accepted.
    """

    def __init__(
        self, kv: list[torch.Tensor], heads_axis: int | None = None, fault: Fault = Fault.NONE, **network: Any
    ) -> None:
        self.kv = kv
        self.writes: list[Write] = []
        heads = 0 if heads_axis is None else kv[0].shape[heads_axis]
        held = [part if heads_axis is None else part.narrow(heads_axis, 0, heads // 2) for part in kv]
        self.target = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in held]
        mine, theirs = (layers_of({str(i): part for i, part in enumerate(it)}, BLOCKS) for it in (kv, self.target))
        self.network = FakeNetwork(seed=1, fault=lambda write: self.writes.append(write) or fault, **network)
        self.p, self.d = (
            MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "tcp", HOST, SCRATCH, self._engine)
            for layers in (mine, theirs)
        )
        self.side = MooncakeSendSide(mine, lambda: self.p, "tcp", timeout_s=0.05)
        here, there = shape(mine, kv_heads_total=heads), shape(theirs, kv_heads_total=heads, tp=2 if heads else 1)
        self.ack = wire.HelloAck("D0:1", self.d.session, self.d.bases, (self.d.scratch[0], 2048), there)
        self.side.opened(self.ack, pieces_of(here, there, sending=True))

    @property
    def engine(self) -> FakeTransferEngine:
        engine: FakeTransferEngine = self.p.engine
        return engine

    def move(self, first: int, last: int, *runs: Run) -> int:
        return self.side.move(LayerPacket(first, last, ((key_of("a"), runs),)), None, None)

    def _engine(self) -> FakeTransferEngine:
        return FakeTransferEngine(self.network, FakeDevice())


def flat(layers: int = 3) -> list[torch.Tensor]:
    return list(caches(layers, BLOCKS, filled=True).values())


def test_runs_of_whole_blocks_are_one_write_each() -> None:
    pair = Pair(flat())
    assert pair.move(1, 3, Run(0, 4, 3), Run(9, 2, 1)) == 2 * 4 * 64
    assert [size for _, _, size in pair.writes] == [192, 64, 192, 64]
    assert not pair.target[0].any()
    assert torch.equal(pair.target[2][4:7], pair.kv[2][0:3])
    assert torch.equal(pair.target[2][2], pair.kv[2][9])
    assert not pair.engine.unfreed


@pytest.mark.parametrize("axis", [1, 2])
def test_heads_go_where_they_lie_in_decodes_blocks(axis: int) -> None:
    """6 heads of 4 tokens. Axis 1: heads first, one write for each block; 2: tokens first, one for each token."""
    sizes = (BLOCKS, 6, 4, 2) if axis == 1 else (BLOCKS, 4, 6, 2)
    kv = torch.arange(BLOCKS * 48, dtype=torch.float32).reshape(sizes)
    pair = Pair([kv], heads_axis=axis)
    pair.move(0, 1, Run(1, 5, 2))
    assert torch.equal(pair.target[0][5:7], kv.narrow(axis, 0, 3)[1:3])
    assert not pair.target[0][7:].any()
    assert len(pair.writes) == (2 if axis == 1 else 8)


def test_probes_go_to_scratch_memory_and_are_as_large_as_both_ends_take() -> None:
    pair = Pair(flat())
    assert pair.side.largest_probe == 2048
    pair.side.probe(2048, None, None)
    ((_, target, size),) = pair.writes
    assert (target, size) == (pair.d.scratch[0], 2048)


def test_a_probe_that_took_too_long_keeps_no_transfer() -> None:
    """Probes go on as long as D has stopped: with each of them the time would begin anew."""
    pair = Pair(flat(), fault=Fault.LOST)
    with pytest.raises(LinkError):
        pair.side.probe(64, None, None)
    assert not pair.side.may_land(pair.side.given_up())


def test_what_failed_keeps_its_transfer_until_another_process_answers_in_the_place_of_decode() -> None:
    pair = Pair(flat(), fault=Fault.FAILS)
    with pytest.raises(LinkError):
        pair.move(0, 1, Run(0, 0, 1))
    pair.side.opened(pair.ack, None)
    assert pair.side.may_land(pair.side.given_up()), "the link was opened again, to the same process"
    pair.side.opened(replace(pair.ack, session="host:1"), None)
    assert not pair.side.may_land(pair.side.given_up())


def test_a_link_of_which_nothing_was_written_starts_no_engine_to_say_so() -> None:
    def refuses() -> MooncakeEndpoint:
        raise LinkError("no engine here")

    side = MooncakeSendSide((), refuses, "tcp", timeout_s=0.05)
    assert not side.may_land(side.given_up())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bases": [1]}, "1 regions of 3"),
        ({"session": ""}, "session ''"),
        ({"scratch": (0, 0)}, "no memory for probes"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(changes: dict[str, Any], said: str) -> None:
    fields = {"target": "D0:1", "session": "host:1", "bases": [1, 2, 3], "scratch": (1, 1), **changes}
    with pytest.raises(LinkError, match=said):
        Pair(flat()).side.opened(wire.HelloAck(**fields), None)


@pytest.mark.mooncake
def test_kv_arrives_over_tcp(start: Ends) -> None:
    ends: dict[str, MooncakeEndpoint] = {}

    def endpoint(name: str, layers: Layers) -> Any:
        ends[name] = MooncakeEndpoint(flat_regions(layers), "127.0.0.1", "tcp", HOST, HOST.allocate(4 << 20))
        return lambda: ends[name]

    d = start(DecodeEnd, sides=[])
    d.receiver._sides["mooncake"] = MooncakeReceiveSide(endpoint("D", d.layers))
    p = start(
        PrefillEnd,
        sides=lambda layers, path: [MooncakeSendSide(layers, endpoint("P", layers), "tcp", timeout_s=PATIENCE_S)],
    )
    link = p.wait_up(d)
    d.expect(key_of("a"), range(20, 24))
    p.step([chunk(d, "a", [3, 2, 1], [20, 21, 22], last=False)])
    p.step([chunk(d, "a", [9], [23], last=True)], finished=["a"])
    d.wait_ended(1)
    assert d.received
    same(p, d, {3: 20, 2: 21, 1: 22, 9: 23})
    assert link.snapshot().transport == "mooncake/tcp"
