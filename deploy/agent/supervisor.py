"""Keeps stages running: starts them, watches them, restarts the dead with back-off, ends them.

One task per stage, from `add` to `remove`. A stage that was ready once is restarted for ever, under a new incarnation,
until it is retired. One that fails its first start is over: what that means for the others is the caller's decision.
Owns no file or port: what belongs to a life is cleared by the `before_spawn` callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.agent.stage_life import Record, Spawn, StageLife, Start
from deploy.agent.waits import Health, Patience, health_status, until_ready, until_trouble
from deploy.host.children import Child
from deploy.host.spawned import NOT_BEGUN
from deploy.runtime.protocol import Phase
from epd_serve.errors import ConfigError, EpdError, StageError

logger = logging.getLogger(__name__)

SHORT_GRACE_S = 2.0
"""For what is left of a life that was in trouble."""


async def _nothing() -> None:
    return None


@dataclass
class StageSpec:
    """One stage to keep alive.

    Attributes:
        url: where it answers (`epd_serve.endpoint`); `prepare` may change it.
        command: makes the command of a life, after it was reported (`StageEvents.before_spawn`).
        prepare: awaited before each life; raises OSError or ConfigError where there can be none.
        turns: stages that have one in common start one after the other (their memory is profiled).
        what: what messages call it, before its id.
        health: asks it how it is.
        ends_by: the signal that asks it to end.
    """

    id: str
    url: str
    log_path: Path
    command: Callable[[], Spawn]
    prepare: Callable[[], Awaitable[None]] = _nothing
    turns: Sequence[str] = ()
    what: str = "stage"
    health: Health = health_status
    ends_by: signal.Signals = signal.SIGTERM


class StageEvents:
    """What the supervisor reports, from the event loop's thread; every call returns at once. Nothing of it has to be
    listened to but `note`."""

    def note(self) -> None:
        """A record has changed, and what else was reported with that: it is to be written down. Comes last."""
        raise NotImplementedError

    def before_spawn(self, stage: str) -> None:
        """A life is about to start: clear what the previous one left."""

    def spawned(self, stage: str, pid: int) -> None:
        """A process has been made, and does nothing before it is noted."""

    def phase(self, stage: str, phase: str) -> None:
        """Progress of a start."""

    def up(self, stage: str) -> None:
        """It answers."""

    def down(self, stage: str, reason: str, retry_in_s: float | None) -> None:
        """It was up, or was being restarted, and is not. `retry_in_s` is None as long as what is left of it ends."""

    def over(self, stage: str, reason: str) -> None:
        """It is not started again: its first start failed, or it has ended after it was retired."""


@dataclass
class _Supervised:
    """One stage.

    Attributes:
        record: of its lives, kept up to date before anything of them is told.
        answered: set when it has answered once; a StageError where it never will.
        life: that of now. code: how the last one ended by itself. found: it has been begun by a supervisor before this.
        retired: it is not started again.
        grace_s: of its end, once it is to end. A task that is cancelled without leaves the process be.
    """

    stage: StageSpec
    record: Record
    answered: asyncio.Future[None]
    life: StageLife | None = None
    code: int | None = None
    found: bool = False
    retired: bool = False
    grace_s: float | None = None
    task: asyncio.Task[None] = field(init=False)


class Supervisor:
    """Needs a running loop. Whoever makes one closes it.

    Args:
        parallel_starts: stages that start at once; 0: all.
        start: starts one.
    """

    def __init__(
        self, events: StageEvents, patience: Patience | None = None, parallel_starts: int = 0, *, start: Start
    ) -> None:
        self.events = events
        self.patience = patience or Patience()
        self.start = start
        self._stages: dict[str, _Supervised] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._starts: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(parallel_starts) if parallel_starts else contextlib.nullcontext()
        )

    def add(self, stage: StageSpec, record: Record | None = None, process: Child | None = None) -> None:
        """Start it, and keep it running. The id is nobody else's, or of one that is over.

        Args:
            record: of its lives so far. The supervisor goes on from there.
            process: of the life that is recorded, which may have ended since; None where nothing of it can be left.
        """
        assert stage.id not in self._stages or self._stages[stage.id].task.done()
        record = record or Record()
        one = self._stages[stage.id] = _Supervised(stage, record, asyncio.get_running_loop().create_future())
        if record.ever_up:
            one.answered.set_result(None)
        if process is not None:
            one.life = StageLife(process, stage.log_path, record.log_start, record.began_at)
            one.found = True
        one.task = asyncio.create_task(self._supervise(one), name=f"{stage.what} {stage.id}")

    def retire(self, stage_id: str, retired: bool = True) -> None:
        """When it ends it is not started again; or it is, after all. One that has ended already stays so."""
        self._stages[stage_id].retired = retired

    async def remove(self, stage_id: str, grace_s: float) -> None:
        """End it, and forget it: SIGTERM, and SIGKILL after `grace_s`. May be asked for twice."""
        if (one := self._stages.get(stage_id)) is None:
            return
        one.grace_s = grace_s
        if not one.task.cancelling():
            one.task.cancel()
        await asyncio.wait([one.task])
        await self._end(one, grace_s)  # where it was being cleared away, which our word has interrupted
        self._refuse(one, "it was ended")
        if self._stages.get(stage_id) is one:  # else somebody was quicker, and the name may be another's by now
            del self._stages[stage_id]

    async def close(self) -> None:
        """End all of them, together."""
        async with asyncio.TaskGroup() as group:
            for stage_id in self._stages:
                group.create_task(self.remove(stage_id, self.patience.stop_grace_s))

    async def leave(self) -> None:
        """Watch none of them any more. They go on."""
        tasks = [one.task for one in self._stages.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def answered(self, stage_id: str) -> None:
        """Wait until it has answered once.

        Raises:
            StageError: its first start failed, or it was ended before.
        """
        await asyncio.shield(self._stages[stage_id].answered)

    def groups(self) -> dict[str, int]:
        """Process groups that run now, by stage."""
        return {name: one.life.pid for name, one in self._stages.items() if one.life is not None}

    async def _supervise(self, one: _Supervised) -> None:
        stage, record, reason = one.stage, one.record, ""
        if one.life is None and record.phase is Phase.DOWN:
            await asyncio.sleep(record.next_at - time.monotonic())
        while one.life is not None or not (one.retired and one.answered.done()):
            try:
                reason = await self._live(one)
            except (OSError, ConfigError) as error:  # ConfigError: its command cannot be made (any more)
                reason = f"cannot be started: {error}"
            except EpdError as error:  # whoever listens says that it cannot go on
                self._refuse(one, reason := str(error))
                break
            except Exception as error:  # a defect of ours costs this life of this stage, and no more
                logger.exception("supervising %s %s failed", stage.what, stage.id)
                reason = f"cannot be supervised: {type(error).__name__}: {error}"
            found, one.found = one.found, False
            if found and one.code == NOT_BEGUN:  # whoever had begun it was killed before it could do anything
                record.lives -= 1
                continue
            if not ((one.code or 0) < 0 and record.lives < self.patience.first_starts) and self._refuse(
                one, f"{stage.what} {stage.id} did not start: {reason}"
            ):
                break
            self._falls(record, reason)
            if one.retired or 0 < self.patience.short_lives <= record.short_lives:
                break
            record.waits()
            try:
                self.events.down(stage.id, reason, record.delay_s)
                self.events.note()
            except Exception:  # whoever listens fails: the stage is started again all the same
                logger.exception("the end of %s %s could not be told", stage.what, stage.id)
            await asyncio.sleep(record.delay_s)
        record.ends(reason)
        self.events.over(stage.id, reason)
        self.events.note()

    def _refuse(self, one: _Supervised, why: str) -> bool:
        """Whether it has never answered, and now never will."""
        if one.answered.done():
            return False
        one.answered.set_exception(StageError(why, stage=one.stage.id))
        one.answered.exception()  # looked at: whether anybody waits for it is theirs to know
        return True

    def _falls(self, record: Record, reason: str) -> None:
        if record.phase is not Phase.DOWN or record.next_at:  # else its delay is decided
            record.falls(reason, self.patience.next_delay_s(record.up_s, record.delay_s))

    async def _live(self, one: _Supervised) -> str:
        """One life, from its turn to start, or from where it was left, to the end of its process group. Returns why."""
        grace_s = min(SHORT_GRACE_S, self.patience.stop_grace_s)
        try:
            reason = await self._until_trouble(one)
        except asyncio.CancelledError:
            if one.grace_s is not None:
                await self._end(one, one.grace_s)
            raise
        except BaseException:
            await self._end(one, grace_s)
            raise
        await self._end(one, grace_s)
        return reason

    async def _until_trouble(self, one: _Supervised) -> str:
        stage, record = one.stage, one.record
        if one.life is None or record.phase is Phase.STARTING:
            trouble = await self._start(one)
            if trouble is not None:
                return trouble
        if record.phase is Phase.UP:
            assert one.life is not None, "it has started"
            self._falls(record, await until_trouble(stage.url, one.life, self.patience, stage.health))
            # At once, before the group is cleared away: the proxy must send nothing more.
            self.events.down(stage.id, record.reason, None)
            self.events.note()
        return record.reason

    async def _end(self, one: _Supervised, grace_s: float) -> None:
        """Returns when nothing of its life is left."""
        if one.life is not None:
            one.code = one.life.exit_code
            await one.life.stop(grace_s, one.stage.ends_by)
            one.life = None

    async def _start(self, one: _Supervised) -> str | None:
        """None once it answers; else why it never will."""
        stage, record = one.stage, one.record
        async with self._turn(stage):
            if one.life is None:
                await stage.prepare()
                stage.log_path.touch()
                record.begins(stage.log_path.stat().st_size)
                self.events.before_spawn(stage.id)
                self.events.note()
                await self._spawn(one)
            assert one.life is not None, "it has been spawned"
            phase = partial(self.events.phase, stage.id)
            trouble = await until_ready(stage.url, one.life, self.patience, stage.health, phase)
        if trouble is None:
            record.answers()
            self.events.up(stage.id)
            self.events.note()
            if not one.answered.done():
                one.answered.set_result(None)
        return trouble

    async def _spawn(self, one: _Supervised) -> None:
        """Raises OSError, ConfigError."""
        stage, record = one.stage, one.record

        def noted(process: Child) -> None:
            one.life = StageLife(process, stage.log_path, record.log_start)
            record.spawned(one.life)
            self.events.spawned(stage.id, process.pid)
            self.events.note()

        command = stage.command()
        with stage.log_path.open("ab") as log:
            await self.start(command, log, noted)

    @contextlib.asynccontextmanager
    async def _turn(self, stage: StageSpec) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for turn in sorted(stage.turns):  # sorted: two stages never wait for each other
                await stack.enter_async_context(self._turns.setdefault(turn, asyncio.Lock()))
            await stack.enter_async_context(self._starts)
            yield
