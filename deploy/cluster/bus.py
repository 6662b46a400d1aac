"""The event bus of a cluster: stages that announce connect to one address, those that listen to the other.

On one host every listener subscribes to every encoder's own socket. Across hosts stages come and go, so a fixed point
that forwards spares everyone the list of everyone: ZMQ's XSUB and XPUB in one thread. Announcements are hints (the
store's index is the truth), so a slow listener loses some instead of holding up the rest, and nothing is kept.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

import zmq

from epd_serve.errors import ConfigError

MAX_EVENT_BYTES = 1 << 20
AGAIN_S = 0.1


class EventBus:
    """Forwards from `publish` to `listen` (addresses to bind) until closed. Use as a context manager.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(self, publish: str, listen: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = self._bound(zmq.XSUB, publish)
        try:
            self._out = self._bound(zmq.XPUB, listen)
        except ConfigError:
            self._in.close()
            self._context.term()
            raise
        self._failure: zmq.ZMQError | None = None
        self._thread = threading.Thread(target=self._forward, name="epd-event-bus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop forwarding and free the ports."""
        self._context.term()  # makes the thread's call fail, returns when it has closed its sockets
        self._thread.join()

    def __enter__(self) -> EventBus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_EVENT_BYTES)
        opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
        opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        try:
            opened.bind(address)
        except zmq.ZMQError as error:
            opened.close()
            if not self._context.closed and kind == zmq.XSUB:
                self._context.term()
            raise ConfigError(
                f"the event bus cannot listen on {address}: {error.strerror}; choose other ports with --cluster-port",
                param="--cluster-port",
            ) from error
        return opened

    def raise_failure(self) -> None:
        """Raises what forwarding failed of since the last call. It has begun anew, or is about to."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _forward(self) -> None:
        try:
            while True:
                try:
                    zmq.proxy(self._in, self._out)
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:
                    self._failure = error
                    time.sleep(AGAIN_S)
        finally:
            self._in.close()
            self._out.close()
