"""`python -m tests.soak.fuzz`: bodies that were good once, sent to every endpoint: no 5xx, no hang.

Behind the real front door stand simulated stages, and real ones with the demo model. The same seed sends the same
bodies. What fails is made smaller, a value at a time, while it fails in the same way, and is a row of the record.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import httpx

from bench.micro.measurement import Goal
from bench.served import Served, served, simulated
from epd_serve.errors import StageError
from tests.proxy.fuzzing import Damage, fault_of, good_bodies, items_of, written
from tests.soak.harness import Result, Soak
from tests.soak.malformed import malformed_requests

BODIES = 20_000
QUICK_BODIES = 2_000
SHARES = {"simulated 2E-2P-2D": 0.25, "real (E-P)-D": 0.75}
DOCUMENTED_SHARE = 0.02
"""Requests that schemathesis makes of the server's own document, which takes it a while: gets and heads, too."""
CLIENTS = 8
HANGS_S = 240.0
"""A request that asks for no end is answered to the end of the context: 3,000 tokens, a minute on two cores."""
HANG = f"no answer in {HANGS_S:g} s"
SMALLER_TRIES = 60
BLANK = b"\r\n\r\n"
FLAGS = ("--proxy", "media.max_items=4")
STAGES: dict[str, Callable[[], AbstractContextManager[Served]]] = {
    "simulated 2E-2P-2D": lambda: simulated("2E-2P-2D", flags=FLAGS),
    "real (E-P)-D": lambda: served("(E-P)-D", ["--device", "cpu", *FLAGS], traced=False),
}


class _Sent(NamedTuple):
    """A body, or where there is no path a whole request, and what came of it. `fault`: see `fault_of`."""

    path: str
    raw: bytes
    status: str
    fault: str


def measure(arguments: argparse.Namespace) -> Result:
    bodies = QUICK_BODIES if arguments.quick else arguments.bodies
    stages = [name for name in STAGES if arguments.stages in name]
    answered: Counter[tuple[str, str, str]] = Counter()  # by stages, endpoint and status
    faults: list[dict[str, Any]] = []
    for name in stages:
        share = SHARES[name] if len(stages) > 1 else 1.0
        with STAGES[name]() as launch, _Fuzz(launch.url, launch.model, name) as fuzz:
            faults += fuzz.run(round(bodies * share), arguments.seed, answered)
    statuses: Counter[str] = Counter()
    for (_, _, status), times in answered.items():
        statuses[status] += times
    figures = {
        "bodies": float(sum(answered.values())),
        "server_errors": float(sum(one["times"] for one in faults if one["fault"] != HANG)),
        "hangs": float(sum(one["times"] for one in faults if one["fault"] == HANG)),
        **{f"answered_{status}": float(times) for status, times in sorted(statuses.items())},
    }
    rows = [
        {"stages": name, "endpoint": endpoint, "status": status, "times": times}
        for (name, endpoint, status), times in sorted(answered.items())
    ]
    return figures, rows + faults, "\n".join(f"{one['stages']}: {one['fault']}\n  {one['body']}" for one in faults)


class _Fuzz:
    """Sends to one server."""

    def __init__(self, url: str, model: str, stages: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=HANGS_S, trust_env=False)
        self._model, self._stages = model, stages

    def __enter__(self) -> _Fuzz:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, bodies: int, seed: int, answered: Counter[tuple[str, str, str]]) -> list[dict[str, Any]]:
        """Returns what failed, each way of failing once. Adds to `answered` what was answered."""
        self._all_good("before")
        damage = Damage(self._model, seed)
        found: dict[str, dict[str, Any]] = {}
        documented = malformed_requests(str(self._client.base_url), int(bodies * DOCUMENTED_SHARE))
        with ThreadPoolExecutor(CLIENTS) as clients:
            damaged = (damage.next() for _ in range(bodies - len(documented)))
            sent = itertools.chain(clients.map(self._sent_raw, documented), clients.map(self._sent, damaged))
            for number, (endpoint, raw, status, fault) in enumerate(sent, 1):
                answered[self._stages, endpoint, status] += 1
                if fault:
                    first = {"stages": self._stages, "endpoint": endpoint, "fault": fault, "raw": raw, "times": 0}
                    found.setdefault(_kind(fault), first)["times"] += 1
                if number % 1000 == 0:
                    print(f"{self._stages}: {number} bodies, {len(found)} ways of failing", file=sys.stderr)
        for kind, row in found.items():
            row["body"] = self._smaller(row["endpoint"], row.pop("raw"), kind).decode("latin-1")
        self._all_good("after")
        return list(found.values())

    def _all_good(self, when: str) -> None:
        answers = [self._client.post(one.value, json=body) for one, body in good_bodies(self._model)]
        if refused := [one.text for one in answers if one.status_code != 200]:
            raise StageError(f"{when} the fuzz good bodies are refused: {'; '.join(refused)}", stage="")

    def _sent(self, one: tuple[str, bytes]) -> _Sent:
        path, raw = one
        try:
            answer = self._client.post(path, content=raw, headers={"content-type": "application/json"})
        except httpx.TimeoutException:
            return _Sent(path, raw, "none", HANG)
        except httpx.TransportError as error:
            return _Sent(path, raw, "broken", f"a broken connection: {error}")
        return _Sent(path, raw, str(answer.status_code), fault_of(answer))

    def _sent_raw(self, request: bytes) -> _Sent:
        """A whole request, on a connection of its own."""
        url = self._client.base_url
        try:
            with (
                socket.create_connection((url.host, url.port), HANGS_S) as connection,
                connection.makefile("rb") as all,
            ):
                connection.sendall(request)
                answer = all.read()
        except TimeoutError:
            return _Sent("", request, "none", HANG)
        except OSError as error:
            return _Sent("", request, "broken", f"a broken connection: {error}")
        status = answer.partition(b" ")[2][:3].decode("latin-1")
        bad = not status.isdigit() or int(status) >= 500
        return _Sent("", request, status, f"{status} {answer.partition(BLANK)[2][:500]!r}" if bad else "")

    def _smaller(self, path: str, raw: bytes, kind: str) -> bytes:
        """A body that fails in the same way, with as little in it as a few tries leave."""
        try:
            body = json.loads(raw) if path and kind != _kind(HANG) else None
        except (ValueError, RecursionError):
            return raw
        tries = 0
        while isinstance(body, dict):
            for smaller in _without_one(body):
                tries += 1
                if tries > SMALLER_TRIES:
                    return written(body)
                if _kind(self._sent((path, written(smaller))).fault) == kind:
                    body = smaller
                    break
            else:
                return written(body)
        return raw


def _kind(fault: str) -> str:
    """What two faults have in common that are one."""
    return re.sub(r"[A-Z]*\d+", "", fault)[:160]


def _without_one(holder: Any) -> Iterator[Any]:
    """`holder` without one of its values, or of those within, each in turn."""
    for key, _ in items_of(holder):
        smaller = copy.copy(holder)
        del smaller[key]
        yield smaller
    for key, one in items_of(holder):
        if isinstance(one, dict | list):
            for inner in _without_one(one):
                smaller = copy.copy(holder)
                smaller[key] = inner
                yield smaller


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bodies", type=int, default=BODIES, help="in all; with --quick %(default)s are " + str(QUICK_BODIES)
    )
    parser.add_argument("--seed", type=int, default=1, help="the same one sends the same bodies")
    parser.add_argument(
        "--stages", default="", metavar="WORD", help="only behind stages whose name has the word: simulated, real"
    )


SOAK = Soak(
    "fuzz",
    "no body is answered with a 5xx, and none hangs",
    measure,
    (Goal("bodies", ">=", 1.0), Goal("server_errors", "==", 0.0), Goal("hangs", "==", 0.0)),
    flags=_add_flags,
    kind="simulated stages and real ones, real front door",
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
