"""How long a stage is waited for: until it answers, and until it does not any more. Decides nothing about it.

It is asked without an HTTP library: that happens several times a second while it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deploy.agent.stage_life import StageLife
from deploy.agent.stage_log import FIRST_PHASE, phase_of
from epd_serve import endpoint


async def health_status(url: str, timeout_s: float) -> int | None:
    """HTTP status of `GET /health`, or None when nothing answers HTTP there.

    Raises:
        TimeoutError: connected, but no answer in time (a busy server, not a dead one).
    """
    head = f"GET /health HTTP/1.1\r\nHost: {endpoint.for_http(url).netloc}\r\nConnection: close\r\n\r\n"
    reader = asyncio.StreamReader()
    async with asyncio.timeout(timeout_s):
        try:
            transport, _ = await endpoint.connect(url, lambda: asyncio.StreamReaderProtocol(reader))
        except OSError:
            return None
        try:
            transport.write(head.encode())
            words = (await reader.readline()).split()
        except (OSError, ValueError):  # ValueError: a first line that is longer than any of HTTP
            return None
        finally:
            transport.close()
    return int(words[1]) if len(words) >= 2 and words[1].isdigit() else None


ENGINE_DEAD = 503  # what vLLM's /health answers once its engine has died, and for nothing else


Health = Callable[[str, float], Awaitable[int | None]]
"""Asks who has this URL, within seconds: an HTTP status, or None where nobody answers. Raises TimeoutError."""


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
        first_starts: so many may be ended by a signal, which says nothing of the next. One that fails otherwise is the
            last.
        short_lives: so many in a row that did not settle are enough; 0: they never are.
        links_s: from its first 200 until a stage is used although its KV links are not up
            (`proxy/registry/instance_state.py`).
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
    first_starts: int = 1
    short_lives: int = 0
    links_s: float = 15.0

    def next_delay_s(self, up_s: float, last_s: float) -> float:
        """Between two lives, the former of which was up for `up_s` and had begun `last_s` after the end of its own."""
        if up_s >= self.settled_s:
            return 0.0
        return min(self.backoff_max_s, 2.0 * last_s or self.backoff_s)


async def until_ready(
    url: str, life: StageLife, patience: Patience, health: Health, phase: Callable[[str], None]
) -> str | None:
    """None once it answers 200; else why it never will. `phase`: takes what the start is at."""
    phase(FIRST_PHASE)
    deadline = life.started + patience.start_s
    while time.monotonic() < deadline:
        for line in life.new_log_lines():
            if (found := phase_of(line)) is not None:
                phase(found)
        if life.exit_code is not None:
            return life.failure_reason()
        with contextlib.suppress(TimeoutError):  # busy: ask again until the deadline
            if await health(url, patience.health_timeout_s) == 200:
                return None
        await asyncio.sleep(patience.poll_s)
    return f"not ready within {patience.start_s:.0f} s (--startup-timeout-s); {life.failure_reason()}"


async def until_trouble(url: str, life: StageLife, patience: Patience, health: Health) -> str:
    """Why a stage that was up is to be restarted."""
    exited = asyncio.create_task(life.exited())
    sick = asyncio.create_task(_until_sick(url, patience, health))
    try:
        await asyncio.wait({exited, sick}, return_when=asyncio.FIRST_COMPLETED)
        return life.failure_reason() if exited.done() else sick.result()
    finally:
        for watch in (exited, sick):
            watch.cancel()


async def _until_sick(url: str, patience: Patience, health: Health) -> str:
    last_answer, refusals = time.monotonic(), 0
    while True:
        await asyncio.sleep(patience.health_every_s)
        try:
            status = await health(url, patience.health_timeout_s)
        except TimeoutError:
            if time.monotonic() - last_answer > patience.hung_s:
                return f"hung: no answer on /health for {patience.hung_s:.0f} s"
            continue
        last_answer = time.monotonic()
        refusals = 0 if status == 200 else refusals + 1
        if status == ENGINE_DEAD or refusals >= patience.sick_after:
            return f"unhealthy: /health answers {status or 'nothing'}"
