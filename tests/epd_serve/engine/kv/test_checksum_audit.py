"""Checksums at both ends of a transfer are equal exactly where what arrived is what was sent."""

from __future__ import annotations

import json
from pathlib import Path

from epd_serve.engine.kv.checksum_audit import RECEIVED, SENT, ChecksumAudit
from epd_serve.engine.kv.receiver import Expected
from epd_serve.engine.kv.regions import layers_of
from epd_serve.engine.kv.sender import ChunkJob
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import HOST, caches

LAYERS, BLOCKS = 3, 8
KEY = TransferKey("t", "r")


class Ends:
    """P with KV and D without, each with its audit."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = caches(LAYERS, BLOCKS, filled=True), caches(LAYERS, BLOCKS, filled=False)
        self._file = folder / "stamps.jsonl"
        trace = Trace(str(self._file), "P0")
        self.p, self.d = (ChecksumAudit(layers_of(kv, BLOCKS), HOST, trace) for kv in (self.here, self.there))

    def move(self, src: list[int], dst: list[int]) -> None:
        for here, there in zip(self.here.values(), self.there.values(), strict=True):
            there[dst] = here[src]

    def chunk(self, src: tuple[int, ...], dst: tuple[int, ...], remaining: int) -> None:
        self.p.computing([ChunkJob(KEY, "at-p", "D0:d1", ("ipc://D0",), src, dst, remaining)], ())
        self.p.computed()

    def sums(self, event: str) -> list[list[str]]:
        stamps = [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []
        return [stamp["sums"] for stamp in stamps if stamp["event"] == event]


def test_a_prompt_that_was_computed_in_chunks_is_audited_once_in_the_order_of_ds_blocks(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.move([2, 5, 3], [6, 1, 4])
    ends.chunk((2, 5), (6, 1), 16)
    assert ends.sums(SENT) == []
    ends.chunk((3,), (4,), 0)
    ends.d.received([Expected(KEY, "at-d", (6, 1, 4))])

    assert ends.sums(SENT) == ends.sums(RECEIVED)
    assert [len(one) for one in ends.sums(SENT)] == [LAYERS]


def test_a_layer_that_arrived_otherwise_is_told_from_the_others(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.move([2, 5], [6, 1])
    list(ends.there.values())[1][6].view(-1)[0] += 1
    ends.chunk((2, 5), (6, 1), 0)
    ends.d.received([Expected(KEY, "at-d", (6, 1))])

    (sent,), (received,) = ends.sums(SENT), ends.sums(RECEIVED)
    assert [one == other for one, other in zip(sent, received, strict=True)] == [True, False, True]


def test_of_a_transfer_that_was_given_up_nothing_is_kept(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.chunk((2, 5), (6, 1), 16)
    ends.p.computing([], ["at-p"])
    ends.chunk((3,), (4,), 0)
    ends.move([3], [4])
    ends.d.received([Expected(KEY, "at-d", (4,))])

    assert ends.sums(SENT) == ends.sums(RECEIVED)
