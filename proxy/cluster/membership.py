"""Who belongs to the cluster: joins checked, names given, silence noticed. The HTTP side is `routes.py`.

A member's life in one table:

    (unknown) --join--> JOINED, down --beat up--> up --beat down | silence--> down --beat up--> up
    JOINED --leave--> LEAVING, down --drained--> (unknown)         JOINED --FORGET_S of silence--> (unknown)

The instance table carries what requests see (up, down, incarnation); this file adds who may speak for an instance.
What is compared at a join is in `compatibility.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from epd_serve.cluster import (
    MAX_DRAIN_S,
    MISSED_S,
    NAME,
    Beat,
    ClusterSettings,
    JoinAnswer,
    JoinRefusedError,
    JoinRequest,
    Leave,
    NotAMemberError,
)
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wiring import worker_endpoints
from proxy.cluster.compatibility import ClusterIdentity, check_admission
from proxy.registry.table import InstanceTable

logger = logging.getLogger(__name__)

FORGET_S = 600.0
"""Silence after which a member's name is free and it no longer counts in /health."""

_DRAIN_POLL_S = 0.05


@dataclass(eq=False)
class _Member:
    request: JoinRequest
    id: str
    last_beat_at: float
    number: int = 0
    incarnation: str = ""
    silent: bool = False
    leaving: bool = False


class Membership:
    """Members by name. Called from the proxy's event loop only, as the table is.

    Args:
        identity: what a member must serve. settings: what it is told. now: the clock.
    """

    def __init__(
        self,
        table: InstanceTable,
        identity: ClusterIdentity,
        settings: ClusterSettings,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._identity = identity
        self._settings = settings
        self._now = now
        self._members: dict[str, _Member] = {}

    def join(self, request: JoinRequest, caller: str = "") -> JoinAnswer:
        """Admit a stage, or admit it again after it or this head was restarted.

        Args:
            caller: address that the request came from, "" when it is not known.

        Raises:
            JoinRefusedError: names what differs.
        """
        check_admission(request, self._identity, {one.id: one.request for one in self._present(request)}, caller)
        name = self._name(request)
        for former in list(self._members.values()):
            # Who had this name is silent (see `_name`); who had this address is dead, whatever its role was.
            if former.request.agent != request.agent and (former.id == name or former.request.url == request.url):
                logger.warning("%s at %s takes the place of %s at %s", name, request.url, former.id, former.request.url)
                self._forget(former)
        member = self._members[name] = _Member(request, name, self._now(), incarnation=request.incarnation)
        self._table.apply(self._instance(member), up=False)
        takers = [other.request for other in self._members.values() if other.request.role.takes_kv]
        peers = [worker_endpoints(taker.kv_workers, taker.tp) for taker in takers]
        return JoinAnswer(name, self._settings, peers if request.role.sends_kv else [])

    def beat(self, beat: Beat) -> None:
        """A member lives. Raises NotAMemberError, JoinRefusedError (its incarnation has no name)."""
        member = self._speaker(beat.id, beat.agent)
        if beat.incarnation and not NAME.fullmatch(beat.incarnation):
            raise JoinRefusedError("the incarnation is no name", code="bad_name")
        if beat.number <= member.number or member.leaving:
            return
        member.number, member.last_beat_at, member.silent = beat.number, self._now(), False
        if beat.incarnation != member.incarnation:
            member.incarnation = beat.incarnation
            self._table.apply(self._instance(member), up=False)
        if beat.up:
            self._table.mark_up(member.id)
        else:
            self._table.mark_down(member.id, beat.reason)

    async def leave(self, leave: Leave) -> bool:
        """Send the member nothing more, wait for what it has, forget it.

        Returns:
            Whether everything in flight ended in time.

        Raises:
            NotAMemberError.
        """
        member = self._speaker(leave.id, leave.agent)
        member.leaving = True
        self._table.mark_down(member.id, "leaving")
        until = self._now() + min(max(leave.drain_s, 0.0), MAX_DRAIN_S)
        while self._members.get(member.id) is member:
            if not self._in_flight(member.id) or self._now() >= until:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        else:
            return False  # replaced meanwhile: what is left of it is not ours to forget
        drained = not self._in_flight(member.id)
        self._forget(member)
        return drained

    def notice_silence(self) -> None:
        """Mark down who missed its beats, forget who has been silent for long. Call about once a second."""
        for member in list(self._members.values()):
            silence = self._now() - member.last_beat_at
            if silence > FORGET_S:
                logger.warning("%s is forgotten after %.0f s of silence", member.id, silence)
                self._forget(member)
            elif silence > MISSED_S and not member.silent and not member.leaving:
                member.silent = True
                logger.warning("%s at %s is silent", member.id, member.request.url)
                self._table.mark_down(member.id, f"no beat for {MISSED_S:.0f} s")

    # --- names ----------------------------------------------------------------------------------------------------

    def _name(self, request: JoinRequest) -> str:
        """The wanted name if it is free, the name of the one whose address it has taken over, else the next free."""
        name = request.instance
        if name:
            holder = self._members.get(name)
            if holder is None or self._gives_way(holder, request):
                return name
            if request.instance_fixed:
                raise JoinRefusedError(
                    f"the name {name} belongs to the stage at {holder.request.url}, which lives; choose another "
                    "with --instance, or leave it out",
                    param="--instance",
                    code="name_taken",
                )
        for member in self._members.values():
            if member.request.role is request.role and member.request.url == request.url:
                return member.id
        return next(name for name in _names(request.role) if name not in self._members)

    @staticmethod
    def _gives_way(holder: _Member, request: JoinRequest) -> bool:
        # Two processes cannot listen on one address: the one that joins now is the one that lives.
        same = holder.request.agent == request.agent or holder.request.url == request.url
        return same or holder.silent or holder.leaving

    def _speaker(self, name: str, agent: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise NotAMemberError(f"no member is called {name}; join again")
        if member.request.agent != agent:
            raise NotAMemberError(f"{name} is the stage at {member.request.url} now; join again")
        return member

    def _forget(self, member: _Member) -> None:
        del self._members[member.id]
        self._table.remove(member.id)

    def _in_flight(self, name: str) -> int:
        return next((sum(v.in_flight.values()) for v in self._table.snapshot() if v.instance.id == name), 0)

    def _instance(self, member: _Member) -> Instance:
        request = member.request
        role, bus = request.role, self._settings.events_listen
        concerned = role.sends_features or role.takes_features
        return Instance(
            id=member.id,
            role=role,
            url=request.url,
            incarnation=member.incarnation,
            kv_endpoint=request.kv_endpoint or None,
            events=bus if concerned else None,
            devices=tuple(request.devices),
            node=request.host,
            cpu_cores=tuple(request.cpu_cores),
            kv_news=(bus,) * request.tp if role.sends_kv else (),
            kv_workers=worker_endpoints(request.kv_workers, request.tp),
            load_news=bus,
            answer_flags=request.answer_flags,
        )

    # --- who is here ------------------------------------------------------------------------------------------------

    def _present(self, request: JoinRequest) -> list[_Member]:
        """Members but for the one that asks or is about to be replaced, and those that are gone for all we know."""
        return [
            member
            for member in self._members.values()
            if not (member.silent or member.leaving or self._gives_way(member, request))
        ]


def _names(role: Role) -> Iterator[str]:
    return (f"{role.value}{number}" for number in count())
