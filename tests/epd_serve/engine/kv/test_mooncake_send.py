"""KV by Mooncake, P's end: which bytes go where, in which batches, and what a write that fails does."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_send import MooncakeSendSide
from epd_serve.engine.kv.regions import Layers, layers_of, pieces_of
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.plan import LayerPacket, Run
from tests.epd_serve.engine.kv.fakes import HOST, DecodeEnd, Ends, PrefillEnd, caches, chunk, key_of, same, shape
from tests.waiting import PATIENCE_S

BLOCKS = 16


class Engine:
    """Mooncake's calls, done at once. `status`: of every write."""

    def __init__(self, *, accepts: bool = True, status: int = 1) -> None:
        self.accepts, self.status = accepts, status
        self.batches: list[list[tuple[int, int, int]]] = []

    def batch_transfer_async_write(self, session: str, sources: list[int], targets: list[int], sizes: list[int]) -> int:
        self.batches.append(list(zip(sources, targets, sizes, strict=True)))
        if not self.accepts:
            return 0
        for source, target, size in self.batches[-1]:
            ctypes.memmove(target, source, size)
        return len(self.batches)

    def transfer_check_status(self, batch: int) -> int:
        return self.status


class Pair:
    """P's end and D's memory.

    Args:
        heads_axis: of caches with heads, of which D's worker is the first of two; else both have whole blocks.
    """

    def __init__(self, engine: Engine, kv: list[torch.Tensor], heads_axis: int | None = None) -> None:
        self.kv = kv
        heads = 0 if heads_axis is None else kv[0].shape[heads_axis]
        held = [part if heads_axis is None else part.narrow(heads_axis, 0, heads // 2) for part in kv]
        self.target = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in held]
        mine, theirs = (layers_of({str(i): part for i, part in enumerate(it)}, BLOCKS) for it in (kv, self.target))
        memory = torch.zeros(4096, dtype=torch.uint8)
        endpoint: Any = SimpleNamespace(engine=engine, scratch=(memory.data_ptr(), 4096))
        self.scratch = torch.zeros(2048, dtype=torch.uint8)
        self.side = MooncakeSendSide(mine, lambda: endpoint, "tcp", timeout_s=0.05)
        here, there = shape(mine, kv_heads_total=heads), shape(theirs, kv_heads_total=heads, tp=2 if heads else 1)
        bases = [region.data.data_ptr() for layer in theirs for region in layer]
        ack = wire.HelloAck("D0:1", "host:1", bases, (self.scratch.data_ptr(), 2048), there)
        self.side.opened(ack, pieces_of(here, there, sending=True))

    def move(self, first: int, last: int, *runs: Run) -> int:
        return self.side.move(LayerPacket(first, last, ((key_of("a"), runs),)), None, None)


def flat(layers: int = 3) -> list[torch.Tensor]:
    return list(caches(layers, BLOCKS, filled=True).values())


def test_runs_of_whole_blocks_are_one_write_each() -> None:
    engine = Engine()
    pair = Pair(engine, flat())
    assert pair.move(1, 3, Run(0, 4, 3), Run(9, 2, 1)) == 2 * 4 * 64
    (batch,) = engine.batches
    assert [size for _, _, size in batch] == [192, 64, 192, 64]
    assert not pair.target[0].any()
    assert torch.equal(pair.target[2][4:7], pair.kv[2][0:3])
    assert torch.equal(pair.target[2][2], pair.kv[2][9])


@pytest.mark.parametrize("axis", [1, 2])
def test_heads_go_where_they_lie_in_decodes_blocks(axis: int) -> None:
    """6 heads of 4 tokens. Axis 1: heads first, one write for each block; 2: tokens first, one for each token."""
    sizes = (BLOCKS, 6, 4, 2) if axis == 1 else (BLOCKS, 4, 6, 2)
    kv = torch.arange(BLOCKS * 48, dtype=torch.float32).reshape(sizes)
    engine = Engine()
    pair = Pair(engine, [kv], heads_axis=axis)
    pair.move(0, 1, Run(1, 5, 2))
    assert torch.equal(pair.target[0][5:7], kv.narrow(axis, 0, 3)[1:3])
    assert not pair.target[0][7:].any()
    assert len(engine.batches[0]) == (2 if axis == 1 else 8)


def test_no_batch_has_more_descriptors_than_mooncake_takes() -> None:
    engine = Engine()
    pair = Pair(engine, flat(200))
    pair.move(0, 200, *(Run(2 * i, 2 * i, 1) for i in range(8)))
    assert [len(batch) for batch in engine.batches] == [1024, 576]
    assert torch.equal(pair.target[199][14], pair.kv[199][14])


def test_probes_go_to_scratch_memory_and_are_as_large_as_both_ends_take() -> None:
    engine = Engine()
    pair = Pair(engine, flat())
    assert pair.side.largest_probe == 2048
    pair.side.probe(2048, None, None)
    ((_, target, size),) = engine.batches[0]
    assert (target, size) == (pair.scratch.data_ptr(), 2048)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(accepts=False), "did not accept"),
        (Engine(status=-1), "failed with status -1"),
        (Engine(status=0), "took longer than 0.05 s"),
    ],
)
def test_a_write_that_fails_ends_the_link(engine: Engine, said: str) -> None:
    with pytest.raises(LinkError, match=said):
        Pair(engine, flat()).move(0, 1, Run(0, 0, 1))


def test_a_write_that_took_too_long_may_land_until_mooncake_says_how_it_ended() -> None:
    engine = Engine(status=0)
    pair = Pair(engine, flat())
    assert not pair.side.may_land()
    with pytest.raises(LinkError):
        pair.move(0, 1, Run(0, 0, 1))
    assert pair.side.may_land()
    engine.status = -1
    assert not pair.side.may_land()


def test_a_write_of_which_mooncake_says_nothing_lands_within_the_time_that_decode_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MooncakeReceiveSide, "quarantine_s", 0.0)
    pair = Pair(Engine(status=0), flat())
    with pytest.raises(LinkError):
        pair.move(0, 1, Run(0, 0, 1))
    assert not pair.side.may_land()


def test_a_probe_that_took_too_long_keeps_no_transfer() -> None:
    """Probes go on as long as D has stopped: with each of them the time would begin anew."""
    pair = Pair(Engine(status=0), flat())
    with pytest.raises(LinkError):
        pair.side.probe(64, None, None)
    assert not pair.side.may_land()


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
        Pair(Engine(), flat()).side.opened(wire.HelloAck(**fields), None)


@pytest.mark.mooncake
def test_kv_arrives_over_tcp(start: Ends) -> None:
    ends: dict[str, MooncakeEndpoint] = {}

    def endpoint(name: str, layers: Layers) -> Any:
        ends[name] = MooncakeEndpoint(layers, "127.0.0.1", "tcp", HOST)
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
