"""Which transports an instance offers for KV, in order of preference, and the engine behind one of them.

P tries them in this order on each link, by handshake and probe (`link_connection.py`); D accepts those that it offers.
Which they are is `epd_serve.kv.ways`' decision. P knows of each link whether it leads to an instance on its own device;
D, whose links come to it, is told `shm` where all of them do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.ways import MOONCAKE, transports_between
from epd_serve.wiring import StageWiring


def offered(wiring: StageWiring, device: str, endpoint: str = "") -> tuple[str, ...]:
    """By name. `device`: `npu`, `cuda` or `cpu`; `endpoint`: the worker of D that P's link leads to."""
    return transports_between(wiring.kv_transport, device, beside=endpoint in wiring.kv_beside)


def quarantine_s(wiring: StageWiring, device: str) -> float:
    """How long D keeps blocks after P fell silent (see `DecodeDesk`): as long as the worst that it offers demands."""
    one_sided = MOONCAKE in offered(wiring, device)
    return MooncakeReceiveSide.quarantine_s if one_sided else ShmReceiveSide.quarantine_s


class OnDemand:
    """The Transfer Engine of one worker, started when a link first asks for it: it registers all of the KV cache."""

    def __init__(self, start: Callable[[], MooncakeEndpoint]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._endpoint: MooncakeEndpoint | None = None
        self._reason = ""

    def __call__(self) -> MooncakeEndpoint:
        """Any thread that has entered the device.

        Raises:
            LinkError: it does not start here; said again at each call, for nothing that it depends on changes.
        """
        with self._lock:
            if self._endpoint is None:
                if self._reason:
                    raise LinkError(self._reason)
                try:
                    self._endpoint = self._start()
                except LinkError as error:
                    self._reason = str(error)
                    raise
            return self._endpoint
