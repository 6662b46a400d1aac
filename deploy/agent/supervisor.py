"""Keeps stages running: starts them, watches them, restarts the dead with back-off, ends them.

One task per stage, from `add` to `remove`. A stage that was ready once is restarted for ever, under a new incarnation
and on the same port, until it is retired. One that fails its first start is over: what that means for the others is
the caller's decision. Owns no file or port: what belongs to a life is cleared by the `before_spawn` callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deploy.agent.health import health_status
from deploy.agent.stage_life import Spawn, StageLife, Start, execute
from deploy.agent.stage_log import FIRST_PHASE, phase_of
from epd_serve.errors import ConfigError, EpdError, StageError

logger = logging.getLogger(__name__)

ENGINE_DEAD = 503  # what vLLM's /health answers once its engine has died, and for nothing else


async def _nothing() -> None:
    return None


@dataclass(frozen=True)
class StageSpec:
    """One stage to keep alive.

    Attributes:
        command: makes the command of a life from its incarnation.
        prepare: awaited before each life; raises OSError or ConfigError where there can be none.
        turns: stages that have one in common start one after the other (their memory is profiled).
        what: what messages call it, before its id.
    """

    id: str
    host: str
    port: int
    log_path: Path
    command: Callable[[str], Spawn]
    prepare: Callable[[], Awaitable[None]] = _nothing
    turns: Sequence[str] = ()
    what: str = "stage"


@dataclass(frozen=True)
class Patience:
    """Every wait of a launch for its stages, in seconds.

    Attributes:
        start_s: deadline from spawn to the first 200.
        settled_s: a life that was in health for this long is followed by the next one at once.
        backoff_s: delay after one that was not; it doubles with each up to `backoff_max_s`.
        health_timeout_s: one health request. `sick_after`: consecutive refusals (not time-outs) that mean sick;
            one is enough where it says that the engine is dead.
        hung_s: silence that means hung; long, for a stage under load may answer late.
        stop_grace_s: from SIGTERM to SIGKILL.
        links_s: from its first 200 until a stage is used although its KV links are not up
            (`proxy/registry/warm_links.py`).
    """

    start_s: float = 900.0
    poll_s: float = 0.1
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    settled_s: float = 10.0
    health_every_s: float = 1.0
    health_timeout_s: float = 5.0
    sick_after: int = 3
    hung_s: float = 120.0
    stop_grace_s: float = 8.0
    links_s: float = 15.0


class StageEvents(Protocol):
    """What the supervisor reports, from the event loop's thread. Every call returns at once."""

    def before_spawn(self, stage: str, incarnation: str) -> None:
        """A life is about to start: clear what the previous one left."""

    def spawned(self, stage: str, pid: int) -> None: ...

    def phase(self, stage: str, phase: str) -> None:
        """Progress of a start."""

    def up(self, stage: str, incarnation: str, seconds: float) -> None:
        """It answers; `seconds` since its spawn."""

    def down(self, stage: str, incarnation: str, reason: str, retry_in_s: float | None) -> None:
        """It was up, or was being restarted, and is not. `retry_in_s` is None as long as what is left of it ends."""

    def over(self, stage: str, reason: str) -> None:
        """It is not started again: its first start failed, or it has ended after it was retired."""


@dataclass
class _Supervised:
    """One stage.

    Attributes:
        answered: set when it has answered once; a StageError where it never will.
        life: that of now.
        retired: it is not started again.
        grace_s: of its end, where it is ended by us.
    """

    stage: StageSpec
    answered: asyncio.Future[None]
    life: StageLife | None = None
    retired: bool = False
    grace_s: float = 0.0
    task: asyncio.Task[None] = field(init=False)


class Supervisor:
    """Needs a running loop. Whoever makes one closes it.

    Args:
        parallel_starts: stages that start at once; 0: all.
    """

    def __init__(
        self, events: StageEvents, patience: Patience | None = None, parallel_starts: int = 0, start: Start = execute
    ) -> None:
        self.events = events
        self.patience = patience or Patience()
        self.start = start
        self._stages: dict[str, _Supervised] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._starts: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(parallel_starts) if parallel_starts else contextlib.nullcontext()
        )

    def add(self, stage: StageSpec) -> None:
        """Start it, and keep it running. The id is nobody else's, or of one that is over."""
        assert stage.id not in self._stages or self._stages[stage.id].task.done()
        one = self._stages[stage.id] = _Supervised(stage, asyncio.get_running_loop().create_future())
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
        if one.life is not None:  # it was being cleared away, which our word has interrupted
            await one.life.stop(grace_s)
        self._refuse(one, "it was ended")
        if self._stages.get(stage_id) is one:  # else somebody was quicker, and the name may be another's by now
            del self._stages[stage_id]

    async def close(self) -> None:
        """End all of them, together."""
        async with asyncio.TaskGroup() as group:
            for stage_id in self._stages:
                group.create_task(self.remove(stage_id, self.patience.stop_grace_s))

    async def answered(self, stage_id: str) -> None:
        """Wait until it has answered once.

        Raises:
            StageError: its first start failed, or it was ended before.
        """
        await asyncio.shield(self._stages[stage_id].answered)

    def groups(self) -> dict[str, int]:
        """Process groups that run now, by stage."""
        return {name: one.life.pid for name, one in self._stages.items() if one.life is not None}

    def kill_now(self) -> None:
        """SIGKILL every group, without waiting (second Ctrl-C)."""
        for one in self._stages.values():
            if one.life is not None:
                one.life.kill()

    async def _supervise(self, one: _Supervised) -> None:
        stage, failures, reason = one.stage, 0, ""
        while not (one.retired and one.answered.done()):
            incarnation = uuid.uuid4().hex[:12]
            lived = _Lived()
            try:
                await self._live(one, incarnation, lived)
            except (OSError, ConfigError) as error:  # ConfigError: its command cannot be made (any more)
                lived.reason = f"cannot be started: {error}"
            except EpdError as error:  # whoever listens says that it cannot go on
                self._refuse(one, reason := str(error))
                break
            except Exception as error:  # a defect of ours costs this life of this stage, and no more
                logger.exception("supervising %s %s failed", stage.what, stage.id)
                lived.reason = f"cannot be supervised: {type(error).__name__}: {error}"
            reason = lived.reason
            if self._refuse(one, f"{stage.what} {stage.id} did not start: {reason}") or one.retired:
                break
            failures = 0 if lived.up_s >= self.patience.settled_s else failures + 1
            delay_s = self._backoff(failures)
            try:
                self.events.down(stage.id, incarnation, reason, delay_s)
            except Exception:  # whoever listens fails: the stage is started again all the same
                logger.exception("the end of %s %s could not be told", stage.what, stage.id)
            await asyncio.sleep(delay_s)
        self.events.over(stage.id, reason)

    def _refuse(self, one: _Supervised, why: str) -> bool:
        """Whether it has never answered, and now never will."""
        if one.answered.done():
            return False
        one.answered.set_exception(StageError(why, stage=one.stage.id))
        one.answered.exception()  # looked at: whether anybody waits for it is theirs to know
        return True

    def _backoff(self, failures: int) -> float:
        """`failures`: lives in a row that were not healthy for long."""
        if failures == 0:
            return 0.0
        return min(self.patience.backoff_max_s, self.patience.backoff_s * 2.0 ** min(failures - 1, 16))

    async def _live(self, one: _Supervised, incarnation: str, lived: _Lived) -> None:
        """One life, from its turn to start to the end of its process group."""
        stage, grace_s = one.stage, self.patience.stop_grace_s
        try:
            async with self._turn(stage):
                await stage.prepare()
                self.events.before_spawn(stage.id, incarnation)
                life = one.life = await StageLife.begin(stage.command(incarnation), stage.log_path, self.start)
                self.events.spawned(stage.id, life.pid)
                trouble = await self._until_ready(stage, life)
            if trouble is None:
                self.events.up(stage.id, incarnation, time.monotonic() - life.started)
                if not one.answered.done():
                    one.answered.set_result(None)
                since = time.monotonic()
                trouble = await self._until_trouble(stage, life)
                lived.up_s = time.monotonic() - since
                # At once, before the group is cleared away: the proxy must send nothing more.
                self.events.down(stage.id, incarnation, trouble, None)
            lived.reason = trouble
            grace_s = min(2.0, grace_s)
        except asyncio.CancelledError:
            grace_s = one.grace_s
            raise
        finally:
            if one.life is not None:
                await one.life.stop(grace_s)
                one.life = None

    @contextlib.asynccontextmanager
    async def _turn(self, stage: StageSpec) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for turn in sorted(stage.turns):  # sorted: two stages never wait for each other
                await stack.enter_async_context(self._turns.setdefault(turn, asyncio.Lock()))
            await stack.enter_async_context(self._starts)
            yield

    async def _until_ready(self, stage: StageSpec, life: StageLife) -> str | None:
        """None once it answers 200; else why it never will."""
        self.events.phase(stage.id, FIRST_PHASE)
        deadline = life.started + self.patience.start_s
        while time.monotonic() < deadline:
            for line in life.new_log_lines():
                if (phase := phase_of(line)) is not None:
                    self.events.phase(stage.id, phase)
            if life.exit_code is not None:
                return life.failure_reason()
            with contextlib.suppress(TimeoutError):  # busy: ask again until the deadline
                if await health_status(stage.host, stage.port, self.patience.health_timeout_s) == 200:
                    return None
            await asyncio.sleep(self.patience.poll_s)
        return f"not ready within {self.patience.start_s:.0f} s (--startup-timeout-s); {life.failure_reason()}"

    async def _until_trouble(self, stage: StageSpec, life: StageLife) -> str:
        """Why a stage that was up is to be restarted."""
        exited = asyncio.create_task(life.exited())
        sick = asyncio.create_task(self._until_sick(stage))
        try:
            await asyncio.wait({exited, sick}, return_when=asyncio.FIRST_COMPLETED)
            return life.failure_reason() if exited.done() else sick.result()
        finally:
            for watch in (exited, sick):
                watch.cancel()

    async def _until_sick(self, stage: StageSpec) -> str:
        last_answer, refusals = time.monotonic(), 0
        while True:
            await asyncio.sleep(self.patience.health_every_s)
            try:
                status = await health_status(stage.host, stage.port, self.patience.health_timeout_s)
            except TimeoutError:
                if time.monotonic() - last_answer > self.patience.hung_s:
                    return f"hung: no answer on /health for {self.patience.hung_s:.0f} s"
                continue
            last_answer = time.monotonic()
            refusals = 0 if status == 200 else refusals + 1
            if status == ENGINE_DEAD or refusals >= self.patience.sick_after:
                return f"unhealthy: /health answers {status or 'nothing'}"


@dataclass
class _Lived:
    """How a life went."""

    reason: str = "ended"
    up_s: float = 0.0
