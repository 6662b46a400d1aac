"""The worker of D as a link sees it: whether it can be reached, which life of it answers, and what that breaks.

Runs in the link's thread. A link that is not open tries again every half second, for D may start later; a transfer
that waits for it starts an attempt at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from epd_serve.engine.kv.link_connection import Connection
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.link_transfers import ActiveTransfers
from epd_serve.engine.kv.transport import LinkError

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class Peer:
    """Opens and reopens one connection.

    Args:
        on_lost: called when a connection has ended, before another begins.
        on_change: called when `state` or `reason` have changed.

    Attributes:
        name: instance of D that answered last, e.g. `D0`; "" before.
        state: `opening` (never up so far), `up`, `down`; reason: why not up, or why not by the first choice.
        retries: connections made again.
    """

    def __init__(
        self,
        endpoint: str,
        connection: Connection,
        transfers: ActiveTransfers,
        on_lost: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self.name = ""
        self.state, self.reason = "opening", ""
        self.retries = 0
        self._endpoint = endpoint
        self._connection = connection
        self._transfers = transfers
        self._on_lost, self._on_change = on_lost, on_change
        self._retry_at = 0.0

    def reach(self, outs: Sequence[Outgoing]) -> list[Outgoing]:
        """Those of these transfers that can be sent now, the connection open to the life of D that they are for."""
        while living := self._transfers.living(outs):
            wanted = next((out.target for out in living if out.target != self._connection.target), None)
            if wanted is None:
                break
            # Afterwards it answers, is known to be replaced, or what waited for it is broken.
            if self._connection.is_open and self._still_there():
                self._answers(wanted)  # a late packet for a former life: transfers of this one are not disturbed
            else:
                self._open(wanted)
        return living

    def wait(self, until: float) -> None:
        """Nothing to send before `until`: take what D answers; try to reach it where it is time to."""
        if self._connection.is_open:
            self._connection.wait(until)
        elif time.monotonic() < self._retry_at:
            self._connection.wait(min(until, self._retry_at))
        else:
            self._open()

    def failed(self, reason: str) -> None:
        """The connection is of no more use."""
        logger.error("KV link to %s: %s", self._endpoint, reason)
        self.disconnect()
        self._retry_at = time.monotonic() + _RETRY_S
        self._turn("opening" if self.state == "opening" else "down", reason)

    def disconnect(self) -> None:
        self._connection.close()
        self._transfers.connection_lost()
        self._on_lost()

    def _still_there(self) -> bool:
        """Whether the life of D that the connection is open to answers on it.

        Where it has died unnoticed, that is no fault of transfers for the life after it: nothing of them was sent.
        """
        try:
            return self._connection.who() == self._connection.target
        except LinkError as error:
            logger.error("KV link to %s: %s", self._endpoint, error)
            return False

    def _open(self, wanted: str = "") -> None:
        self.disconnect()
        began = time.monotonic()
        try:
            self._connection.open()
        except LinkError as error:
            self._connection.close()
            self._retry_at = time.monotonic() + _RETRY_S
            waited = self._transfers.unreachable(began)
            if waited or str(error) != self.reason:  # said once while nobody needs the link
                logger.log(logging.ERROR if waited else logging.INFO, "KV link to %s: %s", self._endpoint, error)
            self._turn("opening" if self.state == "opening" else "down", str(error))
            return
        self._answers(wanted)
        self.retries += bool(self.name)
        self.name = self._connection.target.rpartition(":")[0]
        self._turn("up", self._connection.reason)

    def _answers(self, wanted: str) -> None:
        target = self._connection.target
        if wanted and wanted != target:
            logger.error("KV link to %s: %s reserved blocks and is gone, %s answers", self._endpoint, wanted, target)
        self._transfers.answered(target, wanted=wanted)

    def _turn(self, state: str, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._on_change()
