"""The KV links of the layout as their senders report them, and what their counters say of each. Pure.

The figures are means since the start of the sending worker. Rates over a time are for whoever
reads the counters twice (`proxy/registry/stage_metrics.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from epd_serve.wire import KvLink
from proxy.registry.instance_state import InstanceView
from proxy.registry.warm_links import leads_to


@dataclass(frozen=True)
class LinkView:
    """One link. `rank`: of the sender's worker. `peer`: instance that it leads to, or its address if nobody has it."""

    sender: str
    rank: int
    peer: str
    link: KvLink

    @property
    def layers_per_packet(self) -> float | None:
        """The mean g. None, as all below, while there is nothing to take it of."""
        return _ratio(self.link.layers, self.link.packets)

    @property
    def bytes_per_s(self) -> float | None:
        """While packets moved."""
        return _ratio(self.link.bytes, self.link.busy_s)

    @property
    def exposed_s(self) -> float | None:
        """Per transfer, from the end of its prefill to DONE."""
        return _ratio(self.link.exposed_s, self.link.transfers)

    @property
    def overlap(self) -> float | None:
        """1 - exposed / transfer time; 0 where transfers waited for longer than their packets took."""
        exposed = _ratio(self.link.exposed_s, self.link.transfer_s)
        return max(0.0, 1.0 - exposed) if exposed is not None else None


def link_views(views: Iterable[InstanceView]) -> Iterator[LinkView]:
    """All links that are reported, peers by their names."""
    instances = list(views)
    for view in instances:
        for report in view.kv:
            for link in report.links:
                names = (other.instance.id for other in instances if leads_to(link, other.instance))
                yield LinkView(view.instance.id, report.rank, next(names, link.peer), link)


def link_fields(one: LinkView) -> dict[str, Any]:
    """A link as `/instances` shows it."""
    link, speed, exposed_s = one.link, one.bytes_per_s, one.exposed_s
    return {
        "rank": one.rank,
        "peer": one.peer,
        "peer_rank": link.rank,
        "state": link.state,
        "reason": link.reason,
        "transport": link.transport,
        "transfers": link.transfers,
        "failed": link.failed,
        "cancelled": link.cancelled,
        "retries": link.retries,
        "packets": link.packets,
        "bytes": link.bytes,
        "queued_bytes": link.queued_bytes,
        "layers_per_packet": _rounded(one.layers_per_packet, 2),
        "gb_per_s": _rounded(speed / 1e9 if speed is not None else None, 3),
        "exposed_ms": _rounded(exposed_s * 1e3 if exposed_s is not None else None, 3),
        "overlap": _rounded(one.overlap, 4),
    }


def _ratio(amount: float, of: float) -> float | None:
    return amount / of if of > 0 else None


def _rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None else None
