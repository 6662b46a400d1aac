"""Writes of a Mooncake link, on an engine as harsh as the library: none is taken for done, or forgotten, too early."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from epd_serve.engine.kv.mooncake_writes import UNDER_WAY, Write, Writes
from epd_serve.engine.kv.transport import LinkError
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork, Fault

TIMEOUT_S, QUARANTINE_S = 1.0, 30.0
BLOCK, BLOCKS = 16, 2048


class Ends:
    """Two engines on one virtual clock: while the link sleeps, the engine works. Blocks of 16 bytes at each end.

    Args:
        chance: decides how many tasks run in one sleep, and which late ones land; None: all that wait, and none.
    """

    def __init__(self, chance: random.Random | None = None, **network: object) -> None:
        self.now = 0.0
        self._chance = chance
        self.network = FakeNetwork(by_hand=True, **network)
        self.source, self.target = (torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8) for _ in range(2))
        self.p, self.d = (FakeTransferEngine(self.network, FakeDevice()) for _ in range(2))
        for engine, memory in ((self.p, self.source), (self.d, self.target)):
            engine.initialize("host", "P2PHANDSHAKE", "tcp", "")
            engine.register_memory(memory.data_ptr(), memory.numel())
        self.session = f"host:{self.d.get_rpc_port()}"
        self.writes = Writes(lambda: self.p, TIMEOUT_S, QUARANTINE_S, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.p.run(BLOCKS if self._chance is None else self._chance.randrange(4))

    def write(self, *blocks: int, harmless: bool = False) -> None:
        self.writes.run(self.session, list(self.descriptors(*blocks)), harmless=harmless)

    def may_land(self) -> bool:
        return self.writes.may_land(self.writes.given_up)

    def descriptors(self, *blocks: int) -> Iterator[Write]:
        for block in blocks:
            yield self.source[block].data_ptr(), self.target[block].data_ptr(), BLOCK


def test_all_bytes_are_there_on_return_however_the_writes_end() -> None:
    ends = Ends(random.Random(3), seed=3)
    ends.source.random_(1, 255, generator=torch.Generator().manual_seed(3))
    ends.write(*range(BLOCKS))
    assert torch.equal(ends.source, ends.target)
    assert not ends.p.unfreed and not ends.p.device.broken


def test_no_more_writes_are_under_way_than_mooncake_lets_wait() -> None:
    ends = Ends()
    most = 0

    def sleep(seconds: float) -> None:
        nonlocal most
        most = max(most, ends.p.pending)
        Ends.sleep(ends, seconds)

    ends.writes = Writes(lambda: ends.p, TIMEOUT_S, QUARANTINE_S, lambda: ends.now, sleep)
    ends.write(*range(BLOCKS))
    assert most == UNDER_WAY


@pytest.mark.parametrize(
    ("fault", "said"),
    [(Fault.FAILS, "failed with status -1"), (Fault.TOO_LATE, "failed with status -2"), (Fault.LOST, "than 1.0 s")],
)
@pytest.mark.parametrize("which", [0, 5])
def test_one_that_fails_among_others_is_an_error(fault: Fault, said: str, which: int) -> None:
    ends = Ends()
    bad = next(ends.descriptors(which))
    ends.network.fault = lambda write: fault if write == bad else Fault.NONE
    with pytest.raises(LinkError, match=said):
        ends.write(*range(8))


@pytest.mark.parametrize("says_minus_one", [False, True])
def test_nobody_at_the_address_is_an_error_whatever_mooncake_calls_it(says_minus_one: bool) -> None:
    ends = Ends(says_minus_one=says_minus_one)
    ends.session = "host:9"
    with pytest.raises(LinkError, match="did not accept a write to host:9"):
        ends.write(0)
    assert not ends.may_land(), "there is none to ask for"


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.TOO_LATE])
def test_what_took_too_long_may_land_until_mooncake_says_that_it_has(fault: Fault) -> None:
    ends = Ends(fault=lambda write: fault)
    assert not ends.may_land()
    with pytest.raises(LinkError):
        ends.write(0, 1)
    assert ends.may_land()
    ends.p.land(lambda write: write == next(ends.descriptors(0)))
    ends.now += 0.1
    assert ends.may_land()
    ends.p.land()
    ends.now += 0.1
    assert not ends.may_land()
    assert not ends.p.unfreed


def test_what_has_failed_may_land_for_as_long_as_decode_keeps_its_blocks() -> None:
    ends = Ends(fault=lambda write: Fault.FAILS_AND_LANDS)
    with pytest.raises(LinkError):
        ends.write(0)
    ends.now += QUARANTINE_S - 0.1
    assert ends.may_land()
    ends.now += 0.2
    assert not ends.may_land()
    assert not ends.p.unfreed and not ends.p.device.broken, "it was not asked for again"


def test_what_fails_after_it_took_too_long_may_land_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(fault=lambda write: Fault.FAILS)
    run = ends.p.run
    monkeypatch.setattr(ends.p, "run", lambda most=1: None)
    with pytest.raises(LinkError, match="took longer"):
        ends.write(0)
    ends.now += QUARANTINE_S - 1
    run()
    assert ends.may_land()
    ends.now += QUARANTINE_S - 1
    assert ends.may_land()
    ends.now += 2
    assert not ends.may_land()


def give_up_all_that_may_be(ends: Ends) -> None:
    for _ in range(8):
        with pytest.raises(LinkError, match="took longer"):
            ends.write(*range(UNDER_WAY))
    with pytest.raises(LinkError, match="4096 writes that were given up may still land"):
        ends.write(0)


def test_no_more_is_begun_than_may_land_and_what_mooncake_never_ends_holds_up_nothing_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends(fault=lambda write: Fault.LOST)
    give_up_all_that_may_be(ends)
    ends.now += QUARANTINE_S
    assert not ends.may_land()
    ends.network.fault = lambda write: Fault.NONE
    ends.write(0)
    assert not caplog.records
    ends.now += QUARANTINE_S
    ends.write(0)
    assert "never ended 4096 writes" in caplog.text
    asked = count_asks(ends)
    ends.now += QUARANTINE_S
    assert not ends.may_land() and not asked
    assert ends.p.unfreed == 8 * UNDER_WAY, "no call can free them"


def test_the_next_life_of_decode_is_written_to_whatever_the_former_one_left(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends(fault=lambda write: Fault.LATE)
    give_up_all_that_may_be(ends)
    ends.network.fault = lambda write: Fault.NONE
    ends.writes.target_gone()
    ends.write(0)
    ends.p.land()
    ends.now += 1
    ends.write(0)
    assert not ends.p.unfreed and not caplog.records, "they are freed when they end"


def test_what_was_left_is_not_asked_for_with_every_look() -> None:
    ends = Ends(fault=lambda write: Fault.LOST)
    with pytest.raises(LinkError):
        ends.write(*range(UNDER_WAY))
    ends.now += 1
    asked = count_asks(ends)
    for _ in range(100):
        assert ends.may_land()
    assert len(asked) == UNDER_WAY


def count_asks(ends: Ends) -> list[int]:
    """The batches that are asked for from now on."""
    asked: list[int] = []
    ask = ends.p.transfer_check_status
    ends.p.transfer_check_status = lambda batch: asked.append(batch) or ask(batch)  # type: ignore[assignment]
    return asked


def test_what_fails_later_does_not_keep_what_failed_before() -> None:
    ends = Ends(fault=lambda write: Fault.FAILS)
    with pytest.raises(LinkError):
        ends.write(0)
    before = ends.writes.given_up
    ends.now += QUARANTINE_S / 2
    with pytest.raises(LinkError):
        ends.write(1)
    ends.now += QUARANTINE_S / 2
    assert not ends.writes.may_land(before)
    assert ends.may_land()


def test_writes_that_are_given_up_are_freed_when_they_end_although_nobody_waits_for_them() -> None:
    ends = Ends(fault=lambda write: Fault.LATE)
    with pytest.raises(LinkError):
        ends.write(0, 1, 2, harmless=True)
    assert not ends.may_land()
    ends.p.land()
    ends.now += 0.1
    ends.network.fault = lambda write: Fault.NONE
    ends.write(3)
    assert not ends.p.unfreed


class Unreliable(Ends):
    """One write of a hundred has a fault; what lands late does so up to `QUARANTINE_S` after its begin."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance, seed=7, fault=self._fault)
        self.lost = 0
        self._due: dict[Write, float] = {}

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.p.land(lambda write: self._due[write] <= self.now)

    def _fault(self, write: Write) -> Fault:
        assert self._chance is not None
        if self._chance.random() > 0.01:
            return Fault.NONE
        fault = self._chance.choice([fault for fault in Fault if fault is not Fault.NONE])
        self._due[write] = self.now + self._chance.random() ** 2 * QUARANTINE_S
        self.lost += fault is Fault.LOST
        return fault


@pytest.mark.parametrize("transfers", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_fault_lets_a_hole_pass_for_kv_or_changes_blocks_that_are_used_again(transfers: int) -> None:
    """D looks at a transfer when P says that all is there, and gives its blocks away when P says that nothing lands."""
    chance, content = random.Random(7), torch.Generator().manual_seed(7)
    ends = Unreliable(chance)
    arrived = 0
    held: set[int] = set()  # blocks of transfers that failed, while something of them may land
    others: dict[int, torch.Tensor] = {}  # blocks that were given away after a failure, and what others put there
    for _ in range(transfers):
        blocks = chance.sample([block for block in range(BLOCKS) if block not in held], chance.randrange(1, 24))
        for block in blocks:
            others.pop(block, None)
        ends.source[blocks] = torch.randint(0, 255, (len(blocks), BLOCK), dtype=torch.uint8, generator=content)
        try:
            ends.write(*blocks)
        except LinkError:
            held.update(blocks)
        else:
            arrived += 1
            assert torch.equal(ends.target[blocks], ends.source[blocks])
        ends.sleep(chance.choice([0.0, 1.0, QUARANTINE_S / 4]))
        if held and not ends.may_land():
            for block in held:
                others[block] = ends.target[block].random_(generator=content).clone()
            held.clear()
        assert all(torch.equal(ends.target[block], was) for block, was in others.items())
    assert transfers / 2 < arrived < transfers * 0.95
    assert not ends.p.device.broken
    while ends.p.pending:
        ends.sleep(QUARANTINE_S)
    ends.sleep(2 * QUARANTINE_S)
    assert not ends.may_land()
    assert ends.p.unfreed == ends.lost, "what never ends cannot be freed; all else is"


def in_lists(ends: Ends) -> list[int]:
    """From now on it writes as over `ascend`. Returns the lengths of its lists, as they come to be."""
    ends.writes = Writes(lambda: ends.p, TIMEOUT_S, QUARANTINE_S, lambda: ends.now, ends.sleep, lists=True)
    lengths: list[int] = []
    accept = ends.p.batch_transfer_async_write

    def count(session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> int:
        lengths.append(len(sources))
        return accept(session, sources, targets, sizes)

    ends.p.batch_transfer_async_write = count  # type: ignore[method-assign]
    return lengths


def test_over_ascend_a_packet_is_one_list() -> None:
    ends = Ends(random.Random(3), seed=3)
    lengths = in_lists(ends)
    ends.source.random_(1, 255, generator=torch.Generator().manual_seed(3))
    ends.write(*range(128))
    assert lengths == [128]
    assert torch.equal(ends.source[:128], ends.target[:128])
    ends.write(*range(128, BLOCKS))
    assert lengths[1:] == [UNDER_WAY] * 3 + [BLOCKS - 128 - 3 * UNDER_WAY]
    assert torch.equal(ends.source, ends.target)
    assert not ends.p.unfreed and not ends.p.device.broken


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.TOO_LATE, Fault.LATE])
@pytest.mark.parametrize("which", [0, 5])
def test_a_list_of_which_one_failed_may_land_until_its_quarantine_is_over(fault: Fault, which: int) -> None:
    ends = Ends()
    in_lists(ends)
    bad = next(ends.descriptors(which))
    ends.network.fault = lambda write: fault if write == bad else Fault.NONE
    with pytest.raises(LinkError, match=r"a list of 8 writes to .* failed with status -1"):
        ends.write(*range(8))
    assert ends.may_land() and ends.writes.given_up == 1
    ends.now += QUARANTINE_S + 1
    assert not ends.may_land()
    assert not ends.p.device.broken, "a batch that is freed is not asked for"


def test_a_list_to_nobody_is_an_error() -> None:
    ends = Ends()
    in_lists(ends)
    ends.session = "host:9"
    with pytest.raises(LinkError, match="a list of 1 writes to host:9 failed"):
        ends.write(0, harmless=True)
    assert not ends.may_land()
