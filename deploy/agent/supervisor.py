"""Keeps the stages running: starts them, watches them, restarts the dead with back-off, ends them all.

One task per stage. A stage that fails its first start ends the whole launch with the reason from its log; one that
was ready once is restarted for ever, under a new incarnation and on the same port. Owns no file or port: what belongs
to a life is cleared by the `before_spawn` callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deploy.agent.health import health_status
from deploy.agent.stage_life import Spawn, StageLife, Start, execute
from deploy.agent.stage_log import FIRST_PHASE, phase_of
from epd_serve.errors import ConfigError, EpdError, StageError

logger = logging.getLogger(__name__)

ENGINE_DEAD = 503  # what vLLM's /health answers once its engine has died, and for nothing else


@dataclass(frozen=True)
class StageSpec:
    """One stage to keep alive.

    Attributes:
        command: makes the command of a life from its incarnation.
        turn: stages of the same turn start one after the other (their memory is profiled); "" starts freely.
        what: what messages call it, before its id.
    """

    id: str
    host: str
    port: int
    log_path: Path
    command: Callable[[str], Spawn]
    turn: str = ""
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


@dataclass
class Supervisor:
    """Use as `async with asyncio.TaskGroup() as group: group.create_task(supervisor.run())`, then `all_up`.

    `run` ends only by cancellation (which stops every stage) or by a first start that fails.
    """

    stages: Sequence[StageSpec]
    events: StageEvents
    patience: Patience = field(default_factory=Patience)
    parallel_starts: int = 0
    start: Start = execute

    def __post_init__(self) -> None:
        self.all_up = asyncio.Event()
        self._seen_up: set[str] = set()
        self._lives: dict[str, StageLife] = {}
        self._turns = {stage.turn: asyncio.Lock() for stage in self.stages if stage.turn}
        self._starts = asyncio.Semaphore(self.parallel_starts or max(1, len(self.stages)))

    async def run(self) -> None:
        """Supervise until cancelled.

        Raises:
            StageError: a stage failed its first start; every other one has been stopped.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for stage in self.stages:
                    group.create_task(self._supervise(stage), name=f"stage {stage.id}")
        except ExceptionGroup as failed:
            stage_errors, _ = failed.split(StageError)
            if stage_errors is None:
                raise
            raise _first(stage_errors) from None

    def groups(self) -> dict[str, int]:
        """Process groups that run now, by stage."""
        return {stage: life.pid for stage, life in self._lives.items()}

    def kill_now(self) -> None:
        """SIGKILL every group, without waiting (second Ctrl-C)."""
        for life in self._lives.values():
            life.kill()

    async def _supervise(self, stage: StageSpec) -> None:
        failures = 0
        while True:
            incarnation = uuid.uuid4().hex[:12]
            lived = _Lived()
            try:
                await self._live(stage, incarnation, lived)
            except (OSError, ConfigError) as error:  # ConfigError: its command cannot be made (any more)
                lived.reason = f"cannot be started: {error}"
            except EpdError:
                raise  # whoever listens says that it cannot go on
            except Exception as error:  # a defect of ours costs this life of this stage, not all of the launch
                logger.exception("supervising %s %s failed", stage.what, stage.id)
                lived.reason = f"cannot be supervised: {type(error).__name__}: {error}"
            if stage.id not in self._seen_up:
                raise StageError(f"{stage.what} {stage.id} did not start: {lived.reason}", stage=stage.id)
            failures = 0 if lived.up_s >= self.patience.settled_s else failures + 1
            delay_s = self._backoff(failures)
            try:
                self.events.down(stage.id, incarnation, lived.reason, delay_s)
            except Exception:  # whoever listens fails: the stage is started again all the same
                logger.exception("the end of %s %s could not be told", stage.what, stage.id)
            await asyncio.sleep(delay_s)

    def _backoff(self, failures: int) -> float:
        """`failures`: lives in a row that were not healthy for long."""
        if failures == 0:
            return 0.0
        return min(self.patience.backoff_max_s, self.patience.backoff_s * 2.0 ** min(failures - 1, 16))

    async def _live(self, stage: StageSpec, incarnation: str, lived: _Lived) -> None:
        """One life, from its turn to start to the end of its process group."""
        grace_s = self.patience.stop_grace_s
        try:
            async with self._turn(stage):
                self.events.before_spawn(stage.id, incarnation)
                life = await StageLife.begin(stage.command(incarnation), stage.log_path, self.start)
                self._lives[stage.id] = life
                self.events.spawned(stage.id, life.pid)
                trouble = await self._until_ready(stage, life)
            if trouble is None:
                self._mark_up(stage, incarnation, time.monotonic() - life.started)
                since = time.monotonic()
                trouble = await self._until_trouble(stage, life)
                lived.up_s = time.monotonic() - since
                # At once, before the group is cleared away: the proxy must send nothing more.
                self.events.down(stage.id, incarnation, trouble, None)
            lived.reason = trouble
            grace_s = min(2.0, grace_s)
        finally:
            if (life_now := self._lives.get(stage.id)) is not None:
                await life_now.stop(grace_s)
                del self._lives[stage.id]

    def _mark_up(self, stage: StageSpec, incarnation: str, seconds: float) -> None:
        self.events.up(stage.id, incarnation, seconds)
        self._seen_up.add(stage.id)
        if len(self._seen_up) == len(self.stages):
            self.all_up.set()

    @contextlib.asynccontextmanager
    async def _turn(self, stage: StageSpec) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if stage.turn:
                await stack.enter_async_context(self._turns[stage.turn])
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


def _first(group: BaseExceptionGroup[StageError]) -> StageError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StageError)
    return error
