"""The end of a conversation that asks. Whoever answers may end and come again, be another one, or not be there yet.

The one that a call was told to may be gone before it has answered: every call can be repeated, so it is, to the next
one, until an answer comes. How long that may take is for the caller to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from deploy.runtime.stream import Epoch, GiveUp, Line, Open, Refused, Request, Superseded, Writer, line_of
from epd_serve.errors import ConfigError, EpdError

logger = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 0.05, 1.0
"""After a connection that ended, or that was not to be had; longer each time, for it may be a machine that has gone."""


class SupersededError(EpdError):
    """Whoever asks decides no more: another one does, in a later epoch."""


class Numbered(Protocol):
    """An answer."""

    @property
    def number(self) -> int: ...


Answer = TypeVar("Answer", bound=Numbered)


class Asking(Generic[Answer]):
    """Connects when it is first asked something, and again when the other end has gone. Calls raise ConfigError or
    `failed`, as the other end says, or SupersededError.

    Args:
        answers: decodes what the other end says.
        failed: raised when the other end has failed at a call.
        say: takes its lines for the operator, which come as long as somebody watches.
        epoch: in which whoever asks decides; 0 where it has no rivals.

    Attributes:
        standing: makes a call that each life of the other end gets before any other, or None. Its answer is nobody's.
    """

    def __init__(
        self,
        open: Open,
        answers: msgspec.json.Decoder[Any],
        failed: type[EpdError],
        say: Callable[[str], None],
        epoch: int = 0,
    ) -> None:
        self.standing: Callable[[], Any] = lambda: None
        self._open = open
        self._answers = answers
        self._failed = failed
        self._say = say
        self._epoch = epoch
        self._connection: _Connection[Answer] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def ask(self, call: Any) -> Answer:
        """Its one answer."""
        while True:
            try:
                return await (await self._connected()).ask(call)
            except ConnectionError:
                await asyncio.sleep(RETRY_S)

    async def follow(self, call: Any) -> AsyncGenerator[Answer]:
        """Its answers, of all lives of the other end. What nobody has taken is replaced by what comes after it."""
        while True:
            try:
                async with contextlib.aclosing((await self._connected()).follow(call)) as answers:
                    async for answer in answers:
                        yield answer
            except ConnectionError:
                await asyncio.sleep(RETRY_S)

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> _Connection[Answer]:
        async with self._one_at_a_time:
            retry_s = RETRY_S
            while self._connection is None or self._connection.gone:
                if self._connection is not None and self._connection.superseded:
                    raise SupersededError(f"epoch {self._epoch} is over: another one decides")
                try:
                    reader, writer = await self._open()
                except (ConnectionError, FileNotFoundError):
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, RETRY_MAX_S)
                else:
                    self._connection = _Connection(reader, writer, self._answers, self._failed, self._say)
                    if self._epoch:
                        self._connection.tell(Epoch(self._epoch))
                    if (standing := self.standing()) is not None:
                        self._connection.tell(standing)
            return self._connection


class _Connection(Generic[Answer]):
    """With one life of the other end. Calls raise ConnectionError when that is over.

    Attributes:
        superseded: that was its last word.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: Writer,
        answers: msgspec.json.Decoder[Any],
        failed: type[EpdError],
        say: Callable[[str], None],
    ) -> None:
        self.superseded = False
        self._reader = reader
        self._writer = writer
        self._decode = answers.decode
        self._failed = failed
        self._say = say
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Answers[Answer]] = {}
        self._hearing = asyncio.create_task(self._hear(), name="answers")

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    async def ask(self, call: Any) -> Answer:
        with self._asking(call) as (_, answers):
            return await answers.next()

    async def follow(self, call: Any) -> AsyncGenerator[Answer]:
        with self._asking(call) as (number, answers):
            try:
                while True:
                    yield await answers.next()
            finally:
                with contextlib.suppress(ConnectionError):
                    self._send(number, GiveUp())

    def tell(self, call: Any) -> None:
        """Whatever the answer is."""
        with contextlib.suppress(ConnectionError):  # who asks next will notice
            self._send(next(self._numbers), call)

    async def close(self) -> None:
        self._hearing.cancel()
        await asyncio.wait([self._hearing])

    @contextlib.contextmanager
    def _asking(self, call: Any) -> Iterator[tuple[int, _Answers[Answer]]]:
        number = next(self._numbers)
        answers = self._asked[number] = _Answers(self._failed)
        try:
            self._send(number, call)
            yield number, answers
        finally:
            del self._asked[number]

    def _send(self, number: int, call: Any) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("whoever answers has gone")
        self._writer.write(line_of(Request(number, call)))

    async def _hear(self) -> None:
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                match self._decode(line):
                    case Line(text):
                        self._say(text)
                    case Superseded():
                        self.superseded = True
                        return
                    case answer if answer.number in self._asked:
                        self._asked[answer.number].put(answer)
        except ConnectionError:
            pass
        except (msgspec.MsgspecError, ValueError):  # a line that is no answer, or too long
            logger.exception("whoever answers says what it cannot say")
        finally:
            self._writer.close()
            for answers in self._asked.values():
                answers.put(None)


class _Answers(Generic[Answer]):
    """To one call: the newest, until it is taken."""

    def __init__(self, failed: type[EpdError]) -> None:
        self._failed = failed
        self._newest: Answer | Refused | None = None
        self._come = asyncio.Event()

    def put(self, answer: Answer | Refused | None) -> None:
        """None: there will be no more."""
        self._newest = answer
        self._come.set()

    async def next(self) -> Answer:
        """Raises ConfigError or what a failure raises, as the other end says, or ConnectionError."""
        await self._come.wait()
        self._come.clear()
        answer = self._newest
        if answer is None:
            raise ConnectionResetError("whoever answers has gone")
        if isinstance(answer, Refused):
            raise ConfigError(answer.message, param=answer.param) if answer.config else self._failed(answer.message)
        return answer
