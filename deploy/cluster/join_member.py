"""A joined stage's voice towards its head: joins, beats, joins again, leaves. Knows nothing of processes.

A head that does not answer changes nothing here but the pace: beats go on with back-off, and one line a minute says so.
A head that has forgotten this stage (it was started again) is joined again, under the same name if that is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from deploy.cluster.join_client import HeadAwayError, HeadClient
from deploy.cluster.join_plan import JoinPlan
from epd_serve.cluster import BEAT_S, Beat, JoinAnswer, JoinRefusedError, Leave, NotAMemberError
from epd_serve.errors import EpdError

BACKOFF_MAX_S = 5.0
SAY_AGAIN_S = 60.0


class Member:
    """One agent. `say`: shows a line to the operator."""

    def __init__(self, plan: JoinPlan, head: HeadClient, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._head = head
        self._agent = secrets.token_hex(8)
        self._say = say
        self._log = _RateLimitedLog(say)
        self._answer: JoinAnswer | None = None
        self._news = asyncio.Event()
        self._incarnation, self._up, self._reason = "", False, "starting"
        self._number = 0

    @property
    def answer(self) -> JoinAnswer:
        """Name and settings, as the head said last."""
        assert self._answer is not None, "joined before anything else"
        return self._answer

    def tell(self, incarnation: str, up: bool, reason: str) -> None:
        """How the server is; the head hears it at once."""
        self._incarnation, self._up, self._reason = incarnation, up, reason
        self._news.set()

    async def join(self) -> None:
        """Until the head admits this stage, however long it is away.

        Raises:
            JoinRefusedError: at the first time. Later the head may be another one, and passes: try again.
        """
        backoff_s = 0.5
        while True:
            known_as = self._answer.id if self._answer is not None else ""
            try:
                answer = await self._head.join(self._plan.request(self._agent, known_as, self._incarnation))
            except (HeadAwayError, JoinRefusedError) as error:
                if isinstance(error, JoinRefusedError) and self._answer is None:
                    raise
                self._log.say(f"{error.message}; trying again")
            else:
                self._log.say(f"joined {self._head.url} as {answer.id}")
                self._answer = answer
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def beat_for_ever(self, after_each: Callable[[], None]) -> None:
        """Every `beat_s`, and at once after `tell`. `after_each`: the moment to look whether `answer` has changed."""
        wait_s = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
            self._news.clear()
            self._number += 1
            now = Beat(self.answer.id, self._agent, self._number, self._incarnation, self._up, self._reason)
            try:
                await self._head.beat(now)
                wait_s = self.answer.settings.beat_s
                self._log.normal(f"beats reach {self._head.url} again")
            except NotAMemberError:
                await self.join()
                wait_s = 0.0
            except (HeadAwayError, JoinRefusedError) as error:
                wait_s = min(max(2 * wait_s, BEAT_S), BACKOFF_MAX_S)
                self._log.say(f"{error.message}; serving on")
            after_each()

    async def leave(self, drain_s: float) -> None:
        """Say goodbye: the head sends nothing more and answers when what is in flight has ended, or `drain_s` has."""
        try:
            if not await self._head.leave(Leave(self.answer.id, self._agent, drain_s)):
                self._say(f"requests were still in progress after {drain_s:.0f} s")
        except EpdError as error:
            self._say(f"left without a word: {error.message}")


class _RateLimitedLog:
    """Says what changed, and the same again once a minute: a head that is away for a week fills no disk."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last, self._at, self._trouble = "", 0.0, False

    def say(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last or now > self._at + SAY_AGAIN_S:
            self._say(text)
            self._last, self._at = text, now
        self._trouble = True

    def normal(self, text: str) -> None:
        """All is well: said once after trouble."""
        if self._trouble and not self._last.startswith("joined"):
            self._say(text)
        self._last, self._trouble = "", False
