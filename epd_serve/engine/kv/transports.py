"""Which transports an instance offers for KV, in order of preference, and the engine behind one of them.

P tries them in this order on each link, by handshake and probe (`link_connection.py`); D accepts those that it offers.
Which they are is for `epd_serve.kv.transport_selection` to say. Both ends know of each other whether they share a
device, or a node: P tries nothing there that D would have to quarantine blocks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.transport_selection import MOONCAKE, transports_between
from epd_serve.peers import Peers
from epd_serve.wiring import StageWiring


def offered(
    wiring: StageWiring, device: str, *, colocated: bool = False, same_node: bool | None = True
) -> tuple[str, ...]:
    """By name. `device`: `npu`, `cuda` or `cpu`. `colocated`, `same_node`: with the other end."""
    return transports_between(wiring.kv_transport, device, colocated=colocated, same_node=same_node)


def quarantine_s(wiring: StageWiring, device: str, *, colocated: bool = False, same_node: bool | None = True) -> float:
    """How long D keeps blocks after P fell silent (see `DecodeDesk`): as long as the worst that both offer demands."""
    one_sided = MOONCAKE in offered(wiring, device, colocated=colocated, same_node=same_node)
    return MooncakeReceiveSide.quarantine_s if one_sided else ShmReceiveSide.quarantine_s


def quarantine_of_peers(wiring: StageWiring, device: str) -> Callable[[str], float]:
    """`quarantine_s` by the address where P takes READY. One caller at a time."""
    peers = Peers(wiring)

    def of(endpoint: str) -> float:
        peers.changed()
        return quarantine_s(wiring, device, colocated=peers.beside(endpoint), same_node=peers.together(endpoint))

    return of


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
