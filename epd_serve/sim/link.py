"""One data link of a simulated P: to one worker of D, with no bytes on it. Says hello, sends DONE, knows who is there.

Transports are chosen as between real stages on CPU, and called `sim/shm` and `sim/mooncake`: a real stage refuses them.
A link that is not up tries again every half second, for D may start later, or again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.errors import ConfigError
from epd_serve.kv.transport_selection import between, transports_between
from epd_serve.peers import Peers
from epd_serve.sockets import connect
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)

SIMULATED = "sim/"
"""Stands before the name of a transport."""

DEVICE = "cpu"
RETRY_S = 0.5
HELLO_S = 1.0  # D answers at once or is not there


class Link:
    """Runs from `start` until `close`.

    Args:
        wiring: of P. peers: who is there, as it knows. changed: called when `report` says something else.

    Attributes:
        target: instance and incarnation of D that answers; "" while the link is not up.
        carrying: transfers whose end is being told there.
        transfers, failed, cancelled, bytes, busy_s: counters of `wire.KvLink`. Whoever sends counts.
    """

    def __init__(
        self, endpoint: str, rank: int, wiring: StageWiring, peers: Peers, changed: Callable[[], None]
    ) -> None:
        self.target = ""
        self.carrying = 0
        self.transfers = self.failed = self.cancelled = self.bytes = self.retries = 0
        self.busy_s = 0.0
        self._endpoint, self._rank, self._wiring = endpoint, rank, wiring
        self._peers, self._changed = peers, changed
        self._source = f"{wiring.instance}:{wiring.incarnation}"
        self._transport = ""
        self._state, self._reason, self._name = "opening", "", endpoint
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    def start(self, context: zmq.asyncio.Context) -> None:
        self._task = asyncio.create_task(self._run(context), name=f"link to {self._endpoint}")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def done(self, message: wire.Done, target: str, timeout_s: float) -> str:
        """Tells incarnation `target` of D that a transfer is over. Returns why that is impossible, or ""."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return f"no link to {self._endpoint}: {self._reason or 'it is opening'}"
        if self.target != target:
            return f"{target} reserved blocks and is gone, {self.target or 'nobody'} answers"
        assert self._socket is not None
        await self._socket.send(wire.encode(message))
        return ""

    def report(self) -> wire.KvLink:
        return wire.KvLink(
            peer=self._name,
            rank=self._rank,
            state=self._state,
            reason=self._reason,
            transport=self._transport if self._state == "up" else "",
            packets=self.transfers,
            layers=self.transfers,
            bytes=self.bytes,
            transfers=self.transfers,
            failed=self.failed,
            cancelled=self.cancelled,
            retries=self.retries,
            busy_s=self.busy_s,
            exposed_s=self.busy_s,
            transfer_s=self.busy_s,
        )

    async def _run(self, context: zmq.asyncio.Context) -> None:
        while True:
            try:
                reason = await self._live(context)
            except (zmq.ZMQError, ConfigError) as error:
                reason = f"no connection: {error}"
            self.target, self._socket = "", None
            self._up.clear()
            self._turn("opening" if self._state == "opening" else "down", reason)
            await asyncio.sleep(RETRY_S)

    async def _live(self, context: zmq.asyncio.Context) -> str:
        """One connection, until it ends; why it did."""
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            hung_up: asyncio.Future[list[bytes]] | None = None
            try:
                connect(socket, self._endpoint, self._wiring.key_file)
                self._transport = self._first_choice()
                hello = wire.Hello(wire.VERSION, self._source, self._transport, {}, node=self._wiring.node)
                await socket.send(wire.encode(hello))
                if not await socket.poll(int(HELLO_S * 1000)):
                    return "no answer"
                answer = wire.to_prefill_worker.decode(await socket.recv())
                if not isinstance(answer, wire.HelloAck):
                    return f"refused: {getattr(answer, 'reason', 'no answer to hello')}"
                self._socket, self.target = socket, answer.target
                self._name = answer.target.rpartition(":")[0]
                self.retries += self._state == "down"
                self._turn("up", between(self._wiring.node, answer.node))
                self._up.set()
                hung_up = asyncio.ensure_future(monitor.recv_multipart())
                await hung_up
                return "decode's end of the connection has closed"
            except wire.DecodeError as error:
                return f"malformed answer: {error}"
            finally:
                if hung_up is not None:
                    hung_up.cancel()
                socket.disable_monitor()
                monitor.close(linger=0)

    def _first_choice(self) -> str:
        """What a real pair would try first."""
        same_node = self._peers.together(self._endpoint)
        ways = transports_between(self._wiring.kv_transport, DEVICE, colocated=False, same_node=same_node)
        return f"{SIMULATED}{ways[0]}"

    def _turn(self, state: str, reason: str) -> None:
        if (state, reason) != (self._state, self._reason):
            self._state, self._reason = state, reason
            self._changed()


def caller(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Callable[[], None]:
    """What any thread may call to have `call` run in the loop. A loop that has ended hears nothing any more."""

    def ring() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return ring
