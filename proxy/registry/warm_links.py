"""When the KV links between two stages are warm: part of being ready, for a first transfer costs seconds more. Pure.

Senders open and probe their links by themselves and report them (`epd_serve.wire.KvReport`). A pair of healthy stages
is warm when all workers of the sender have reported in this incarnation, and no link of theirs to the other one is
still being opened. Links that nobody reports are not waited for: a sender that tells no news, or a receiver that
came after the sender and that it meets with its first transfer. The status table asks this at the start of an
incarnation only, and for `GRACE_S` at most (`proxy/registry/table.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from epd_serve.instances import Instance
from epd_serve.wire import KvLink, KvReport

GRACE_S = 15.0


def leads_to(link: KvLink, receiver: Instance) -> bool:
    """A link is named by its address until the other end has answered."""
    return link.peer == receiver.id or link.peer in receiver.kv_workers


def why_cold(sender: Instance, reports: Mapping[int, KvReport], receiver: Instance) -> str:
    """The link that is not up and why, or "" where there is nothing to wait for.

    Args:
        reports: the last ones of this incarnation of the sender, by rank of its workers.
    """
    if not (sender.role.sends_kv and receiver.role.takes_kv):
        return ""
    for rank in range(len(sender.kv_news)):
        worker = f"{sender.id} rank {rank}"
        if rank not in reports:
            return f"{worker} has not reported its KV links"
        for link in reports[rank].links:
            if link.state != "up" and leads_to(link, receiver):
                reason = f" ({link.reason})" if link.reason else ""
                return f"KV link from {worker} to {receiver.id} rank {link.rank} is {link.state}{reason}"
    return ""
