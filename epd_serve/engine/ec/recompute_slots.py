"""How many requests recompute lost features at one time, and who is next. Pure.

A slow or dead encoder must not turn every P into an encoder. A request holds at most one slot, however
many features it lost. Slots go out in the order in which requests first asked and come back by `give_back`: when the
request finishes, is aborted, has its prefill behind it, or its features came after all.
"""

from __future__ import annotations


class RecomputeSlots:
    """At most `limit` requests hold a slot; the rest stand in line."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, "without a slot, a request with a lost feature would wait for ever"
        self._limit = limit
        self._line: dict[str, None] = {}  # in order of arrival
        self._holders: set[str] = set()

    @property
    def taken(self) -> int:
        return len(self._holders)

    @property
    def standing(self) -> int:
        """Requests in line."""
        return len(self._line)

    def claim(self, request: str) -> bool:
        """Whether the request has a slot; if not, it stands in line from now on."""
        if request not in self._holders:
            self._line[request] = None
            self._serve_line()
        return request in self._holders

    def give_back(self, request: str) -> bool:
        """The request holds no slot and stands in no line any more. True when that gave somebody else a slot."""
        self._line.pop(request, None)
        self._holders.discard(request)
        return self._serve_line()

    def _serve_line(self) -> bool:
        served = False
        while self._line and len(self._holders) < self._limit:
            first = next(iter(self._line))
            del self._line[first]
            self._holders.add(first)
            served = True
        return served
