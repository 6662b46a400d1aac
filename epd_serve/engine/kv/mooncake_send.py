"""KV by Mooncake, P's end: one-sided writes from P's registered KV cache into D's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epd_serve import wire
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_writes import Write, Writes
from epd_serve.engine.kv.regions import Layers, LinkPieces
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage
from epd_serve.kv.heads import copies
from epd_serve.kv.plan import LayerPacket, Run
from epd_serve.kv.slices import SLICE_BYTES
from epd_serve.wire import TransferKey


@dataclass(frozen=True)
class _Path:
    """From one region of P to the same one of D. `copies`: (offset here, offset there, bytes) in each block."""

    source: int
    target: int
    source_block: int
    target_block: int
    copies: tuple[tuple[int, int, int], ...]

    def writes(self, run: Run) -> Iterator[Write]:
        source = self.source + run.src * self.source_block
        target = self.target + run.dst * self.target_block
        if self.copies == ((0, 0, self.source_block),) and self.source_block == self.target_block:
            yield source, target, run.count * self.source_block
            return
        for block in range(run.count):
            for here, there, nbytes in self.copies:
                yield source + block * self.source_block + here, target + block * self.target_block + there, nbytes


class MooncakeSendSide:
    """P's end of one link.

    Args:
        endpoint: this worker's; may start at its first use, and raises LinkError where it cannot.
        protocol: Mooncake's.
    """

    name = "mooncake"
    shares_network = True
    largest_move = SLICE_BYTES

    def __init__(
        self, layers: Layers, endpoint: Callable[[], MooncakeEndpoint], protocol: str, timeout_s: float
    ) -> None:
        self.label = f"mooncake/{protocol}"
        self._layers = layers
        self._endpoint = endpoint
        self._writes = Writes(
            lambda: endpoint().engine, timeout_s, MooncakeReceiveSide.quarantine_s, lists=protocol == "ascend"
        )
        self._session = ""
        self._scratch = (0, 0)
        self._paths: list[list[_Path]] = []  # per layer, per region

    @property
    def largest_probe(self) -> int:
        return min(self._scratch[1], self._endpoint().scratch[1])

    def hello(self) -> tuple[str, int]:
        self._endpoint()
        return "", 0

    def opened(self, ack: wire.HelloAck, pieces: LinkPieces | None) -> None:
        if ack.session != self._session:
            self._writes.target_gone()  # another process answers where it was
        self._session, self._scratch = ack.session, ack.scratch
        regions = [(layer, place) for layer, found in enumerate(self._layers) for place in range(len(found))]
        if len(ack.bases) != len(regions) or not ack.session:
            raise LinkError(f"decode names {len(ack.bases)} regions of {len(regions)}, session {ack.session!r}")
        if not ack.scratch[1]:
            raise LinkError("decode offers no memory for probes")
        self._paths = [[] for _ in self._layers]
        for (layer, place), base in zip(regions, ack.bases, strict=True):
            self._paths[layer].append(self._path(layer, place, base, ack, pieces))

    def probe(self, nbytes: int, send: SendMessage, receive: AwaitMessage) -> None:
        scratch = self._endpoint().scratch[0]
        self._writes.run(self._session, [(scratch, self._scratch[0], nbytes)], harmless=True)

    def make_room(self, nbytes: int, receive: AwaitMessage) -> None:
        """D's memory is its own: nothing waits for a message of the peer."""

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        writes: list[Write] = [
            write
            for layer in self._paths[packet.first : packet.last]
            for path in layer
            for _, runs in packet.parts
            for run in runs
            for write in path.writes(run)
        ]
        self._writes.run(self._session, writes)
        return sum(nbytes for _, _, nbytes in writes)

    def staged(self, key: TransferKey) -> int:
        return 0

    def credit(self, seq: int) -> None:
        """Nothing is staged here."""

    def given_up(self) -> int:
        return self._writes.given_up

    def may_land(self, given_up: int) -> bool:
        return self._writes.may_land(given_up)

    def close(self) -> None:
        """The engine lives as long as the worker."""

    def _path(self, layer: int, place: int, base: int, ack: wire.HelloAck, pieces: LinkPieces | None) -> _Path:
        region = self._layers[layer][place]
        source, here = region.data.data_ptr(), region.block_bytes
        if pieces is None:
            return _Path(source, base, here, here, ((0, 0, here),))
        there = ack.shape["region_block_bytes"][layer][place]
        return _Path(source, base, here, there, tuple(copies(pieces.mine[layer][place], pieces.theirs[layer][place])))
