"""KV on the fake device, with one rule left out at a time: each is noticed, by other bytes or by the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from epd_serve.engine.kv import mooncake_endpoint, sender
from epd_serve.engine.kv.link_cost import MeasuredCost
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.mooncake_endpoint import Extent
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_writes import Write, Writes
from epd_serve.engine.kv.shm_send import StagingRing
from epd_serve.kv.link_queue import LinkQueue
from epd_serve.kv.plan import Run
from tests.epd_serve.engine.kv.device_courses import (
    Course,
    follow,
    preempt_unread,
    preempt_while_read,
    send_again_what_is_read,
    two_steps,
)
from tests.epd_serve.engine.kv.device_ends import P_NPU, Setting
from tests.epd_serve.engine.kv.slow_devices import SlowDevice, ascend_caches, neighbouring_caches
from tests.fake_npu.device import FakeEvent, FakeTimedFence

SHM, MOONCAKE = ("shm",), ("mooncake",)


# --- devices whose users forget a rule ------------------------------------------------------------------------------


class Unwaited(SlowDevice):
    """Nobody waits for fences."""

    def timed_fence(self) -> FakeTimedFence:
        event = FakeEvent()
        event.reach()
        return FakeTimedFence(self, event)


class TooEarly(SlowDevice):
    """Fences are recorded before the layer that they are for: each one is the one before."""

    _before: FakeTimedFence | None = None

    def timed_fence(self) -> FakeTimedFence:
        now = super().timed_fence()
        before, self._before = self._before or now, now
        return before


class NoSetDevice(SlowDevice):
    """Our threads do not set the device."""

    def enter_thread(self) -> None:
        if not threading.current_thread().name.startswith("epd-kv-"):
            super().enter_thread()


# --- code that forgets a rule ---------------------------------------------------------------------------------------


def registers_storages(patch: pytest.MonkeyPatch) -> None:
    """From the storage's start, which is not aligned on Ascend."""
    patch.setattr(
        mooncake_endpoint,
        "spans_of",
        lambda extents, alignment, limit: [(e.storage_start, e.storage_end - e.storage_start) for e in extents],
    )


def registers_all_between(patch: pytest.MonkeyPatch) -> None:
    """One span from the first region to the last, with what lies between."""

    def one(extents: Sequence[Extent], alignment: int, limit: int) -> list[tuple[int, int]]:
        return [(min(extents).start, max(e.end for e in extents) - min(extents).start)]

    patch.setattr(mooncake_endpoint, "spans_of", one)


def joins_blocks_by_source(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are neighbours at P travel in one run, wherever they go at D."""

    def coalesce(src: Sequence[int], dst: Sequence[int]) -> tuple[Run, ...]:
        runs: list[Run] = []
        for s, d in sorted(zip(src, dst, strict=True)):
            if runs and runs[-1].src + runs[-1].count == s:
                runs[-1] = Run(runs[-1].src, runs[-1].dst, runs[-1].count + 1)
            else:
                runs.append(Run(s, d, 1))
        return tuple(runs)

    patch.setattr(sender, "coalesce", coalesce)


def joins_regions_by_source(patch: pytest.MonkeyPatch) -> None:
    """K's last block and V's first, neighbours at P, become one write, although they are none at D."""
    run = Writes.run

    def joined(self: Writes, session: str, writes: Sequence[Write], **options: bool) -> None:
        fewer: list[Write] = []
        for source, target, nbytes in sorted(writes):
            if fewer and fewer[-1][0] + fewer[-1][2] == source:
                fewer[-1] = (fewer[-1][0], fewer[-1][1], fewer[-1][2] + nbytes)
            else:
                fewer.append((source, target, nbytes))
        run(self, session, fewer, **options)

    patch.setattr(Writes, "run", joined)


def needs_no_credit(patch: pytest.MonkeyPatch) -> None:
    """Every packet takes the staging memory from its start, whether or not D has copied the one before."""
    patch.setattr(StagingRing, "fits", lambda ring, size: True)
    patch.setattr(StagingRing, "take", lambda ring, seq, size: 0)


def ends_at_once(patch: pytest.MonkeyPatch) -> None:
    """DONE goes before what is queued."""
    patch.setattr(LinkQueue, "put_end", lambda queue, member, job: queue._ready.append((member, job)))


def tries_no_transport(patch: pytest.MonkeyPatch) -> None:
    """What both ends accept is used, without a probe."""
    patch.setattr(MeasuredCost, "probe", lambda *arguments: None)
    patch.setattr(MooncakeReceiveSide, "quarantine_s", 0.2)  # what fails is not over before


def counts_no_spans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mooncake_endpoint, "MAX_REGIONS", 10_000)


def preempts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "invalidate", lambda out: None)


def waits_for_no_write(patch: pytest.MonkeyPatch) -> None:
    """A move counts as over when its writes are accepted; the engine gets to them in no order."""

    def submit(self: Writes, session: str, writes: Sequence[Write], **options: bool) -> None:
        for source, target, nbytes in writes:
            self._engine().batch_transfer_async_write(session, [source], [target], [nbytes])

    patch.setattr(Writes, "run", submit)


# --- each with what gives it away -----------------------------------------------------------------------------------


def _forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    """For mistakes that the devices make."""


@dataclass(frozen=True)
class Mistake:
    """How it is made, and how it shows.

    Attributes:
        evidence: words of what is found on each of `transports` when the course takes its way.
        patch: what makes the mistake; wrong: options that make it.
        options: of both the wrong and the right pair; refused: words of why there is no right pair.
    """

    evidence: str
    transports: tuple[tuple[str, ...], ...] = (SHM, MOONCAKE)
    patch: Callable[[pytest.MonkeyPatch], None] = _forgets_nothing
    course: Course = two_steps
    wrong: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


def _many_layers(device: SlowDevice) -> Any:
    return ascend_caches(device, layers=130)


MISTAKES = {
    "P does not wait until the device has written the layers": Mistake("lacks bytes", wrong={"p_device": Unwaited}),
    "P records its fence before the packet's last layer": Mistake("lacks bytes", wrong={"p_device": TooEarly}),
    "P's link does not set the device": Mistake("has not set the device", wrong={"p_device": NoSetDevice}),
    "D's receiver does not set the device": Mistake("has not set the device", (SHM,), wrong={"d_device": NoSetDevice}),
    "D returns the credit before its copies are done": Mistake("lacks bytes", (SHM,), wrong={"d_device": Unwaited}),
    "P uses staging memory again before the credit": Mistake(
        "others' bytes", (SHM,), needs_no_credit, options={"staging_bytes": 8192}
    ),
    "DONE goes before the last packet": Mistake("lacks bytes", patch=ends_at_once),
    "memory is registered from where its storage starts": Mistake(
        "not a multiple of 2 MB", (MOONCAKE,), registers_storages
    ),
    "memory is registered with all between": Mistake("not the device's memory", (MOONCAKE,), registers_all_between),
    "more spans are registered than Ascend takes": Mistake(
        "more than 256", (MOONCAKE,), counts_no_spans, options={"p_caches": _many_layers}, refused="260 regions"
    ),
    "blocks are joined that are neighbours at P only": Mistake("others' bytes", patch=joins_blocks_by_source),
    "regions are joined that are neighbours at P only": Mistake(
        "others' bytes", (MOONCAKE,), joins_regions_by_source, options={"p_caches": neighbouring_caches}
    ),
    "a pair on one device is taken for one that connects": Mistake(
        "was not received", ((*MOONCAKE, *SHM),), tries_no_transport, options={"d_place": P_NPU}
    ),
    "what is preempted stays queued": Mistake("a has others' bytes", (MOONCAKE,), preempts_nothing, preempt_unread),
    "what was read while its blocks were given away passes for whole": Mistake(
        "a has others' bytes", (MOONCAKE,), preempts_nothing, preempt_while_read
    ),
    "a prompt that is sent again starts before what is under way has ended": Mistake(
        "a lacks bytes", (MOONCAKE,), waits_for_no_write, send_again_what_is_read
    ),
}


CASES = {
    f"{name}, {'+'.join(transports)}": (mistake, transports)
    for name, mistake in MISTAKES.items()
    for transports in mistake.transports
}
COURSES = {  # each once: what takes the same course is the same without its mistake
    f"{mistake.course.__name__}, {'+'.join(transports)}, {', '.join(mistake.options)}": (mistake, transports)
    for mistake, transports in CASES.values()
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mistake, transports = CASES[case]
    mistake.patch(monkeypatch)
    found = follow(tmp_path, mistake.course, Setting(transports, **mistake.options, **mistake.wrong))
    assert any(mistake.evidence in what for what in found), found


@pytest.mark.parametrize("course", COURSES)
def test_with_the_rule_kept_the_same_course_goes_well(tmp_path: Path, course: str) -> None:
    mistake, transports = COURSES[course]
    found = follow(tmp_path, mistake.course, Setting(transports, **mistake.options))
    assert len(found) == bool(mistake.refused) and all(mistake.refused in what for what in found), found
