"""Which transports an instance offers for KV, in order of preference, and the engine behind one of them.

P tries them in this order on each link, by handshake and probe (`link_connection.py`); D accepts those that it offers.
Both ends have one wiring and one kind of device, so they agree on what is offered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.transport import LinkError
from epd_serve.wiring import StageWiring

SHM, MOONCAKE = ShmReceiveSide.name, MooncakeReceiveSide.name


def offered(wiring: StageWiring, device: str) -> tuple[str, ...]:
    """By name. `device`: `npu`, `cuda` or `cpu`.

    `auto` is for instances of one host (who wires several says `mooncake`). There NPUs write into each other directly,
    but for two instances on one NPU, which the engine refuses to connect before CANN 9.1: they meet in shared memory.
    CPU and CUDA meet there at once: nothing that Mooncake does over TCP is better on one host, and as a mere fallback
    it would make D keep the blocks of every P that dies for `quarantine_s`.
    """
    if wiring.kv_transport != "auto":
        return (wiring.kv_transport,)
    return (MOONCAKE, SHM) if device == "npu" else (SHM,)


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
