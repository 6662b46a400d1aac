"""How fast the proxy is: requests a second against a bare relay, and what it adds to a request's latency.

Throughput: closed loops over stages that take no time, our proxy, the bare relay (`bench/proxy_relay.py`) and the stage
itself in turns within a round; ratios are within a round. The base makes one call to a stage, and so does our proxy on
the layout PD; on P-D it makes two, which is shown beside it against the same base. Latency: open loops over stages that
take a few milliseconds, our proxy, the bare relay and the stage itself in turns, from when a request was due to its
first byte; what the relay adds is what any proxy on this server and client does.

Generator, proxy and stages share the machine's cores: whichever is short of them, CPU time per request is shown too.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from bench.goals import Goal
from bench.load_process import Generator, Load
from bench.processes import cpu_seconds
from bench.proxy_part import Found, Options, Part
from bench.proxy_rivals import bare_relay
from bench.served import Served, served
from deploy.placement_table import table

AT_ONCE = 32
TOKENS = 16
RATE = 200.0
PICTURE_RATE = 20.0
PICTURE_SIDE = 258  # x side x 3 bytes of noise that no PNG compresses: 200 KB
PROFILE = {
    "prefill": {"setup_s": 0.004, "per_unit_s": 0.00002},
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00001},
    "decode_step_s": [[1, 0.002], [64, 0.004]],
}

Row = dict[str, Any]


def measure(options: Options) -> Found:
    with Generator() as generator:
        rounds = _throughput(generator, options.quick)
        added = _latency(generator, options.quick)
    figures = {
        "rps_over_bare_relay": _ratio(rounds, "whole", "proxy", "relay"),
        "rps_over_bare_relay_streamed": _ratio(rounds, "stream", "proxy", "relay"),
        "rps_over_bare_relay_p_d": _ratio(rounds, "whole", "proxy P-D", "relay"),
        "rps_over_bare_relay_p_d_streamed": _ratio(rounds, "stream", "proxy P-D", "relay"),
        "cpu_over_bare_relay": _ratio(rounds, "whole", "proxy", "relay", "cpu_us_per_request"),
        "generator_us_per_request": statistics.median(row["generator_us_per_request"] for row in rounds),
        **_added(added),
    }
    return Found(figures, [*rounds, *added], f"{_throughput_table(rounds)}\n\n{_latency_table(added)}")


PART = Part(
    "speed",
    "requests a second against a bare relay, latency added to text and pictures",
    measure,
    (
        Goal("rps_over_bare_relay", ">=", 0.6, "never the bottleneck: one call each, answers in one piece"),
        Goal("added_p50_ms", "<=", 1.0, f"{RATE:g} streamed text requests a second"),
        Goal("added_p99_ms", "<=", 5.0),
        Goal("added_picture_p50_ms", "<=", 3.0, "a picture of 200 KB in the request"),
    ),
)


def text_body(model: str, *, stream: bool) -> Row:
    words = "Tell me, in a few sentences, what a proxy is for and what it must never do."
    return {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": stream,
    }


def picture_body(model: str, seed: int, side: int = PICTURE_SIDE) -> Row:
    """A streamed request with a picture of noise that no other seed gives, about side² · 3 bytes."""
    pixels = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(side * side * 3))
    file = io.BytesIO()
    pixels.save(file, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {**text_body(model, stream=True), "messages": [{"role": "user", "content": parts}]}


@contextlib.contextmanager
def simulated(layout: str, profile: Mapping[str, Any] | None = None, flags: Sequence[str] = ()) -> Iterator[Served]:
    """`layout` served by simulated stages; without a profile they take no time for anything.

    `flags` are more of `epd-serve serve`.
    """
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        path = Path(scratch) / "profile.json"
        path.write_text(json.dumps(profile or {}), encoding="utf-8")
        with served(layout, ["--engine", "sim", "--sim-profile", str(path), *flags], traced=False) as launch:
            yield launch


def _throughput(generator: Generator, quick: bool) -> list[Row]:
    """Rows of closed loops: `to`, `kind`, `round`, and what the generator saw."""
    seconds, rounds = (2.0, 3) if quick else (8.0, 5)
    rows: list[Row] = []
    with simulated("PD") as fused, simulated("P-D") as apart:
        stage = fused.stage_url("PD")
        assert stage is not None, "the layout has a PD"
        with bare_relay(stage) as relay:
            targets = {
                "stage": (stage, ()),
                "relay": (relay.url, (relay.pid,)),
                "proxy": (fused.url, fused.cpu_parts["proxy"]),
                "proxy P-D": (apart.url, apart.cpu_parts["proxy"]),
            }
            for turn in range(rounds):
                for kind in ("whole", "stream"):
                    for name, (url, pids) in targets.items():
                        load = Load([text_body(fused.model, stream=kind == "stream")], seconds, at_once=AT_ONCE)
                        before = cpu_seconds({"it": pids})["it"]
                        found = generator.run(url, load)
                        spent_s = cpu_seconds({"it": pids})["it"] - before
                        counted = found["requests"] * (1 + load.warm_up_s / seconds)  # about: the warm-up costs too
                        cost = {"cpu_us_per_request": round(spent_s / counted * 1e6, 1)} if pids else {}
                        rows.append({"kind": kind, "to": name, "round": turn, **found, **cost})
    return rows


def _latency(generator: Generator, quick: bool) -> list[Row]:
    """Rows of open loops, as those of `_throughput`."""
    seconds, rounds = (3.0, 3) if quick else (10.0, 5)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        launch = stack.enter_context(simulated("PD", PROFILE))
        stage = launch.stage_url("PD")
        assert stage is not None, "the layout has a PD"
        targets = {"stage": stage, "relay": stack.enter_context(bare_relay(stage)).url, "proxy": launch.url}
        kinds = {
            "text": ([text_body(launch.model, stream=True)], RATE),
            "picture": ([picture_body(launch.model, seed) for seed in range(4)], PICTURE_RATE),
        }
        for bodies, _ in kinds.values():  # connections, first-time imports
            for url in targets.values():
                generator.run(url, Load(bodies, 1.0, per_second=PICTURE_RATE))
        for turn in range(rounds):
            for kind, (bodies, rate) in kinds.items():
                for name, url in targets.items():
                    found = generator.run(url, Load(bodies, seconds, per_second=rate, seed=turn))
                    rows.append({"kind": kind, "to": name, "round": turn, **found})
    return rows


def _ratio(rows: list[Row], kind: str, name: str, base: str, field: str = "rps") -> float:
    """The median over rounds of `name`'s value over `base`'s in the same round."""
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind and row["to"] in (name, base):
            by_round.setdefault(row["round"], {})[row["to"]] = row[field]
    return round(statistics.median(found[name] / found[base] for found in by_round.values()), 4)


def _added(rows: list[Row]) -> dict[str, float]:
    """Milliseconds by which the percentiles of proxy and relay lie above the stage's: the median over rounds."""

    def above(kind: str, field: str, name: str = "proxy") -> float:
        by_round: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["kind"] == kind:
                by_round.setdefault(row["round"], {})[row["to"]] = row[field]
        return round(statistics.median(found[name] - found["stage"] for found in by_round.values()), 4)

    return {
        "added_p50_ms": above("text", "first_p50_ms"),
        "added_p99_ms": above("text", "first_p99_ms"),
        "added_whole_p50_ms": above("text", "whole_p50_ms"),
        "added_whole_p99_ms": above("text", "whole_p99_ms"),
        "added_picture_p50_ms": above("picture", "first_p50_ms"),
        "added_picture_p99_ms": above("picture", "first_p99_ms"),
        "relay_added_p50_ms": above("text", "first_p50_ms", "relay"),
        "relay_added_p99_ms": above("text", "first_p99_ms", "relay"),
        "relay_added_picture_p50_ms": above("picture", "first_p50_ms", "relay"),
    }


def _throughput_table(rows: list[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        ("answers", "through", "requests/s", "CPU us/request", "generator us/request", "errors")
    ]
    for kind in ("whole", "stream"):
        for name in dict.fromkeys(row["to"] for row in rows):
            these = [row for row in rows if (row["kind"], row["to"]) == (kind, name)]
            cpu = [row["cpu_us_per_request"] for row in these if "cpu_us_per_request" in row]
            lines.append(
                (
                    kind,
                    name,
                    f"{statistics.median(row['rps'] for row in these):.0f}",
                    f"{statistics.median(cpu):.0f}" if cpu else "",
                    f"{statistics.median(row['generator_us_per_request'] for row in these):.0f}",
                    str(sum(row["errors"] for row in these)),
                )
            )
    return table(lines)


def _latency_table(rows: list[Row]) -> str:
    fields = ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms")
    lines: list[tuple[str, ...]] = [("request", "through", *(name.replace("_", " ") for name in fields), "errors")]
    for kind in ("text", "picture"):
        for name in ("stage", "relay", "proxy"):
            these = [row for row in rows if (row["kind"], row["to"]) == (kind, name)]
            found = [f"{statistics.median(row[field] for row in these):.2f}" for field in fields]
            lines.append((kind, name, *found, str(sum(row["errors"] for row in these))))
    return table(lines)
