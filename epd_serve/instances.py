"""What the launcher tells the proxy about one running instance. Immutable; a restart makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.roles import Role
from npu_ops.core_grants import CoreGrant

IncarnationId = tuple[str, str]
"""(instance id, incarnation)"""

KEEP_ALIVE_S = 75
"""How long a stage's server keeps a connection on which nothing is asked: its user, the proxy, closes it before."""


@dataclass(frozen=True)
class Instance:
    """One stage server.

    Attributes:
        id: name within the launch, e.g. `P0`; stable across restarts.
        role: stages it runs.
        url: of its OpenAI server, `unix:/PATH` or `http://HOST:PORT` (`epd_serve.endpoint`); its only client is the
            proxy.
        incarnation: hex id of this run of the process; changes at every restart and tags transfers, so that late
            messages of the previous run are recognised.
        kv_endpoint: ZMQ address where this instance takes READY (only roles that send KV), else None.
        events: ZMQ address on which it announces (`epd_serve.wire.Announcement`), else None.
        node: where it is.
        devices: ids, of that node, which it occupies, in order; co-located instances name the same one.
        cpu_cores: on CPU the cores that its devices are; virtual devices may share them.
        kv_news: ZMQ addresses on which its workers report their KV links, by rank (only roles that send KV).
        load_news: ZMQ address on which its scheduler reports how busy it is, else None.
        core_share: its part of its devices' cores, or None for no limit.
        cores: what its workers got, by rank, once they have said so.
        kv_workers: ZMQ addresses on which its workers take KV, by rank (only roles that take KV).
        answer_flags: of its vLLM (`epd_serve.answer_flags`), or None where it has no part in answers of two instances.
    """

    id: str
    role: Role
    url: str
    incarnation: str
    kv_endpoint: str | None = None
    events: str | None = None
    devices: tuple[int, ...] = ()
    kv_news: tuple[str, ...] = ()
    kv_workers: tuple[str, ...] = ()
    load_news: str | None = None
    core_share: float | None = None
    cores: tuple[CoreGrant, ...] = ()
    cpu_cores: tuple[int, ...] = ()
    answer_flags: tuple[str, ...] | None = None
    node: str = "local"

    @property
    def incarnation_id(self) -> IncarnationId:
        """Names this run of this instance among all runs of all instances."""
        return (self.id, self.incarnation)

    @property
    def both_halves(self) -> bool:
        """It sends KV as well as it takes it: P or D by its role, which may change while it runs."""
        return self.kv_endpoint is not None and bool(self.kv_workers)

    @property
    def computes_on(self) -> frozenset[tuple[str, str, int]]:
        """Names of what it computes on: two instances with one in common slow each other down. None where it has a
        share of cores to itself."""
        if self.core_share is not None:
            return frozenset()
        kind, numbers = ("core", self.cpu_cores) if self.cpu_cores else ("device", self.devices)
        return frozenset((self.node, kind, number) for number in numbers)
