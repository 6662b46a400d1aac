"""D's end of simulated transfers: the real desk and control channel, and a data channel that hears DONE.

Blocks are reserved before P may start, and are not given back before P or its silence says that nothing
is written any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.kv.control import DecodeControl
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.faults import faults_of
from epd_serve.kv.params import ReceiveParams, receive_params
from epd_serve.kv.transport_selection import why_not
from epd_serve.sim.link import DEVICE, SIMULATED, caller
from epd_serve.sim.prompts import Prompt
from epd_serve.sockets import bind
from epd_serve.wire import TransferKey
from epd_serve.wiring import StageWiring, worker_endpoints

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Incoming:
    """One transfer.

    Attributes:
        loaded: called once, when all its KV is here. failed: called once instead, with the reason.
        freed: called when a request that has left need not keep its blocks any more.
    """

    params: ReceiveParams
    prompt: Prompt
    loaded: Callable[[], None]
    failed: Callable[[str], None]
    freed: Callable[[], None]
    reserved: bool = False
    gone: bool = False
    done_ranks: set[int] = field(default_factory=set)  # ranks of D that got DONE


class Receiver:
    """Runs between `start` and `close`. `ranks`: tensor-parallel size."""

    def __init__(self, wiring: StageWiring, *, ranks: int, block_tokens: int) -> None:
        self._wiring = wiring
        self._block_tokens = block_tokens
        self._endpoints = worker_endpoints(wiring.kv_worker_endpoint, ranks)
        self._desk = DecodeDesk(wiring.kv_peer_timeout_s)
        self._control: DecodeControl | None = None
        self._context = zmq.asyncio.Context.shadow(zmq.Context.instance())
        self._tasks: list[asyncio.Task[None]] = []
        self._transfers: dict[TransferKey, Incoming] = {}

    def start(self) -> None:
        """Raises zmq.ZMQError where the data channel cannot be bound."""
        loop = asyncio.get_running_loop()
        wiring = self._wiring
        self._control = DecodeControl(
            self._desk, faults_of(wiring.kv_faults), caller(loop, self._look), key_file=wiring.key_file
        )
        for rank, endpoint in enumerate(self._endpoints):
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            bind(router, endpoint, wiring.key_file)
            self._tasks.append(asyncio.create_task(self._listen(router, rank), name=f"KV of rank {rank}"))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._control is not None:
            self._control.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def take(
        self,
        raw: Mapping[str, Any] | None,
        request: str,
        prompt: Prompt,
        loaded: Callable[[], None],
        failed: Callable[[str], None],
        freed: Callable[[], None],
    ) -> Incoming | None:
        """A request has come. None where no P is named: it is computed here."""
        params = receive_params(dict(raw) if raw else None, request)
        if params is None:
            return None
        assert self._control is not None
        one = self._transfers[params.key] = Incoming(params, prompt, loaded, failed, freed)
        with self._control.lock:
            self._desk.queued(params.key, params.endpoint)
        return one

    def reserve(self, one: Incoming, cached_tokens: int = 0) -> None:
        """Blocks for its prompt are taken: offer them to P, but for those of the tokens that are cached."""
        assert self._control is not None
        params, tokens = one.params, one.prompt.tokens
        one.reserved = True
        ready = wire.Ready(
            key=params.key,
            incarnation=params.incarnation,
            source=f"{self._wiring.instance}:{self._wiring.incarnation}",
            blocks=list(range(-(-tokens // self._block_tokens))),
            start_token=cached_tokens,
            prompt_tokens=tokens,
            prompt_hash=one.prompt.digest,
            endpoints=list(self._endpoints),
        )
        with self._control.lock:
            self._desk.reserved(params.endpoint, ready, time.monotonic())
        self._control.flush()

    def left(self, one: Incoming) -> bool:
        """Its request has ended, or left. Whether its blocks are kept until `freed` is called."""
        if one.gone:
            return False
        one.gone = True
        assert self._control is not None
        with self._control.lock:
            self._desk.gone(one.params.key, time.monotonic())
        self._control.flush()
        if not one.reserved:
            self._transfers.pop(one.params.key, None)
        return one.params.key in self._transfers

    # --- what comes -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._control is None:
            return
        with self._control.lock:
            failures = self._desk.take_failures()
        for key in failures:
            self._end(key, "prefill did not deliver its KV")

    def _end(self, key: TransferKey, reason: str = "") -> None:
        """A transfer is over, one way or the other."""
        assert self._control is not None
        one = self._transfers.pop(key, None)
        if one is None:
            return
        with self._control.lock:
            self._desk.closed(key)
        if one.gone:
            one.freed()
        elif reason:
            logger.warning("KV transfer %s failed: %s", key.transfer_id, reason)
            one.failed(reason)
        else:
            one.loaded()

    async def _listen(self, router: zmq.asyncio.Socket, rank: int) -> None:
        with router:
            while True:
                peer, *frames = await router.recv_multipart()
                try:
                    answer = self._handle(wire.to_decode_worker.decode(frames[-1]), rank)
                except wire.DecodeError as error:
                    logger.warning("ignoring a malformed message on the KV data channel: %s", error)
                    continue
                if answer is not None:
                    await router.send_multipart([peer, wire.encode(answer)])

    def _handle(self, message: wire.ToDecodeWorker, rank: int) -> wire.ToPrefillWorker | None:
        if isinstance(message, wire.Hello):
            if message.version != wire.VERSION:
                return wire.HelloRefused(f"version: {wire.VERSION} here, {message.version} there")
            wiring = self._wiring
            if not message.transport.startswith(SIMULATED):
                return wire.HelloRefused(f"transport: simulated here, {message.transport} there")
            transport = message.transport.removeprefix(SIMULATED)
            if why := why_not(transport, wiring.kv_transport, DEVICE, here=wiring.node, there=message.node):
                return wire.HelloRefused(why)
            return wire.HelloAck(f"{wiring.instance}:{wiring.incarnation}", node=wiring.node)
        if isinstance(message, wire.Done):
            one = self._transfers.get(message.key)
            if one is not None and not message.ok:
                self._end(message.key, message.reason or "no reason given")
            elif one is not None:
                one.done_ranks.add(rank)
                if len(one.done_ranks) == len(self._endpoints):
                    self._end(message.key)
            return None
        if isinstance(message, wire.FirstToken | wire.Expect):  # a simulated D samples its own, and has no blocks
            return None
        return wire.Credit(message.seq)  # a probe or a packet of no meaning here
