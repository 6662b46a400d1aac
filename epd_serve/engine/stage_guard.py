"""Keeps strangers off a stage that other machines can reach: an ASGI middleware for vLLM's `--middleware`.

vLLM's own API key guards paths under /v1 and a few more; /invocations, which can generate, /tokenize and /metrics stay
open. Here every path but /health wants the key. It comes by the environment, as vLLM's does: argv is world-readable.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_ENV = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_REFUSAL = json.dumps(
    {"error": {"message": "This stage answers its proxy only.", "type": "authentication_error", "code": 401}}
).encode()


class StageGuard:
    """Raises RuntimeError at start when there is no key: a stage must not come up unguarded."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        key = os.environ.get(KEY_ENV)
        if not key:
            raise RuntimeError(f"a guarded stage needs {KEY_ENV} in its environment")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: _Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
