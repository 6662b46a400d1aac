"""D's worker against a hand-driven P worker: real sockets, real shared memory, no vLLM."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from epd_serve import wire
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import layers_of, shape_of
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.kv.faults import Faults, here_of
from epd_serve.kv.slices import SLICE_BYTES
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.fake.device import FakeDevice
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from tests.epd_serve.engine.kv.slow_devices import SlowDevice
from tests.waiting import PATIENCE_S, wait_for

BLOCKS, LAYERS, BLOCK_SIZE, HEADS, DIM = 8, 3, 4, 2, 4
BLOCK_BYTES = BLOCK_SIZE * HEADS * DIM
STAGING = 1 << 16
A, B = TransferKey("t-a", "a"), TransferKey("t-b", "b")
Runs = list[tuple[int, int]]


class Decode:
    """A D worker with K and V apart, of [blocks, block_size, heads, dim] uint8, on some device."""

    def __init__(
        self,
        folder: Path,
        *,
        device: DeviceMemory | None = None,
        faults: str = "",
        one_sided: bool = False,
        tp: int = 1,
        trace: str = "",
    ) -> None:
        self.device = device or HostMemory()
        self.device.enter_thread()
        self.endpoint = f"ipc://{folder}/D0.kvw0"
        shape = (BLOCKS, BLOCK_SIZE, HEADS // tp, DIM)
        self.caches = {f"{i}": (self._zeros(shape), self._zeros(shape)) for i in range(LAYERS)}
        layers = layers_of(self.caches, BLOCKS)
        self.side = ShmReceiveSide(layers, self.device, PacketMemory(self.device, SLICE_BYTES))
        self.receiver = Receiver(
            self.endpoint,
            "D0:1",
            shape_of_rank(layers, tp, 0),
            [self.side, MooncakeReceiveSide(NoEngine)] if one_sided else [self.side],  # type: ignore[arg-type]
            Trace(trace, "D0"),
            device=self.device,
            faults=Faults(faults),
        )
        self.ended: dict[TransferKey, bool] = {}

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        data = self.device.allocate(size).data
        data.zero_()
        return data.view(shape)

    def expect(self, *keys: TransferKey) -> None:
        self.receiver.expect([Expected(key, f"at-d-{key.child}", (1,)) for key in keys], [])

    def poll(self) -> dict[TransferKey, bool]:
        """What has ended so far: whether it was received."""
        received, failed = self.receiver.take_finished(idle=True)
        for items, ok in ((received, True), (failed, False)):
            for item in items:
                assert item.key not in self.ended, "reported twice"
                self.ended[item.key] = ok
        return self.ended

    def wait_ended(self, *keys: TransferKey) -> dict[TransferKey, bool]:
        wait_for(lambda: set(keys) <= set(self.poll()))
        return self.ended

    def blocks(self, block: int) -> torch.Tensor:
        """All layers' K and V of one block."""
        return torch.stack([part[block] for kv in self.caches.values() for part in kv])


class NoEngine:
    """A Mooncake endpoint as far as a hello needs one."""

    session, bases, scratch = "10.0.0.4:15001", [4096, 8192], (1 << 21, 4 << 20)


def shape_of_rank(layers: Any, tp: int, rank: int) -> dict[str, Any]:
    agreed = {"names": "x" * len(layers), "block_size": BLOCK_SIZE, "dtype": "uint8", "platform": "test"}
    return shape_of(layers, **agreed, tp=tp, rank=rank, kv_heads_total=HEADS)


class Prefill:
    """A P worker's link, message by message. `kv[layer, part, block]` is what its staged packets carry."""

    def __init__(self, decode: Decode, path: Path, *, rank: int = 0, tp: int = 1, life: str = "P0:1") -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(decode.endpoint)
        self.path, self.life = path, life
        path.write_bytes(bytes(STAGING))
        self.staging = torch.from_file(str(path), shared=True, size=STAGING, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(7 + rank)
        size = (LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS // tp, DIM)
        self.kv = torch.randint(1, 255, size, dtype=torch.uint8, generator=generator)
        empty = layers_of({f"{i}": (self.kv[i, 0], self.kv[i, 1]) for i in range(LAYERS)}, BLOCKS)
        self.shape = shape_of_rank(empty, tp, rank)
        self._numbers = itertools.count(1)
        self.seq = 0

    def say(self, message: Any) -> None:
        self.socket.send(wire.encode(message))

    def hear(self, timeout_s: float = PATIENCE_S) -> wire.ToPrefillWorker:
        assert self.socket.poll(int(timeout_s * 1000)), "D is silent"
        return wire.to_prefill_worker.decode(self.socket.recv())

    def silent(self, for_s: float = 0.05) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def hello(self, transport: str = "shm", **changes: Any) -> wire.ToPrefillWorker:
        fields = {"version": wire.VERSION, "source": self.life, "transport": transport, "shape": self.shape}
        if transport == "shm":
            fields |= {"staging": str(self.path), "staging_bytes": STAGING}
        self.say(wire.Hello(**{**fields, **changes}))
        return self.hear()

    def stage(self, parts: list[tuple[TransferKey, Runs]], layers: tuple[int, int] = (0, LAYERS)) -> wire.Packet:
        """Puts P's blocks, whose numbers are D's, into the staging memory."""
        self.seq = next(self._numbers)
        carried = [
            self.kv[layer, part, first : first + count].reshape(-1)
            for layer in range(*layers)
            for part in range(2)
            for _, runs in parts
            for first, count in runs
        ]
        data = torch.cat(carried)
        offset = 4096 * (self.seq % 4)
        self.staging[offset : offset + data.numel()] = data
        return wire.Packet(self.seq, offset, layers, parts)

    def packet(self, parts: list[tuple[TransferKey, Runs]], layers: tuple[int, int] = (0, LAYERS)) -> None:
        """A packet, taken."""
        self.say(self.stage(parts, layers))
        assert self.hear() == wire.Credit(self.seq)

    def blocks(self, block: int) -> torch.Tensor:
        return self.kv[:, :, block].reshape(-1, *self.kv.shape[3:])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Decode]]:
    started: list[Decode] = []

    def make(**options: Any) -> Decode:
        started.append(Decode(tmp_path, **options))
        return started[-1]

    yield make
    for decode in started:
        decode.receiver.close()
        assert not getattr(decode.device, "broken", [])


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Callable[..., Prefill]]:
    """P workers; by default their hello has been accepted."""
    made: list[Prefill] = []

    def make(decode: Decode, *, opened: bool = True, **options: Any) -> Prefill:
        made.append(Prefill(decode, tmp_path / f"staging-{len(made)}", **options))
        if opened:
            assert isinstance(made[-1].hello(), wire.HelloAck)
        return made[-1]

    yield make
    for prefill in made:
        prefill.socket.close()


Start = Callable[..., Decode]
Link = Callable[..., Prefill]


# --- packets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [HostMemory, lambda: FakeDevice(latency_s=0.002)], ids=["cpu", "fake"])
def test_parts_of_several_transfers_land_in_their_blocks_before_the_credit(
    start: Start, link: Link, device: Callable[[], DeviceMemory]
) -> None:
    d = start(device=device())
    p = link(d)
    d.expect(A, B)
    p.packet([(A, [(1, 2), (6, 1)]), (B, [(4, 1)])], (0, 2))
    assert torch.equal(d.blocks(6)[:4], p.blocks(6)[:4])  # the credit has come, so all has arrived
    p.packet([(A, [(1, 2), (6, 1)]), (B, [(4, 1)])], (2, 3))
    for block in range(BLOCKS):
        wanted = p.blocks(block) if block in (1, 2, 4, 6) else torch.zeros_like(p.blocks(block))
        assert torch.equal(d.blocks(block), wanted)
    p.say(wire.Done(A, True, packets=2))
    p.say(wire.Done(B, True, packets=2))
    assert d.wait_ended(A, B) == {A: True, B: True}


def test_a_packet_that_comes_twice_is_obeyed_once_and_credited_twice(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    packet = p.stage([(A, [(1, 1)])])
    p.say(packet)
    assert p.hear() == wire.Credit(packet.seq)
    p.staging.fill_(9)  # the credit gave it back
    p.say(packet)
    assert p.hear() == wire.Credit(packet.seq)
    assert torch.equal(d.blocks(1), p.blocks(1))
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


def test_a_packet_that_was_overtaken_is_not_written_and_fails_its_transfer(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    late = p.stage([(A, [(1, 1)])])
    p.packet([(A, [(2, 1)])])
    p.say(late)
    assert p.hear() == wire.Credit(late.seq)
    p.say(wire.Done(A, True, packets=2))
    assert d.wait_ended(A) == {A: False}
    assert not d.blocks(1).any()


@pytest.mark.parametrize("packets", [0, 1, 3])
def test_a_transfer_with_another_number_of_packets_than_were_sent_fails(start: Start, link: Link, packets: int) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.packet([(A, [(1, 1)]), (B, [(2, 1)])], (0, 2))
    p.packet([(A, [(1, 1)]), (B, [(2, 1)])], (2, 3))
    p.say(wire.Done(A, True, packets=packets))
    p.say(wire.Done(B, True, packets=2))
    assert d.wait_ended(A, B) == {A: False, B: True}


def test_only_the_part_of_a_transfer_that_is_over_is_dropped(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.say(wire.Done(A, False, "cancelled"))
    assert d.wait_ended(A) == {A: False}
    p.packet([(A, [(1, 1)]), (B, [(2, 1)]), (A, [(3, 1)])])
    assert not d.blocks(1).any() and not d.blocks(3).any()
    assert torch.equal(d.blocks(2), p.blocks(2))
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B)[B]


def bad_packets() -> list[wire.Packet]:
    good = wire.Packet(1, 0, (0, 1), [(A, [(1, 1)])])
    fields = {name: getattr(good, name) for name in ("seq", "offset", "layers", "parts")}
    changes: list[dict[str, Any]] = [
        {"offset": -1},
        {"offset": STAGING - 1},
        {"layers": (0, LAYERS + 1)},
        {"layers": (2, 2)},
        {"layers": (-1, 1)},
        {"parts": [(A, [(BLOCKS, 1)])]},
        {"parts": [(A, [(BLOCKS - 1, 2)])]},
        {"parts": [(A, [(-1, 1)])]},
        {"parts": [(A, [(1, 0)])]},
        {"parts": [(A, [(1, -1), (1, 2)])]},
        {"parts": [(A, [(0, 8)] * 1000)]},
    ]
    return [wire.Packet(**{**fields, **change}) for change in changes]


@pytest.mark.parametrize("packet", bad_packets())
def test_a_packet_outside_of_what_is_ours_fails_its_transfer_and_no_other(
    start: Start, link: Link, packet: wire.Packet
) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.staging.fill_(9)
    p.say(packet)
    assert p.hear() == wire.Credit(1)
    assert d.wait_ended(A) == {A: False}
    assert not any(d.blocks(block).any() for block in range(BLOCKS))
    p.seq = next(p._numbers)
    p.packet([(B, [(2, 1)])])
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B) == {A: False, B: True}


def test_a_device_that_refuses_to_write_fails_the_transfer_and_not_the_listener(
    start: Start, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    device = HostMemory()
    d = start(device=device)
    p = link(d)
    d.expect(A, B)

    def lost(rows: object, runs: object, source: object) -> None:
        raise RuntimeError("device lost")

    device.scatter = lost  # type: ignore[method-assign]
    p.packet([(A, [(1, 1)])])
    assert d.wait_ended(A) == {A: False}
    assert "RuntimeError: device lost" in caplog.text
    del device.scatter  # type: ignore[method-assign]
    p.packet([(B, [(2, 1)])])
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B)[B]


def test_a_failure_is_not_reported_while_a_packet_of_it_is_on_its_way_into_the_device(start: Start, link: Link) -> None:
    device = SlowDevice("host0/npu0")
    device.copies_late = True
    d = start(device=device)
    p = link(d)
    d.expect(A)
    device.turnstile.close()
    p.say(p.stage([(A, [(1, 1)])]))
    wait_for(lambda: device.stuck)
    d.receiver.expect([], [A])
    seen: list[tuple[dict[TransferKey, bool], torch.Tensor]] = []
    reporter = threading.Thread(target=lambda: seen.append((d.poll(), d.blocks(1).clone())))
    reporter.start()
    reporter.join(0.05)
    assert not seen  # the blocks may not be given back yet
    device.turnstile.open()
    reporter.join(PATIENCE_S)
    ((ended, before),) = seen
    assert ended == {A: False}
    assert p.hear() == wire.Credit(1)
    assert torch.equal(d.blocks(1), before) and torch.equal(before, p.blocks(1))  # whole, and nothing came later


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_of_half_the_heads_writes_its_half_of_every_block(start: Start, link: Link, rank: int) -> None:
    d = start()
    p = link(d, tp=2, rank=rank)
    d.expect(A)
    p.packet([(A, [(3, 2)])])
    got = torch.stack([torch.stack([part[3:5] for part in kv]) for kv in d.caches.values()])
    assert torch.equal(got[..., rank : rank + 1, :], p.kv[:, :, 3:5])
    assert not got[..., 1 - rank, :].any()
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A)[A]


# --- the end of a transfer --------------------------------------------------------------------------------------------


def test_a_transfer_of_two_workers_ends_when_both_have_said_so(start: Start, link: Link) -> None:
    d = start()
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.packet([(A, [(1, 1)])])
    for _ in range(3):  # duplicates count once
        one.say(wire.Done(A, True, packets=1, senders=2))
    one.packet([(B, [(5, 1)])])  # the Dones before it have been read
    assert not d.poll()
    two.packet([(A, [(1, 1)])])
    two.say(wire.Done(A, True, packets=1, senders=2))
    assert d.wait_ended(A) == {A: True}
    got = d.blocks(1)
    assert torch.equal(got[:, :, :1], one.blocks(1)) and torch.equal(got[:, :, 1:], two.blocks(1))


def test_a_transfer_of_which_one_worker_failed_fails_when_the_other_has_stopped(start: Start, link: Link) -> None:
    d = start()
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.say(wire.Done(A, False, "device lost", senders=2))
    one.packet([(B, [(5, 1)])])
    assert not d.poll()
    two.packet([(A, [(1, 1)])])
    two.say(wire.Done(A, True, packets=1, senders=2))
    assert d.wait_ended(A) == {A: False}


def test_the_same_worker_over_two_connections_is_one_sender(start: Start, link: Link) -> None:
    d = start()
    first = link(d, tp=2)
    d.expect(A)
    first.say(wire.Done(A, True, senders=2))
    first.packet([(B, [(5, 1)])])
    again = link(d, tp=2)
    again.say(wire.Done(A, True, senders=2))
    again.packet([(B, [(5, 1)])])
    assert not d.poll()


def test_done_over_a_connection_that_never_said_hello_fails_its_transfer(start: Start, link: Link) -> None:
    d = start()
    stranger = link(d, opened=False)
    d.expect(A)
    stranger.say(wire.Done(A, True))
    assert d.wait_ended(A) == {A: False}


def test_a_lost_packet_where_others_may_write_without_help_waits_for_their_done(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    p = link(d)
    d.expect(A)
    p.say(wire.Packet(1, -1, (0, 1), [(A, [(1, 1)])]))
    assert p.hear() == wire.Credit(1)
    assert not d.poll()
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: False}


def test_done_is_stamped_when_it_ended_the_transfer(start: Start, link: Link, tmp_path: Path) -> None:
    d = start(trace=str(tmp_path / "trace"))
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.say(wire.Done(A, True, senders=2))
    two.say(wire.Done(A, True, senders=2))
    d.wait_ended(A)
    stamps = [line for file in tmp_path.glob("trace*") for line in file.read_text().splitlines() if "kv_done" in line]
    assert len(stamps) == 1 and "t-a" in stamps[0]


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_who_answers_and_the_shape(start: Start, link: Link) -> None:
    d = start()
    ack = link(d, opened=False).hello()
    assert isinstance(ack, wire.HelloAck)
    assert (ack.target, ack.session, ack.bases, ack.scratch) == ("D0:1", "", [], (0, 0))
    assert ack.shape["tp"] == 1 and ack.shape["head_rows"] == [[BLOCK_SIZE] * 2] * LAYERS


def test_prefill_chooses_among_the_transports_of_decode(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    p = link(d, opened=False)
    ack = p.hello("mooncake")
    assert isinstance(ack, wire.HelloAck)
    assert (ack.session, ack.bases, ack.scratch) == (NoEngine.session, NoEngine.bases, NoEngine.scratch)
    p.say(wire.Probe(1, 0, 100))
    assert p.hear() == wire.HelloRefused("a staged probe on a Mooncake link")
    assert isinstance(p.hello("shm"), wire.HelloAck)  # on the same connection
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


def test_several_links_of_different_transports_work_side_by_side(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    one, two = link(d, tp=2, rank=0), link(d, tp=2, rank=1, opened=False)
    assert isinstance(two.hello("mooncake"), wire.HelloAck)
    d.expect(A)
    one.packet([(A, [(1, 1)])])
    one.say(wire.Done(A, True, packets=1, senders=2))
    two.say(wire.Done(A, True, packets=0, senders=2))
    assert d.wait_ended(A) == {A: True}


def test_a_hello_that_comes_twice_changes_nothing(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    assert isinstance(p.hello(), wire.HelloAck)
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, f"version: {wire.VERSION} here, 2 there"),
        ({"transport": "mooncake"}, "transport: shm here, mooncake there"),
        ({"staging": "/nowhere"}, "staging memory /nowhere cannot be opened"),
        ({"staging_bytes": STAGING * 2}, "cannot be mapped"),
        ({"staging_bytes": -1}, "cannot be mapped"),
    ],
)
def test_a_hello_that_cannot_be_accepted_says_why(start: Start, link: Link, changes: dict[str, Any], said: str) -> None:
    answer = link(start(), opened=False).hello(**changes)
    assert isinstance(answer, wire.HelloRefused) and said in answer.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bf16"}, "dtype: 'uint8' here, 'bf16' there"),
        ({"tp": 2}, "tp: 1 here, 2 there"),
        ({"rank": 1}, "rank: 0 here, 1 there"),
        ({"tp": "2"}, "tp: 1 here, '2' there"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(
    start: Start, link: Link, changes: dict[str, Any], said: str
) -> None:
    p = link(start(), opened=False)
    answer = p.hello(shape={**p.shape, **changes})
    assert isinstance(answer, wire.HelloRefused) and said in answer.reason


@pytest.mark.parametrize("life", ["P0:1", "P0:2"])
def test_a_reconnected_sender_replaces_its_former_connection(start: Start, link: Link, life: str) -> None:
    d = start()
    former = link(d)
    later = link(d, opened=False, life=life)
    assert isinstance(later.hello(staging=str(former.path)), wire.HelloAck)
    d.expect(A)
    former.say(former.stage([(A, [(1, 1)])]))
    assert d.wait_ended(A) == {A: False}
    assert len(d.side._senders) == len(d.receiver._peers) == 1


def test_staging_memory_of_a_gone_sender_stays_readable_until_it_comes_back(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    os.unlink(p.path)  # as P does when it stops
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    assert torch.equal(d.blocks(1), p.blocks(1))


@pytest.mark.parametrize("device", [HostMemory, lambda: FakeDevice(latency_s=0.002)], ids=["cpu", "fake"])
@pytest.mark.parametrize("nbytes", [1, 4096, STAGING])
def test_a_probe_is_copied_to_memory_of_no_meaning_and_credited(
    start: Start, link: Link, device: Callable[[], DeviceMemory], nbytes: int
) -> None:
    d = start(device=device())
    p = link(d)
    p.staging.fill_(5)
    p.say(wire.Probe(7, STAGING - nbytes, nbytes))
    assert p.hear() == wire.Credit(7)
    with d.side._memory.borrow(nbytes) as memory:
        assert memory.eq(5).all()
    assert not any(d.blocks(block).any() for block in range(BLOCKS))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 0), (0, -5), (1, STAGING)])
def test_a_probe_outside_of_the_staging_memory_is_refused(start: Start, link: Link, offset: int, nbytes: int) -> None:
    p = link(start())
    p.say(wire.Probe(1, offset, nbytes))
    answer = p.hear()
    assert isinstance(answer, wire.HelloRefused) and "outside of the staging memory" in answer.reason


def test_a_stranger_is_not_probed(start: Start, link: Link) -> None:
    p = link(start(), opened=False)
    p.say(wire.Probe(1, 0, 10))
    assert p.hear() == wire.HelloRefused("a packet from a peer that has not said hello")


# --- faults -----------------------------------------------------------------------------------------------------------


def test_answers_meet_the_faults_that_are_asked_for(start: Start, link: Link) -> None:
    d = start(faults="drop=HelloRefused:1;double=Credit:1;delay=HelloAck:0.05s")
    p = link(d, opened=False)
    began = time.monotonic()
    assert isinstance(p.hello(), wire.HelloAck)
    assert time.monotonic() - began >= 0.05
    p.say(wire.Probe(3, 0, 10))
    assert (p.hear(), p.hear()) == (wire.Credit(3), wire.Credit(3))
    p.say(wire.Probe(4, -1, 10))
    assert p.silent()


def test_an_answer_is_delayed_without_holding_up_the_others(start: Start, link: Link) -> None:
    d = start(faults="delay=Credit:3600s")
    p = link(d)
    d.expect(A)
    p.say(p.stage([(A, [(1, 1)])]))
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}
    assert p.silent()


def test_done_can_be_met_before_it_is_reported(start: Start, link: Link, tmp_path: Path) -> None:
    armed = tmp_path / "received"
    armed.write_text("1")
    d = start(faults=f"pause=received:{armed}")
    p = link(d)
    d.expect(A)
    p.say(wire.Done(A, True))
    wait_for(here_of(armed).exists)
    assert not d.poll()
    here_of(armed).unlink()
    assert d.wait_ended(A) == {A: True}
