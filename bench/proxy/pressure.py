"""What order and room in front of the stages do when there is more work than time: loads over simulated stages.

mixed: prompts of 32,000 and 500 tokens, half of all tokens each, at 0.9 of what four P compute. How much of them is
used: tokens computed within the window over those that could have been, where one P computes a prompt in one piece
before its first token.

deadlines: requests with 1 to 16 images at 0.8, 1.0 and 1.2 of what four E encode, each with a limit for its first token
of three times what it takes alone. The share that keep it, in the order of deadlines and in order of arrival
(`admission.order=fcfs`).

real: the same of 1 to 4 images on stages that run, one encoder beside a PD, as many as they can.

videos: texts and small images, each alone and then beside clips: an item of 6,400 tokens that cannot be cut (here a
large image has as many). The p99 of the first token of text and small images beside clips over that alone, the worse.

tenants: one sends ten times its share of what two P compute, the other 0.8 of its own. The other's p99 over that of the
same requests alone.

cost: what the decisions take of the proxy's time for a request (`door_cost.py`).

Arrivals are Poisson given their number, so that every run offers the same work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow, Run
from bench.clients.target import Request
from bench.micro.measurement import Goal, Row
from bench.micro.rows import grouped, median
from bench.proxy.door_cost import costs
from bench.served import Served, served, simulated
from bench.statistic import percentile
from bench.workloads.synthetic import image_body, text_body

ANSWER = 4
RATE = 10_000.0  # prompt tokens a second and P
PREFILL = {
    "prefill": {"setup_s": 0.0, "per_unit_s": 1 / RATE},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
    "capacity": {"max_running": 64, "step_tokens": 2048, "kv_tokens": 262_144},
}
LONG, SHORT, MIXED_LOAD, PREFILLERS = 32_000, 500, 0.9, 4
IMAGE_SIDE, IMAGE_TOKENS, IMAGE_S, MOST_IMAGES, ENCODERS = 448, 256, 0.08, 16, 4
LARGE_SIDE, FEW_IMAGES = 896, 4
ENCODE = {
    **PREFILL,
    "encode": {"setup_s": 0.0, "per_unit_s": IMAGE_S / IMAGE_TOKENS},
    "prefill": {"setup_s": 0.002, "per_unit_s": 0.000002},
    "feature_bytes_per_token": 64,
    "capacity": {"max_running": 64, "step_tokens": 8192, "kv_tokens": 262_144, "encoder_tokens": IMAGE_TOKENS},
}
CLIP_SIDE, CLIP_S, CLIP_LOAD, SMALL_LOAD, TEXT_RPS = 2240, 2.0, 0.4, 0.25, 8.0
LOADS = (0.8, 1.0, 1.2)
SLO_FACTOR = 3.0
ORDERS = {"fcfs": ("--proxy", "admission.order=fcfs"), "deadline": ()}
TENANT, TENANT_TOKENS, TENANT_PREFILLERS, SHARE = "x-tenant", 1000, 2, 0.5
QUIET_LOAD, LOUD_LOAD = 0.8 * SHARE, 10 * SHARE

GOALS = (
    Goal("prefill_utilisation_mixed", ">=", 0.85, "0.9 is offered"),
    Goal("short_prompt_p99_ratio", "<=", 2.0, "the same, beside long ones over alone"),
    Goal("slo_points_over_fcfs", ">=", 20.0, "as many as are offered can be encoded"),
    Goal("longest_over_fcfs", "<=", 1.5, "the same: the longest wait"),
    Goal("small_beside_video_p99_ratio", "<=", 1.5, "text and small images"),
    Goal("other_tenant_p99_ratio", "<=", 1.3, "one tenant at ten times its share"),
    Goal("decisions_us", "<=", 20.0, "of the proxy's time, for each request"),
)


def measure(sender: SenderProcess, part: str, quick: bool) -> Iterator[Row]:
    """Rows of `part` (`PARTS`)."""
    yield from ({**row, "part": part} for row in PARTS[part](sender, quick))


def dues(count: float, seconds: float, seed: str) -> list[float]:
    """Moments of so many independent arrivals."""
    drawn = random.Random(seed)
    return sorted(drawn.uniform(0.0, seconds) for _ in range(round(count)))


def _mixed(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds = 45.0 if quick else 120.0
    with simulated(f"{PREFILLERS}P-D", PREFILL) as launch:
        flows, half = [], MIXED_LOAD * PREFILLERS * RATE * seconds / 2
        for kind, tokens in (("long", LONG), ("short", SHORT)):
            at = dues(half / tokens, seconds, kind)
            bodies = [
                text_body(launch.model, tokens=tokens, answer=ANSWER, stream=True, seed=n) for n in range(len(at))
            ]
            flows.append(Flow([*map(Request.of, bodies)], kind, dues=at))
        alone = sender.run(launch.url, flows[1])
        run = sender.run(launch.url, *flows)
    yield {"kind": "short alone", **counted(alone.rows)}
    sizes = {"long": LONG, "short": SHORT}
    begin_s, end_s = run.begun_s + seconds / 6, run.begun_s + seconds
    done = sum(computed_within(one, sizes[one.kind] / RATE, begin_s, end_s) for one in run.rows)
    for kind in sizes:
        own = [one for one in run.rows if one.kind == kind]
        yield {
            "kind": kind,
            **counted(own),
            "utilisation": round(done / (PREFILLERS * (end_s - begin_s)), 4),
        }


def computed_within(record: RequestRecord, service_s: float, begin_s: float, end_s: float) -> float:
    """Seconds of its prefill that lie within the window, if that took `service_s` until its first byte."""
    if not record.ok or record.first_byte_s is None:
        return 0.0
    return max(0.0, min(record.first_byte_s, end_s) - max(record.first_byte_s - service_s, begin_s))


def _deadlines(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, loads = (25.0, (1.0,)) if quick else (60.0, LOADS)
    for order, flags in ORDERS.items():
        with simulated(f"{ENCODERS}E-P-D", ENCODE, flags) as launch:
            rates_rps = {load: load * ENCODERS / IMAGE_S / ((1 + MOST_IMAGES) / 2) for load in loads}
            for row in _ordered(sender, launch, iter(range(1_000_000)), rates_rps, seconds, MOST_IMAGES):
                yield {"order": order, **row}


def _real(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rate_rps = 60.0 if quick else 180.0, 0.0
    for order, flags in ORDERS.items():
        with served("E-PD", flags) as launch:
            fresh = iter(range(1_000_000))
            if not rate_rps:  # the same work for both
                requests = [_images(launch, n % FEW_IMAGES + 1, fresh, side=LARGE_SIDE) for n in range(64)]
                closed = sender.run(launch.url, Flow(requests, concurrency=8, count=48), within_s=120.0)
                rate_rps = len(closed.rows) / (closed.ended_s - closed.begun_s)
            for row in _ordered(sender, launch, fresh, {1.0: rate_rps}, seconds, FEW_IMAGES, LARGE_SIDE):
                yield {"order": order, **row}


def _ordered(
    sender: SenderProcess,
    launch: Served,
    fresh: Iterator[int],
    rates_rps: Mapping[float, float],
    seconds: float,
    most: int,
    side: int = IMAGE_SIDE,
) -> Iterator[Row]:
    """How a deployment does at each load, of which the rates are given: requests with 1 to `most` images."""
    alone = _alone_s(sender, launch, fresh, most, side)
    for load, rate_rps in rates_rps.items():
        at = dues(rate_rps * seconds, seconds, f"deadlines {load}")
        counts = [n % most + 1 for n in range(len(at))]
        random.Random(f"images {load}").shuffle(counts)
        slos = [SLO_FACTOR * alone[count] for count in counts]
        requests = [_images(launch, count, fresh, slo_s, side) for count, slo_s in zip(counts, slos, strict=True)]
        run = sender.run(launch.url, Flow(requests, "images", dues=at), limit_s=120.0)
        kept = [one.wait_s() <= slos[one.n] for one in run.rows]
        yield {"load": load, **counted(run.rows), "attained": round(sum(kept) / len(kept), 4)}


def _alone_s(sender: SenderProcess, launch: Served, fresh: Iterator[int], most: int, side: int) -> dict[int, float]:
    """Seconds until the first token of a request with so many images, on an idle deployment."""
    found = {}
    for count in range(1, most + 1):
        requests = [_images(launch, count, fresh, side=side) for _ in range(3)]
        rows = sender.run(launch.url, Flow(requests, concurrency=1, count=3), within_s=60.0).rows
        found[count] = min(row.wait_s() for row in rows)
    return found


def _images(
    launch: Served, count: int, fresh: Iterator[int], slo_s: float | None = None, side: int = IMAGE_SIDE
) -> Request:
    seeds = [next(fresh) for _ in range(count)]
    body = image_body(launch.model, side=side, answer=ANSWER, stream=True, seed=seeds[0], more=seeds[1:])
    return Request.of(body, headers={"x-epd-slo-ttft-ms": f"{slo_s * 1e3:.0f}"} if slo_s is not None else {})


def _videos(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds = 30.0 if quick else 90.0
    with simulated(f"{ENCODERS}E-P-D", ENCODE) as launch:
        fresh = iter(range(1_000_000))

        def images(kind: str, side: int, rate_rps: float) -> Flow:
            at = dues(rate_rps * seconds, seconds, kind)
            bodies = [image_body(launch.model, side=side, answer=ANSWER, stream=True, seed=next(fresh)) for _ in at]
            return Flow([*map(Request.of, bodies)], kind, dues=at)

        def few() -> list[Flow]:
            at = dues(TEXT_RPS * seconds, seconds, "text")
            texts = [text_body(launch.model, tokens=SHORT, answer=ANSWER, stream=True, seed=next(fresh)) for _ in at]
            small = images("small", IMAGE_SIDE, SMALL_LOAD * ENCODERS / IMAGE_S)
            return [Flow([*map(Request.of, texts)], "text", dues=at), small]

        runs = {"warm": sender.run(launch.url, images("clip", CLIP_SIDE, 4 / seconds), within_s=seconds)}
        runs["alone"] = sender.run(launch.url, *few())
        runs["beside"] = sender.run(launch.url, *few(), images("clip", CLIP_SIDE, CLIP_LOAD * ENCODERS / CLIP_S))
    for when, run in runs.items():
        for kind in ("text", "small", "clip"):
            if own := [one for one in run.rows if one.kind == kind]:
                yield {"kind": kind, "when": when, **counted(own)}


def _tenants(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    seconds, rounds, fresh = *((20.0, 1) if quick else (60.0, 3)), iter(range(1_000_000))
    capacity_rps = TENANT_PREFILLERS * RATE / TENANT_TOKENS
    with simulated(f"{TENANT_PREFILLERS}P-D", PREFILL, ("--tenant-header", TENANT)) as launch:

        def flow(tenant: str, load: float, turn: int) -> Flow:
            at = dues(load * capacity_rps * seconds, seconds, f"{tenant} {turn}")
            bodies = [
                text_body(launch.model, tokens=TENANT_TOKENS, answer=ANSWER, stream=True, seed=next(fresh)) for _ in at
            ]
            return Flow([Request.of(body, headers={TENANT: tenant}) for body in bodies], tenant, dues=at)

        for turn in range(rounds):
            quiet = flow("quiet", QUIET_LOAD, turn)
            runs: dict[str, Run] = {"alone": sender.run(launch.url, quiet)}
            runs["beside"] = sender.run(launch.url, quiet, flow("loud", LOUD_LOAD, turn))
            for when, run in runs.items():
                for tenant in ("quiet", "loud") if when == "beside" else ("quiet",):
                    own = [one for one in run.rows if one.kind == tenant]
                    yield {"tenant": tenant, "when": when, "round": turn, **counted(own)}


PARTS: dict[str, Callable[[SenderProcess, bool], Iterator[Row]]] = {
    "pressure-mixed": _mixed,
    "pressure-deadlines": _deadlines,
    "pressure-real": _real,
    "pressure-videos": _videos,
    "pressure-tenants": _tenants,
    "pressure-cost": lambda sender, quick: costs(),
}


def counted(records: Sequence[RequestRecord]) -> Row:
    """How many, how many without a whole answer, and waits for the first byte; a failure counts as the longest."""
    waits = [one.wait_s() for one in records]
    percents = {f"first_p{percent}_ms": round(percentile(waits, percent) * 1e3, 1) for percent in (50, 90, 99, 100)}
    return {"requests": len(records), "bad": sum(not one.ok for one in records), **percents}


def figures(parts: dict[str, list[Row]]) -> dict[str, float]:
    """Of those parts that were measured."""
    named: dict[str, float] = {}
    if mixed := parts.get("pressure-mixed"):
        by = grouped(mixed, "kind")
        named["prefill_utilisation_mixed"] = by["long",][0]["utilisation"]
        beside, alone = (by[kind,][0]["first_p99_ms"] for kind in ("short", "short alone"))
        named["short_prompt_p99_ratio"] = round(beside / alone, 3)
    for name, suffix in (("pressure-deadlines", ""), ("pressure-real", "_real")):
        by = grouped(parts.get(name, []), "order", "load")
        for order, load in by:
            named[f"slo_attained_{order}_{load:g}{suffix}"] = by[order, load][0]["attained"]
        if by:
            deadline, fcfs = (by[order, 1.0][0] for order in ("deadline", "fcfs"))
            named[f"slo_points_over_fcfs{suffix}"] = round(100 * (deadline["attained"] - fcfs["attained"]), 2)
            named[f"longest_over_fcfs{suffix}"] = round(deadline["first_p100_ms"] / fcfs["first_p100_ms"], 3)
    if videos := parts.get("pressure-videos"):
        by = grouped(videos, "kind", "when")
        p99 = {key: rows[0]["first_p99_ms"] for key, rows in by.items()}
        ratios = [p99[kind, "beside"] / p99[kind, "alone"] for kind in ("text", "small")]
        named["small_beside_video_p99_ratio"] = round(max(ratios), 3)
    if tenants := parts.get("pressure-tenants"):
        by = grouped(tenants, "tenant", "when")
        alone, beside = (median(by["quiet", when], "first_p99_ms") for when in ("alone", "beside"))
        named["other_tenant_p99_ratio"] = round(beside / alone, 3)
    if cost := parts.get("pressure-cost"):
        by = grouped(cost, "what")
        named["admission_us"] = by["decided",][0]["us"]
        named["decisions_us"] = round(named["admission_us"] - by["undecided",][0]["us"], 2)
    return named
