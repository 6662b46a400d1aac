"""A running deployment as its operator commands it, over HTTP. Locally by the socket in its run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx

from bench.served import Served
from deploy.host.launches import ADMIN_SOCKET
from epd_serve.errors import StageError
from epd_serve.layout_parser import parse

LOOK_S = 0.05
ANSWER_S = 60.0


class Deployment:
    """Use as `with commanded(launch) as deployment`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def status(self) -> dict[str, Any]:
        return self._get("/deployment")

    def decisions(self) -> list[dict[str, Any]]:
        """What the follower of the load has decided, the newest first; nothing where it is not followed."""
        told: list[dict[str, Any]] = self._get("/deployment/decisions")["decisions"]
        return told

    def relayout(self, layout: str, pause_s: float = 0.0) -> dict[str, Any]:
        """The change, when it is over; with `refused` where it was not begun."""
        return self._changed("/deployment/layout", {"layout": layout, "pause_s": pause_s})

    def scale(self, counts: dict[str, int]) -> dict[str, Any]:
        """As `relayout`; with `client_s`, from the command to its end as whoever asked sees it."""
        return self._changed("/deployment/scale", {"counts": counts}, look_s=0.002)

    def whole(self, within_s: float) -> None:
        """Wait until every instance is there and up, and no change under way. Raises StageError."""
        end = time.monotonic() + within_s
        while True:
            status = self.status()
            up = [one["id"] for one in status["instances"] if one["phase"] == "up"]
            if len(up) == parse(status["layout"]).instance_count and status["state"] == "steady":
                return
            if time.monotonic() > end:
                seen = [f"{one['id']}: {one['phase']}, {one['reason']}" for one in status["instances"]]
                state = f"{status['layout']} is {status['state']} {status['trouble']}"
                raise StageError(f"not whole after {within_s:g} s: {state}; {'; '.join(seen)}", stage="deployment")
            time.sleep(LOOK_S)

    def emptied(self, within_s: float) -> int:
        """Wait until no request holds an instance. Returns how many do then."""
        end = time.monotonic() + within_s
        while (held := self._held()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        return held

    def _held(self) -> int:
        return sum(int(one["in_flight"]) for one in self.status()["instances"])

    def _changed(self, path: str, body: dict[str, Any], look_s: float = LOOK_S) -> dict[str, Any]:
        begun = time.perf_counter()
        answer = self._http.post(path, json=body)
        if answer.status_code >= 400:
            return {"refused": answer.json()["error"]["message"], "seconds": 0.0, "paused_s": 0.0, "steps": []}
        change: dict[str, Any] = answer.json()["change"]
        while not change["over"]:
            time.sleep(look_s)
            change = self._get(f"/deployment/changes/{change['number']}")
        return {**change, "client_s": time.perf_counter() - begun}

    def _get(self, path: str) -> dict[str, Any]:
        """Asks again where the controller has died meanwhile: the next one answers the same."""
        end = time.monotonic() + ANSWER_S
        while True:
            try:
                answer = self._http.get(path)
                break
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise StageError(
                        f"{path} has no answer for {ANSWER_S:g} s: {error!r}", stage="deployment"
                    ) from error
                time.sleep(LOOK_S)
        if answer.status_code != 200:
            raise StageError(f"{path} answers {answer.status_code}: {answer.text[:200]}", stage="deployment")
        told: dict[str, Any] = answer.json()
        return told


@contextlib.contextmanager
def commanded(launch: Served) -> Iterator[Deployment]:
    """The deployment that was launched on this machine."""
    transport = httpx.HTTPTransport(uds=str(launch.run / ADMIN_SOCKET))
    with httpx.Client(transport=transport, base_url="http://deployment", timeout=ANSWER_S) as http:
        yield Deployment(http)
