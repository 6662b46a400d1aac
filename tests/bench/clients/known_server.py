"""The soak tests' known server, that also fails in every way servers do, and counts who came and left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.soak import known_server

FAULTS = ("", "status", "garbage", "not http", "error event", "cut", "no done", "empty", "short", "hang", "drop")


class Known(known_server.Known):
    """How a request is answered: with one of `FAULTS`, after `fault_after` tokens where it breaks a stream."""

    fault: str = ""
    fault_after: int = 1
    status: int = 429


class KnownServer(known_server.KnownServer):
    """`url` while it serves.

    Attributes:
        seen: requests. longest_body: bytes of the longest.
        under_way: requests whose connection is open and whose answer has not ended.
        left: requests whose client closed its connection before their end.
    """

    def __init__(self, usual: Known | None = None) -> None:
        super().__init__(usual or Known())
        self.seen = self.longest_body = self.under_way = self.left = 0
        self._connections: set[Connection] = set()

    def connection(self) -> Connection:
        made = Connection(self)
        self._connections.add(made)
        return made

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[KnownServer]:
        async with super().serving():
            try:
                yield self
            finally:
                for connection in list(self._connections):  # as a server that is killed
                    connection.transport.abort()


class Connection(known_server.Connection):
    server: KnownServer
    known: Known
    busy = False

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.server._connections.discard(self)
        self.server.left += self.busy
        self._finish()

    def on_message_complete(self) -> None:
        self.server.seen += self._parser.get_method() == b"POST"
        super().on_message_complete()

    def answer(self, body: bytes) -> None:
        server, fault = self.server, self.known.fault
        server.longest_body = max(server.longest_body, len(body))
        self.busy = True
        server.under_way += 1
        if fault == "status":
            self.whole(self.known.status, {"error": {"message": "too much to do", "type": "rate_limit_error"}})
            self._finish()
        elif fault == "not http":
            self._finish()
            self.transport.write(b"220 mail.example ESMTP\r\n")
        elif fault == "drop":
            self._finish()
            self.transport.abort()
        elif fault == "garbage":
            self.transport.write(known_server._STREAM + b"18\r\n<html>It works!</html>\n\n\r\n0\r\n\r\n")
            self._finish()
        elif fault != "hang":
            if fault in ("empty", "short", "cut", "error event"):
                tokens = {"empty": 0, "short": self.known.tokens - 1}.get(fault, self.known.fault_after)
                self.known = Known(**{**_plain(self.known), "tokens": tokens})
            super().answer(body)

    def finish(self, out: bytes, end: bytes = known_server._END) -> None:
        self._finish()
        if self.known.fault in ("cut", "error event"):
            error = known_server.event(b'{"error":{"message":"D0 died","type":"server_error"}}')
            self.transport.write(out + (error if self.known.fault == "error event" else b""))
            self.transport.close()
        else:
            super().finish(out, b"0\r\n\r\n" if self.known.fault == "no done" else end)

    def _finish(self) -> None:
        self.server.under_way -= self.busy
        self.busy = False


def _plain(known: Known) -> dict[str, object]:
    return {name: getattr(known, name) for name in known.__struct_fields__}
