"""KV by Mooncake, D's end: offers its memory; writes need no help.

Writes are one-sided, so a late one can land after silence: D quarantines blocks for `quarantine_s` before reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from epd_serve import wire
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.regions import LinkPieces
from epd_serve.engine.kv.transport import LinkError


class MooncakeReceiveSide:
    """D's end of all links: offers its memory; writes need no help.

    Args:
        endpoint: this worker's; may start at its first use, and raises LinkError where it cannot.
    """

    name = "mooncake"
    quarantine_s = 30.0

    def __init__(self, endpoint: Callable[[], MooncakeEndpoint]) -> None:
        self._endpoint = endpoint

    def session(self) -> tuple[str, list[int]]:
        endpoint = self._endpoint()
        return endpoint.session, endpoint.bases

    def scratch(self) -> tuple[int, int]:
        return self._endpoint().scratch

    def attach(self, peer: bytes, hello: wire.Hello, pieces: LinkPieces | None) -> None:
        """One-sided: nothing to map, and P computes where in D's blocks its pieces go."""
        self._endpoint()

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[wire.TransferKey]) -> None:
        raise LinkError("a staged packet on a Mooncake link")

    def probe(self, peer: bytes, probe: wire.Probe) -> None:
        raise LinkError("a staged probe on a Mooncake link")

    def close(self) -> None:
        """The engine lives as long as the worker."""
