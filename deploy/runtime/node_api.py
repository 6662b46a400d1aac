"""The HTTP API of a node: what both of its ends agree on. `deploy/node/routes.py` answers, over TLS to who shows the
token (`secrets.py`); `node_client.py`, `deploy/front/remote.py` and `deploy/cluster` ask.

    GET /health, /ready              it listens; it has been told its deployment, and its front doors serve
    GET /node, POST /node/NAME       what it is; facts, setup, notes, api_keys, log
    GET /agent, POST /agent/NAME     its instances
    GET /front, POST /front/NAME     its front doors

A call is `POST /agent/NAME`, or `/front/NAME` for the front doors, with its arguments as a JSON list. It is answered
when what it asks for has happened: with 202 where that takes longer than `WAIT_S`, and is then asked again. A watch is
`GET /agent?after=NUMBER`, or `/front`, for what is newer than that; 202: there is nothing yet. Every request says in
which epoch it is made (`EPOCH_HEADER`): of several controllers, one that is cut off and the one that has followed it,
the one of the latest epoch counts, and others get 409. A node that has not been told its deployment says so by 428.
Both ends come from one version of one program, so there are no versions here.

How a call ends that has not happened is said here, too, and how one waits for a node that may be said to have gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, NoReturn, TypeVar

import msgspec

from deploy.host.event_loop import first
from deploy.runtime.protocol import Node, Observed
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role
from proxy.config.keys import ApiKeys
from proxy.registry.instance_state import Tally, Work
from proxy.workers.shared_counters import Asked
from proxy.workers.wire import Row

EPOCH_HEADER, JSON = "epd-epoch", "application/json"
WAIT_S, WATCH_S = 10.0, 1.0
"""For which a call waits on the node, and a watch: often enough to say that the node is there."""

NOT_YET, REFUSED, SUPERSEDED, NOT_SET_UP, FAILED = 202, 400, 409, 428, 500
"""Status codes beside 200: asked again; a ConfigError; the epoch is over; it has no deployment; it has failed at it."""

T = TypeVar("T")
Disconnect = Callable[[], Coroutine[None, None, None]]


class Seen(msgspec.Struct, Generic[T], frozen=True):
    """Answers a watch.

    Attributes:
        life: of the process that answers: another one where it was started again.
        number: of this value. A later one has a larger number, in a later life, too.
    """

    life: int
    number: int
    value: T


class NodeStatus(msgspec.Struct, frozen=True):
    """What runs on a node.

    Attributes:
        lines: for the operator: those that have been said since; none for who asks for the first time.
    """

    nodes: tuple[Node, ...]
    instances: tuple[Observed, ...]
    lines: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """The body of an answer that is an error."""

    message: str
    param: str | None = None


class FrontState(msgspec.Struct, frozen=True):
    """Everything that the front doors of a node are to know. Replaces what was said before.

    Attributes:
        number: of this state; a later one of the same controller has a larger one.
        rows: of all instances that have a life.
        leaving: instances that are given nothing new although their runtime says nothing of the kind.
        paused_s: for how long new requests wait, counted from when this arrives; 0: they do not.
        asked: what all front doors are to do.
        settings: `ProxySettings` of front doors that start from now on, packed; empty: those they began with.
        api_keys: those of clients from now on; None: those of the settings.
    """

    number: int
    rows: tuple[Row, ...]
    wanted: tuple[Role, ...]
    leaving: tuple[str, ...] = ()
    paused_s: float = 0.0
    asked: Asked = Asked.SERVE
    settings: bytes = b""
    api_keys: ApiKeys | None = None


class Leases(msgspec.Struct, frozen=True, array_like=True):
    """What front doors have given one life of an instance."""

    id: str
    incarnation: str
    tallies: dict[Work, Tally]


class FrontStatus(msgspec.Struct, frozen=True):
    """How the front doors of a node are.

    Attributes:
        pids: of the front doors, by name.
        running: requests in flight. replacing: front doors are being replaced.
    """

    leases: tuple[Leases, ...] = ()
    pids: dict[str, int] = {}
    running: int = 0
    replacing: bool = False


RETRY_S = 1.0


class LostError(ConfigError):
    """It is no part of the deployment, or is none any more."""


class SilentError(EpdError):
    """It does not answer now. Whether it has been told nobody knows: it may be told again."""

    retryable = True


class SupersededError(EpdError):
    """Whoever asks decides no more: another controller does, in a later epoch."""


async def until_lost(doing: Awaitable[T], lost: asyncio.Event) -> T:
    """Its outcome. Raises LostError when `lost` is set first; what was under way is cancelled then."""

    async def gone() -> NoReturn:
        await lost.wait()
        raise LostError("it is not there any more")

    return await first(doing, gone())


class Following:
    """What is done for each of several nodes again and again, until another controller has followed this one.

    Args:
        say: takes a line for the operator.

    Attributes:
        superseded: set when a node has heard of a later controller.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.superseded = asyncio.Event()
        self._say = say
        self._kept: dict[str, tuple[Disconnect, list[asyncio.Task[None]]]] = {}
        self._parting: set[asyncio.Task[None]] = set()

    async def repeat(self, once: Callable[[], Awaitable[None]], complaint: str) -> None:
        """Where it fails, that is said after the complaint, and it is tried again a moment later."""
        while not self.superseded.is_set():
            try:
                await once()
            except SupersededError:
                self.superseded.set()
            except EpdError as error:
                self._say(f"{complaint}: {error}")
                await asyncio.sleep(RETRY_S)

    def keep(self, node: str, disconnect: Disconnect, *work: Coroutine[None, None, None]) -> None:
        """This goes on for a node, in place of what did before. `disconnect`: has nothing more be asked of it."""
        self.drop(node)
        self._kept[node] = disconnect, [asyncio.create_task(one, name=node) for one in work]

    def drop(self, node: str) -> None:
        """Nothing is done for it any more. Nobody waits for the end of that but `parted`."""
        if node not in self._kept:
            return
        disconnect, tasks = self._kept.pop(node)
        for task in tasks:
            task.cancel()
        parting = asyncio.create_task(disconnect())
        self._parting.add(parting)
        parting.add_done_callback(self._parting.discard)

    async def parted(self) -> None:
        """Nothing is done for any node any more."""
        for node in tuple(self._kept):
            self.drop(node)
        if self._parting:
            await asyncio.wait(self._parting)
