"""`python -m tests.soak.kills`: what clients notice while a stage is killed (SIGKILL) every ten seconds, under load.

2E-2P-2D of simulated stages, and with `--real` fewer real ones too, less often; each in turn, and none while another of
its role is down. Text and images, whole answers and streams. An answer of which the client has had nothing can be made
elsewhere, so it may not fail: those that do are `client_errors_under_kills`. A stream that has begun on a decode
instance that dies cannot be taken over; the promise is an error event, no [DONE] and a closed connection. Those are
`streams_cut_by_kills`; one that ends in any other way is a client error.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.clients.answers import ERROR_EVENT
from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.measurement import Goal
from bench.served import Served, groups, served, simulated
from bench.statistic import percentile
from bench.workloads.requests import Poisson, arrivals_within
from bench.workloads.synthetic import image_body, text_body
from epd_serve.errors import StageError
from tests.soak.front_door import counters, held, instances, until
from tests.soak.harness import Result, Soak

PROFILE = {
    "comment": "made up; the load below keeps it about a fifth busy",
    "encode": {"setup_s": 0.02, "per_unit_s": 0.00005},
    "prefill": {"setup_s": 0.01, "per_unit_s": 0.0001},
    "kv": {"setup_s": 0.005, "per_unit_s": 1e-10},
    "decode_step_s": [[1, 0.02], [64, 0.04]],
    "jitter": 0.1,
    "feature_bytes_per_token": 256,
}
EMPTY_S = 20.0
SETTLE_S = 3.0
LOOK_S = 0.1
CUT = ERROR_EVENT
"""The fault of a stream that had begun and ended with an error event, without [DONE]."""


@dataclass(frozen=True)
class Plan:
    """How it is done.

    Attributes:
        every_s: between two kills; up_within_s: how long an instance may take to be back.
        answer: tokens of an answer. side: of the images.
    """

    layout: str
    seconds: float
    every_s: float
    up_within_s: float
    text_per_s: float
    images_per_s: float
    tokens: int
    answer: int
    side: int
    limit_s: float


@dataclass(frozen=True)
class Kill:
    """`at_s`: of `time.perf_counter`."""

    at_s: float
    instance: str


def plan(quick: bool, *, real: bool) -> Plan:
    if real:
        return Plan("1E-2P-2D", 90.0 if quick else 300.0, 20.0, 240.0, 0.7, 0.3, 32, 12, 224, 180.0)
    return Plan("2E-2P-2D", 60.0 if quick else 300.0, 10.0, 60.0, 12.0, 4.0, 100, 12, 336, 60.0)


def measure(arguments: argparse.Namespace) -> Result:
    """Of simulated stages; with `--real` of real ones too, whose figures end in `_real`."""
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for real in (False, True) if arguments.real else (False,):
        found, raw = _measured(plan(arguments.quick, real=real), real=real)
        figures |= {f"{name}_real" if real else name: value for name, value in found.items()}
        rows += [{**row, "real": real} for row in raw]
    return figures, rows, "\n".join(str(row) for row in rows if "kill" in row or "request" in row)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="of real stages too, which takes minutes more")


SOAK = Soak(
    "kills",
    "clients' errors while a stage is killed every ten seconds",
    measure,
    (
        Goal("client_errors_under_kills", "==", 0.0, "nobody loses an answer of which nothing was sent"),
        Goal("client_errors_under_kills_real", "==", 0.0, "with --real"),
        Goal("held_after_kills", "==", 0.0, "no load leaks, whatever the ending"),
    ),
    flags=_flags,
)


def _measured(how: Plan, *, real: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
    stages = served(how.layout, ["--device", "cpu"], traced=False) if real else simulated(how.layout, PROFILE)
    with stages as launch, SenderProcess() as sender:
        retries_before = sum(counters(launch.url, "epd_proxy_retries_total").values())
        sender.start(launch.url, *_flows(launch.model, how), limit_s=how.limit_s)
        kills = list(_killing(launch, how, time.perf_counter()))
        run = sender.finish()
        retries = counters(launch.url, "epd_proxy_retries_total")
        until(lambda: not held(launch.url), EMPTY_S)
        still_held = held(launch.url)
    figures, bad = judged(run.rows, kills)
    figures |= {
        "retries_under_kills": sum(retries.values()) - retries_before,
        "held_after_kills": float(sum(still_held.values())),
    }
    rows: list[dict[str, Any]] = [{"kill": kill.instance, "at": round(kill.at_s - run.begun_s, 3)} for kill in kills]
    rows += [
        {"request": one.kind, "due": round(one.due_s - run.begun_s, 3), "fault": one.fault, "error": one.error}
        for one in bad
    ]
    return figures, [*rows, {"held": still_held, "retries": retries}]


def judged(records: Sequence[RequestRecord], kills: Sequence[Kill]) -> tuple[dict[str, float], list[RequestRecord]]:
    """Returns figures, and the requests that were not answered well."""
    bad = [one for one in records if not one.ok]
    cut = [one for one in bad if one.fault == CUT and one.first_byte_s is not None]
    hit = [any(one.due_s <= kill.at_s <= one.ended_s for kill in kills) for one in records]
    figures = {
        "client_errors_under_kills": float(len(bad) - len(cut)),
        "streams_cut_by_kills": float(len(cut)),
        "kills": float(len(kills)),
        "requests_under_kills": float(len(records)),
        "requests_hit": float(sum(hit)),
    }
    for name, side in (("hit", True), ("other", False)):
        times = [one.e2e_s for one, was_hit in zip(records, hit, strict=True) if was_hit is side and one.ok]
        if times:
            figures |= {f"{name}_whole_p{p}_ms": round(percentile(times, p) * 1e3, 1) for p in (50, 99)}
    return figures, bad


def victim(views: Sequence[Mapping[str, Any]], after: str) -> str | None:
    """Returns the next instance to kill after `after`, in turn, of a role of which all are up and, where another role
    cannot stand in for it, there is another. None while there is none."""
    names: list[str] = sorted((view["id"] for view in views), key=lambda name: (name[1:], name[:1]))  # E0 P0 D0 E1 …
    roles: dict[str, list[bool]] = {}
    for view in views:
        roles.setdefault(view["role"], []).append(view["up"])
    role = {view["id"]: view["role"] for view in views}
    at = names.index(after) + 1 if after in names else 0
    for name in names[at:] + names[:at]:
        ups = roles[role[name]]
        if all(ups) and (len(ups) > 1 or role[name] == "E"):
            return name
    return None


def _killing(launch: Served, how: Plan, begun_s: float) -> Iterator[Kill]:
    """Kill until shortly before the end of the load, which began at `begun_s`."""
    name, due_s, end_s = "", begun_s + SETTLE_S, begun_s + SETTLE_S + how.seconds
    while (due_s := due_s + how.every_s) < end_s:
        time.sleep(max(0.0, due_s - time.perf_counter()))
        name = _next_victim(launch, name, how.up_within_s)
        os.killpg(groups(launch.run.parent)[name], signal.SIGKILL)
        killed_s = time.perf_counter()
        yield Kill(killed_s, name)
        due_s = max(due_s, killed_s - how.every_s)


def _next_victim(launch: Served, after: str, within_s: float) -> str:
    """Waits until there is one. Raises StageError where that takes too long."""
    end = time.monotonic() + within_s
    while (name := victim(instances(launch.url), after)) is None:
        if time.monotonic() >= end:
            raise StageError(f"after the kill of {after} not every role was back in {within_s:g} s", stage=after)
        time.sleep(LOOK_S)
    return name


def _flows(model: str, how: Plan) -> list[Flow]:
    seconds = SETTLE_S + how.seconds + how.every_s
    text_dues, image_dues = (
        arrivals_within(Poisson(rate), seconds, seed) for seed, rate in ((1, how.text_per_s), (2, how.images_per_s))
    )
    texts = [
        text_body(model, tokens=how.tokens, answer=how.answer, stream=bool(turn % 2), seed=turn) for turn in range(32)
    ]
    images = [
        image_body(model, side=how.side, answer=how.answer, stream=bool(turn % 2), seed=turn)
        for turn in range(len(image_dues))
    ]
    return [Flow(requests(texts), "text", dues=text_dues), Flow(requests(images), "image", dues=image_dues)]


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
