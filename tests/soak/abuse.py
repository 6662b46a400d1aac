"""`python -m tests.soak.abuse`: what a well-behaved tenant notices of others that are not, and what they cost.

Simulated stages behind the real front door. Together: bodies that come a byte a second, connections that say nothing,
streams that nobody reads, a tenant with URLs of 32 MiB from a slow host, and what schemathesis makes of the server's
own document. Beside them a tenant with text, pictures in the body and pictures by URL. In turns with that the same
number of connections that all behave. It must be: no 5xx but refusals that say when to come back, memory within what
is configured, and the tenant's p99 at most 1.3 times of what it is among those that behave.

At the end the large pictures arrive in time. Then stages have them to decode, and only errors and memory are judged:
the front door cannot make an encoder's HTTP server read 43 MB of JSON faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.clients.process import SenderProcess
from bench.clients.results import RequestRecord
from bench.clients.sender import Flow
from bench.clients.target import requests
from bench.micro.measurement import Goal
from bench.served import simulated
from bench.statistic import percentile
from bench.workloads.synthetic import image_body, text_body
from deploy.agent.cpu_time import cpu_seconds, since
from tests.soak.abusers import CrowdProcess, Scene, Seen
from tests.soak.front_door import counters
from tests.soak.harness import Result, Soak
from tests.soak.malformed import malformed_requests
from tests.soak.media_server import media_server
from tests.soak.resident import resident

LAYOUT = "E-P-D"
PROFILE = {
    "prefill": {"setup_s": 0.004, "per_unit_s": 0.00002},
    "encode": {"setup_s": 0.004, "per_unit_s": 0.00001},
    "decode_step_s": [[1, 0.02]],
    "feature_bytes_per_token": 64,  # a large picture's feature shall not be what costs
    "capacity": {"max_running": 1024, "kv_tokens": 1 << 20},
}
MEMORY_BYTES = 512 << 20
BUFFERS_BYTES = 256 << 10
"""Of one connection, in the proxy: what uvicorn and our client read ahead and write behind."""
NUMBERS = {"slow body": 200, "silent": 100, "slow reader": 20, "large url": 32}
RATES = {"text": 10.0, "picture": 3.0, "url": 2.0}
CASES = 10_000
SETTLE_S = 3.0


def measure(arguments: argparse.Namespace) -> Result:
    seconds, windows, cases = (
        (40.0, 1, 400) if arguments.quick else (arguments.seconds, arguments.windows, arguments.count)
    )
    flags = ["--tenant-header", "x-tenant", "--allow-private-media"]
    if arguments.memory_bytes:
        flags += ["--proxy", f"memory.process_bytes={arguments.memory_bytes}"]
    rows: list[dict[str, Any]] = []
    with media_server() as media, SenderProcess() as sender, simulated(LAYOUT, PROFILE, flags) as launch:
        pids = launch.cpu_parts["proxy"]
        sender.run(launch.url, *_flows(launch.model, media, 2.0, 0))  # first-time imports
        before_mb = resident(pids).rss_mb
        malformed = _cases(launch.url, cases, arguments.cases)
        each = len(malformed) // windows
        with _peak(pids) as peak_mb:
            for index in range(windows):
                some = malformed[index * each : (index + 1) * each]
                for behave in (True, False):
                    length_s = seconds / windows * (0.5 if behave and not arguments.quick else 1.0)
                    row = _window(launch, sender, media, some, behave=behave, seconds=length_s, index=index)
                    rows.append(row | {"rss_mb": round(resident(pids).rss_mb, 1)})
                    print(json.dumps(_short(rows[-1])), file=sys.stderr)
            row = _window(
                launch, sender, media, malformed[:100], behave=False, seconds=30.0, index=windows, arrive=True
            )
            rows.append(row | {"rss_mb": round(resident(pids).rss_mb, 1)})
            print(json.dumps(_short(rows[-1])), file=sys.stderr)
        statuses = _by_status(counters(launch.url, "epd_proxy_requests_total"))
    figures = _figures(rows, before_mb, max(peak_mb), arguments.memory_bytes or MEMORY_BYTES) | statuses
    return figures, [_short(row) for row in rows], ""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600.0, help="of abuse; half of it more to compare with")
    parser.add_argument("--count", type=int, default=CASES, help="malformed requests")
    parser.add_argument("--windows", type=int, default=10, help="in turns with the comparison")
    parser.add_argument("--memory-bytes", type=int, default=MEMORY_BYTES, help="0: whatever the code's default is")
    parser.add_argument("--cases", type=Path, help="where malformed requests are, or are to be kept; they take minutes")


SOAK = Soak(
    "abuse",
    "what a well-behaved tenant notices of others that are not, and what they cost",
    measure,
    (
        Goal("answers_5xx", "==", 0.0, "but refusals that say when to come back"),
        Goal("hanging", "==", 0.0),
        Goal("tenant_bad_among_abuse", "==", 0.0),
        Goal("rss_over_allowed", "<=", 1.0, "memory is within what is configured"),
        Goal("slow_bodies_answered_408", ">=", 1.0),
        Goal("silent_connections_closed", ">=", 1.0),
    ),
    (Goal("all_p99_ratio", "<=", 1.3, "the tenant's p99 over what it is among those that behave"),),
    _add_flags,
)


def _cases(url: str, count: int, kept: Path | None) -> list[bytes]:
    if kept is not None and kept.exists():
        return [bytes.fromhex(line) for line in kept.read_text(encoding="ascii").split()][:count]
    print(f"making {count} malformed requests", file=sys.stderr)
    malformed = malformed_requests(url, count)
    if kept is not None:
        kept.write_text("\n".join(one.hex() for one in malformed), encoding="ascii")
    return malformed


def _window(
    launch: Any,
    sender: SenderProcess,
    media: str,
    malformed: list[bytes],
    *,
    behave: bool,
    seconds: float,
    index: int,
    arrive: bool = False,
) -> dict[str, Any]:
    """One window of abuse, or of as many that behave: what the tenant saw in it, and what the others got."""
    seed = (2 * (index + 4) + behave) * 100_000
    scene = Scene(launch.url, launch.model, media, seconds, behave, malformed, arrive, seed)
    cpu = cpu_seconds(launch.cpu_parts)
    crowd = CrowdProcess(scene, NUMBERS)
    try:
        dues_s = seconds - 2 * SETTLE_S if seconds > 4 * SETTLE_S else seconds / 2
        run = sender.run(launch.url, *_flows(launch.model, media, dues_s, seed))
        seen = crowd.finish()
    finally:
        crowd.stop()
    spent = since(cpu, cpu_seconds(launch.cpu_parts))
    return {
        "behave": behave,
        "arrive": arrive,
        "records": run.rows,
        "seen": seen,
        "cpu_s": {k: round(v, 1) for k, v in spent.items()},
    }


def _flows(model: str, media: str, seconds: float, seed: int) -> list[Flow]:
    def dues(rate: float) -> list[float]:
        return [SETTLE_S + turn / rate for turn in range(int(seconds * rate))]

    def by_url(turn: int) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": f"{media}/small/{seed + turn}.png"}}]
        return {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "stream": True}

    texts = [text_body(model, tokens=64, answer=4, stream=True, seed=seed + turn) for turn in range(64)]
    images = [image_body(model, side=256, answer=4, stream=True, seed=seed + turn) for turn in range(64)]
    urls = [by_url(turn) for turn in range(int(seconds * RATES["url"]) + 1)]
    return [
        Flow(requests(texts), "text", dues=dues(RATES["text"])),
        Flow(requests(images), "picture", dues=dues(RATES["picture"])),
        Flow(requests(urls), "url", dues=dues(RATES["url"])),
    ]


@contextmanager
def _peak(pids: Sequence[int]) -> Iterator[list[float]]:
    """MiB of these processes, ten times a second while the context lasts."""
    found, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            found.append(sum(_rss_mb(pid) for pid in pids))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


def _rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def _figures(rows: Sequence[dict[str, Any]], before_mb: float, peak_mb: float, memory_bytes: int) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for row in rows:
        for (_, what), number in row["seen"].counts.items():
            counts[what] += number
    records = {
        behave: [one for row in rows if row["behave"] is behave and not row["arrive"] for one in row["records"]]
        for behave in (True, False)
    }
    allowed_mb = before_mb + (memory_bytes + BUFFERS_BYTES * sum(NUMBERS.values())) / 2**20
    figures: dict[str, float] = {
        "answers_5xx": float(sum(n for what, n in counts.items() if what[:1] == "5" and "retry-after" not in what)),
        "refused_503_with_retry_after": float(counts["503 retry-after"]),
        "refused_429_with_retry_after": float(counts["429 retry-after"]),
        "slow_bodies_answered_408": float(counts["408"]),
        "silent_connections_closed": float(counts["closed"]),
        "hanging": float(counts["hangs"]),
        "malformed_sent": float(
            sum(n for row in rows if not row["behave"] for (k, _), n in row["seen"].counts.items() if k == "malformed")
        ),
        "tenant_bad_among_abuse": float(sum(not one.ok for one in records[False])),
        "tenant_bad_among_behaving": float(sum(not one.ok for one in records[True])),
        "rss_before_mb": round(before_mb, 1),
        "rss_peak_mb": round(peak_mb, 1),
        "rss_allowed_mb": round(allowed_mb, 1),
        "rss_over_allowed": round(peak_mb / allowed_mb, 3),
    }
    for kind in (*RATES, "all"):
        p99 = [_p99_ms([one for one in records[behave] if kind in (one.kind, "all")]) for behave in (False, True)]
        figures |= {f"{kind}_p99_abuse_ms": p99[0], f"{kind}_p99_behaving_ms": p99[1]}
        figures[f"{kind}_p99_ratio"] = round(p99[0] / p99[1], 3)
    return figures


def _by_status(series: Mapping[str, float]) -> dict[str, float]:
    """How the front door counted its answers, of every endpoint together."""
    counts: dict[str, float] = defaultdict(float)
    for name, value in series.items():
        counts["answered_" + name.partition('status="')[2].partition('"')[0]] += value
    return dict(sorted(counts.items()))


def _p99_ms(records: Sequence[RequestRecord]) -> float:
    return round(percentile([one.wait_s() for one in records], 99) * 1e3, 2)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    seen: Seen = row["seen"]
    by_kind = {kind: [one for one in row["records"] if one.kind == kind] for kind in RATES}
    return {
        "behave": row["behave"],
        "arrive": row["arrive"],
        "rss_mb": row.get("rss_mb"),
        "cpu_s": row["cpu_s"],
        "p50_ms": {k: round(percentile([one.wait_s() for one in v], 50) * 1e3, 1) for k, v in by_kind.items() if v},
        "p99_ms": {k: _p99_ms(v) for k, v in by_kind.items() if v},
        "bad": sorted({f"{one.kind} {one.fault}: {one.error}"[:200] for one in row["records"] if not one.ok})[:3],
        "seen": {f"{kind}: {what}": number for (kind, what), number in sorted(seen.counts.items())},
        "failures": seen.failures[:5],
    }


if __name__ == "__main__":
    raise SystemExit(SOAK.main())
