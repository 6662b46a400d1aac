"""Pick the instances of one attempt, and wait for a missing role: the table meets the policies here."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from epd_serve.errors import NoInstanceError, RequestError
from epd_serve.roles import Role
from proxy.life import Lease, Work
from proxy.paths import Path, paths
from proxy.policy import Candidate, least_loaded
from proxy.table import InstanceTable

Life = tuple[str, str]  # (instance id, incarnation)


@dataclass(frozen=True)
class Route:
    """The instances of one attempt, already counted as busy. Whoever holds it releases it."""

    path: Path
    prefill: Lease | None
    decode: Lease

    def release(self) -> None:
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()


class Router:
    """Routes over the instances of one table. `layout` holds the configured roles, or is empty."""

    def __init__(self, table: InstanceTable, layout: Collection[Role], *, instance_wait_s: float) -> None:
        self._table = table
        self._layout = frozenset(layout)
        self._instance_wait_s = instance_wait_s

    def check_servable(self, *, fused_for: str | None) -> None:
        """Refuse what no instance of the layout could ever serve. Raises RequestError naming the field."""
        roles = self._layout or self._table.roles()
        if fused_for is not None and roles and not paths(roles, multimodal=False, fused=True):
            raise RequestError(
                f"{fused_for} needs an instance that prefills and decodes; this layout has none.", param=fused_for
            )

    @property
    def encodes_apart(self) -> bool:
        """The layout has encoders of its own, and no path of it encodes within the prefilling instance's duty."""
        roles = self._layout or self._table.roles()
        found = paths(roles, multimodal=True)
        return bool(found) and found[0].encode

    async def route(self, *, multimodal: bool, fused: bool, avoid: Collection[Life] = ()) -> Route:
        """The least loaded way through the live instances, preferring lives not in `avoid`.

        Waits up to `instance_wait_s` for a missing role. Raises NoInstanceError after that.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._instance_wait_s
        while (found := self._pick(multimodal, fused, avoid)) is None:
            if not await self._table.changed(until - loop.time()):
                missing = ", ".join(self._table.missing(self._layout)) or "an instance"
                raise NoInstanceError(f"no live instance: {missing} is missing; try again later")
        path, prefill, decode = found
        return Route(
            path,
            self._table.acquire(prefill.id, Work.PREFILL) if prefill is not None else None,
            self._table.acquire(decode.id, Work.DECODE),
        )

    def has_alternative(self, *, multimodal: bool, fused: bool, avoid: Collection[Life]) -> bool:
        """True when an attempt that touches no life in `avoid` is possible right now."""
        found = self._pick(multimodal, fused, avoid)
        return found is not None and not any(part is not None and part.life in avoid for part in found[1:])

    def _pick(
        self, multimodal: bool, fused: bool, avoid: Collection[Life]
    ) -> tuple[Path, Candidate | None, Candidate] | None:
        best: tuple[tuple[int, float], tuple[Path, Candidate | None, Candidate]] | None = None
        live = self._table.live_roles()
        known = self._layout or self._table.roles()
        # E counts as present while the layout has one: the encode step itself copes with none being up.
        roles = live | (known & {Role.E})
        for path in paths(roles, multimodal=multimodal, fused=fused):
            prefill = least_loaded(self._table.live(path.prefill), avoid) if path.prefill is not None else None
            decode = least_loaded(self._table.live(path.decode), avoid)
            assert decode is not None, "paths() only builds from live roles"
            parts = [part for part in (prefill, decode) if part is not None]
            cost = (sum(part.life in avoid for part in parts), max(part.load for part in parts))
            if best is None or cost < best[0]:
                best = (cost, (path, prefill, decode))
        return best[1] if best is not None else None
