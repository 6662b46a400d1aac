"""Which transfers of a link may still be sent, and which have lost something. No sockets, no threads of its own.

Nothing more is sent of a broken transfer, least of all its DONE: D would take a hole for KV. D finds out by itself, as
P's scheduler no longer says that it holds the transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set

from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.wire import TransferKey


class ActiveTransfers:
    """`know` may be called by any thread, all else by the link's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _known
        self._known: dict[TransferKey, tuple[Outgoing, float]] = {}  # until over; since when
        self._sent_on: set[TransferKey] = set()  # packets on this connection, DONE not sent
        self._ever_sent: set[TransferKey] = set()  # packets on this connection or a former one
        self._broken: set[TransferKey] = set()
        self._replaced: set[str] = set()  # former lives of D
        self._life = ""  # the last one that answered

    def know(self, outs: Iterable[Outgoing], now: float) -> None:
        """Something of these transfers is queued."""
        with self._lock:
            for out in outs:
                self._known.setdefault(out.key, (out, now))

    def living(self, outs: Iterable[Outgoing]) -> list[Outgoing]:
        """Those that may be sent. Blocks belong to one life of D: what was for a former one breaks here."""
        found = []
        for out in outs:
            if out.target in self._replaced:
                self._broken.add(out.key)
            if out.key not in self._broken:
                found.append(out)
        return found

    def answered(self, life: str, *, wanted: str = "") -> None:
        """This life of D answers. Who answers lives; READY came only after its sender had bound this address."""
        if self._life and self._life != life:
            self._replaced.add(self._life)
        if wanted and wanted != life:
            self._replaced.add(wanted)
        self._replaced.discard(life)
        self._life = life

    def sent(self, keys: Set[TransferKey]) -> None:
        """Packets of these are on the connection."""
        self._sent_on |= keys
        self._ever_sent |= keys

    def ever_sent(self, key: TransferKey) -> bool:
        """Whether anything of it was put on a connection."""
        return key in self._ever_sent

    def done(self, key: TransferKey) -> None:
        """DONE is on the connection."""
        self._sent_on.discard(key)

    def connection_lost(self) -> None:
        """What was in flight may be lost."""
        self._broken |= self._sent_on
        self._sent_on.clear()

    def broke(self, outs: Iterable[Outgoing]) -> None:
        self._broken.update(out.key for out in outs)

    def unreachable(self, since: float) -> bool:
        """Nobody answered an attempt begun at `since`: breaks what has waited all that time. Whether there was any.

        Younger transfers wait for the next attempt: one deadline for all of them, not one for each.
        """
        with self._lock:
            waited = [out for out, known in self._known.values() if known <= since]
        self.broke(waited)
        return bool(waited)

    def over(self, key: TransferKey) -> None:
        self._broken.discard(key)
        self._sent_on.discard(key)
        self._ever_sent.discard(key)
        with self._lock:
            self._known.pop(key, None)
