"""The front doors of one node as others see them: those of its front part, another process, which may come and go."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deploy.front.messages import (
    AllSeen,
    Answer,
    Call,
    Counts,
    Done,
    End,
    Idle,
    Look,
    PausableS,
    Ready,
    Restart,
    Stamps,
    State,
    UntilEmpty,
    UntilQuiet,
    Watch,
    Word,
    from_front,
)
from deploy.front.traced import NodeTrace, offset_s
from deploy.runtime.asking import Asking
from deploy.runtime.stream import Open
from epd_serve.errors import EpdError

if TYPE_CHECKING:
    from proxy.records.records import Question, RecordsAnswer
    from proxy.workers.wire import Family


class FrontError(EpdError):
    """A node's front doors do not start, or its front part has failed at a call."""


class RemoteDoors:
    """Calls wait for the front part, and are repeated to the next one when it ends; each raises FrontError, ConfigError
    or SupersededError.

    Args:
        open: opens a stream to its socket.
        say: takes a line for the operator; told while `follow` is iterated over.
        epoch: as of `Asking`.

    Attributes:
        word: the last one of it.
        counts: what its front doors had counted when they were asked last. node: that they are of.
        state: says what its front doors are to know now; None as long as nobody knows. Each life of it is told first.
    """

    def __init__(self, open: Open, say: Callable[[str], None], epoch: int = 0) -> None:
        self.word = Word(0)
        self.counts: list[Family] = []
        self.node = ""
        self.state: Callable[[], State | None] = lambda: None
        self._front: Asking[Answer] = Asking(open, from_front, FrontError, say, epoch)
        self._front.standing = lambda: self.state()

    async def follow(self, changed: Callable[[], None]) -> None:
        """Keep `word` up to date, until cancelled. `changed`: called when it has changed."""
        async with contextlib.aclosing(self._front.follow(Watch())) as words:
            async for word in words:
                assert isinstance(word, Word), "a watch's answer"
                self.word = word
                changed()

    async def tell(self) -> None:
        """Have it know what is so now. Before anybody has said what is, nothing is told."""
        if (state := self.state()) is not None:
            await self._ask(state)

    async def ready(self) -> None:
        """Wait until all of its front doors serve, and know what has been said."""
        await self.tell()
        await self._ask(Ready())

    async def seen(self) -> None:
        await self.tell()
        await self._ask(AllSeen())

    async def until_empty(self, id: str) -> None:
        await self.tell()
        await self._ask(UntilEmpty(id))

    async def until_quiet(self, id: str) -> None:
        await self.tell()
        await self._ask(UntilQuiet(id))

    async def pausable_s(self) -> float:
        seconds = (await self._ask(PausableS())).pausable_s
        return math.inf if seconds is None else seconds

    async def counted(self) -> list[Family]:
        self.counts = (await self._ask(Counts())).counts
        return self.counts

    async def look(self, question: Question) -> RecordsAnswer:
        return (await self._ask(Look(question))).records

    async def traced(self, subjects: Sequence[str]) -> NodeTrace:
        """What is stamped there about these, with how far its clock is from ours."""

        async def time_s() -> float:
            return (await self._ask(Stamps())).time_s

        apart_s, uncertainty_s = await offset_s(time_s)
        stamps = (await self._ask(Stamps(subjects))).stamps if subjects else ()
        return NodeTrace(self.node, apart_s, uncertainty_s, stamps)

    async def restart(self) -> None:
        await self._ask(Restart())

    async def idle(self) -> None:
        await self.tell()
        await self._ask(Idle())

    async def end(self) -> None:
        await self._ask(End())

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        await self._front.disconnect()

    async def _ask(self, call: Call) -> Done:
        answer = await self._front.ask(call)
        assert isinstance(answer, Done), "a call's answer"
        return answer
