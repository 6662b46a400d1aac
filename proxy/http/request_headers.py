"""The headers of a request, looked up by name in one step: each is asked for once, and most are not there."""

from __future__ import annotations

from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Scope

T = TypeVar("T")


class RequestHeaders(Headers):
    """As starlette's, which goes over all of them for every question. `get` gives the first of several."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self._list))

    def get(self, key: str, default: T = None) -> str | T:  # type: ignore[assignment]
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def getlist(self, key: str) -> list[str]:
        return super().getlist(key) if key.lower().encode("latin-1") in self._first else []
