"""`epd-bench transfer ep`: what of the E→P transfer a request sees, after EPD-Serve's Table 3.

Real: the features' bytes ([tokens, 3584] fp16, random), an encoder and a prefill process per mode with the stages' own
producer and consumer, their threads and sockets, the arena, Mooncake with its master over TCP on loopback. No vision
tower runs and no language model: P's compute is emulated, as a scheduling latency during which its engine thread waits
for the device and asks for nothing (`bench/ep_prefill.py`). Models of P:

    waiting     the request waits already: the bare transfer, nothing to hide behind
    idle        P is idle; what passes until the request reaches its scheduler is E's answer, the proxy, P's API
                server: 13.2 ms, the least of 30 requests for a small picture on real stages here (`encoded` to
                `prefill_arrived` in bench/results/ttft.json as of commit 19f57db)
    busy        the scheduling latency that EPD-Serve measured for the same picture (bench/paper.py), on its NPUs
    busy-30%, busy+30%  the same, to show what depends on it (not with --quick)

Encodes for 64 concurrent duplicates: two real proxies over encoders that only count (bench/proxies.py).

Our transfers are those of this machine, so `busy` mixes two machines: it shows which transfers fit behind a scheduler
like the paper's, and is no claim to be faster than it. All modes take turns within a round, in an order drawn anew.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import arena, duplicates, mooncake_get, overlap, proxies
from bench.ep_links import MODES, Link, Places, opened
from bench.goals import Goal, goal_table
from bench.master import PROGRAM, master, program
from bench.overlap import BUSY, PrefillModel, Sample, cells, lines
from bench.paper import HIDDEN_SIZE, TABLE_3
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from bench.stamps import Stamp, read_stamps
from bench.statistic import percentile
from deploy.placement_table import table
from deploy.shared_memory import free_mib
from epd_serve.errors import ConfigError
from store.arena import Arena

PICTURES = {row.picture: row for row in TABLE_3}
IDLE_S = 0.0132
EVENT_TOKENS = 1
EVENTS_EVERY_S = 0.005
QUICK_S = 40.0  # no further round is begun then; starting the processes counts
LEAST_ROUNDS = 2
ROOM = 4.4  # a consumer prefetches up to a quarter of the arena: the largest feature has to fit into that

GOALS = (
    Goal("overlap_1080p_arena", ">=", 0.99, "the paper's 100 %, within the resolution of a measurement"),
    Goal("overlap_4k_arena", ">=", 0.9978, "the paper's 99.78 %"),
    Goal("overlap_1080p_mooncake", ">=", 0.99, "as the arena's"),
    Goal("exposed_ms_4k_arena", "<=", 1.615, "the paper's 729.724 - 728.109 ms"),
    *arena.GOALS,
    Goal("mooncake_get_over_raw_client_8m", "<=", 1.1),
    *duplicates.GOALS,
    Goal("encodes_for_a_known_feature", "==", 0),
    Goal("event_p50_ms", "<=", 1.0),
    Goal("event_p99_ms", "<=", 5.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="features per picture, mode and model of P (default 12, quick 4)")
    parser.add_argument("--pictures", default=",".join(PICTURES), help="comma-separated")
    parser.add_argument("--modes", help=f"of {','.join(MODES)} (default all that are installed)")
    add_record_arguments(parser, quick="4 rounds, 2 on a slow machine, without the sensitivity of the emulated latency")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables, write the result."""
    kind = "real processes, bytes, sockets and stores; emulated prefill (scheduling latency)"
    env = environment(argv, kind, asked=arguments)
    quick = arguments.quick
    modes, pictures = (arguments.modes or ",".join(_modes())).split(","), arguments.pictures.split(",")
    for word, known in [*((mode, MODES) for mode in modes), *((picture, tuple(PICTURES)) for picture in pictures)]:
        if word not in known:
            raise ConfigError(f"{word!r} is none of {', '.join(known)}")
    samples, latencies_ms = transfers(modes, pictures, arguments.rounds or (4 if quick else 12), quick)
    found = cells(samples)
    figures = overlap.figures(found)
    if latencies_ms:
        figures |= {"event_p50_ms": percentile(latencies_ms, 50), "event_p99_ms": percentile(latencies_ms, 99)}
    figures |= arena.ratios("8m", arena.measure(arena.SIZES["8m"], 100 if quick else 400))
    rows = [*(sample.row() for sample in samples), *({"event_ms": round(latency, 4)} for latency in latencies_ms)]
    if program() is not None:
        with master() as address:
            get_ms = mooncake_get.measure(address, arena.SIZES["8m"], 100 if quick else 400)
        figures |= mooncake_get.ratios(get_ms)
        rows.append({"mooncake_get_8m_ms": get_ms})
    encodes = proxies.count_encodes()
    figures |= {
        "encodes_for_64_duplicates": encodes.for_duplicates,
        "encodes_for_a_known_feature": encodes.for_known,
    }
    paper = {row.picture: (row.transfer_ms, row.overlap) for row in TABLE_3}
    print(f"{table(lines(found, paper))}\n\nMedians (quartiles). {_SAYS}\n\n{goal_table(figures, GOALS)}")
    write(arguments.json, figures, env, rows)
    return 0


def _modes() -> tuple[str, ...]:
    if program() is None:
        print(f"{PROGRAM} is not installed: without the Mooncake modes")
        return tuple(mode for mode in MODES if "mooncake" not in mode)
    return MODES


_SAYS = "Transfers are real, P's compute is emulated: scheduling is given, not measured (epd-bench transfer ep --help)."


def prefill_models(quick: bool) -> tuple[PrefillModel, ...]:
    """The models of P that hide something; their latencies are constants, fixed before anything is measured."""
    idle = PrefillModel("idle", dict.fromkeys(PICTURES, IDLE_S))
    factors = {BUSY: 1.0} if quick else {BUSY: 1.0, f"{BUSY}-30%": 0.7, f"{BUSY}+30%": 1.3}
    busy = (
        PrefillModel(name, {row.picture: row.scheduling_ms / 1e3 * factor for row in TABLE_3})
        for name, factor in factors.items()
    )
    return (idle, *busy)


def transfers(
    modes: Sequence[str], pictures: Sequence[str], rounds: int, quick: bool
) -> tuple[list[Sample], list[float]]:
    """Samples of all modes, and the latencies of events in milliseconds."""
    begun = time.monotonic()
    chance = random.Random(0)
    tokens = {picture: PICTURES[picture].tokens for picture in pictures}
    largest = max(tokens.values()) * HIDDEN_SIZE * 2
    models = prefill_models(quick)
    samples: list[Sample] = []
    with _places(modes, largest) as places, tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        sizes = [EVENT_TOKENS, *tokens.values()]
        with opened(modes, places, sizes, Path(scratch)) as links:
            for place in places.values():  # all have them open: whatever ends us from here on, nothing stays behind
                Arena.unlink(place.encoder_arena)
                Arena.unlink(place.prefill_arena)
            events = 300 if quick else 2000
            keys = [
                key
                for link in links
                if link.mode == "arena"
                for key in link.burst(events, EVENTS_EVERY_S, EVENT_TOKENS)
            ]
            for link in links:  # each size once, unmeasured: page tables, buffers
                for picture in pictures:
                    link.send(picture, tokens[picture], "", 0.0, -1)
            for turn in range(rounds):
                if quick and turn >= LEAST_ROUNDS and time.monotonic() > begun + QUICK_S:
                    print(f"a slow or busy machine: {turn} rounds instead of {rounds}")
                    break
                for picture in chance.sample(list(pictures), len(pictures)):
                    samples += _turn(links, picture, tokens[picture], models, turn, chance)
        latencies_ms = event_latencies_ms(read_stamps(Path(scratch) / "arena"), keys) if keys else []
    return samples, latencies_ms


def _turn(
    links: Sequence[Link], picture: str, tokens: int, models: Sequence[PrefillModel], turn: int, chance: random.Random
) -> Iterator[Sample]:
    for link in chance.sample(list(links), len(links)):
        yield link.send(picture, tokens, "", 0.0, turn)
    for model in models:
        for link in chance.sample(list(links), len(links)):
            yield link.send(picture, tokens, model.name, model.scheduling_s[picture], turn)


def event_latencies_ms(stamps: Sequence[Stamp], keys: Sequence[str]) -> list[float]:
    """From the end of the put in E's writer thread to P's listener having the event in hand."""
    put = {stamp.subject: stamp.t for stamp in stamps if stamp.event == "feature_put"}
    got: dict[str, float] = {}
    for stamp in stamps:
        if stamp.event == "feature_event":
            got.setdefault(stamp.subject, stamp.t)
    return [(got[key] - put[key]) * 1e3 for key in keys if key in got and key in put]


@contextlib.contextmanager
def _places(modes: Sequence[str], largest_bytes: int) -> Iterator[dict[str, Places]]:
    """The arenas, one for the arena modes and one per host for Mooncake's, and the pool."""
    capacity = int(largest_bytes * ROOM)
    hosts = {"one": any("arena" in mode for mode in modes), "e": False, "p": False}
    hosts |= dict.fromkeys(("e", "p"), any("mooncake" in mode for mode in modes))
    paths = {host: f"/dev/shm/epd-bench-{os.getpid()}-{host}" for host, used in hosts.items() if used}
    if len(paths) * capacity >> 20 > (free := free_mib(Path("/dev/shm"))):
        raise ConfigError(
            f"/dev/shm has {free} MiB free, {len(paths) * capacity >> 20} are needed: leave 4k out of --pictures"
        )
    with contextlib.ExitStack() as stack:
        for path in paths.values():
            stack.callback(Arena.unlink, path)
            stack.callback(Arena.create(path, capacity, prefault=False).close)
        places: dict[str, Places] = {}
        if "one" in paths:
            places |= dict.fromkeys(("sync_arena", "arena"), Places(paths["one"], paths["one"]))
        if "e" in paths:
            pooled = Places(paths["e"], paths["p"], stack.enter_context(master()), capacity)
            places |= dict.fromkeys(("sync_mooncake", "mooncake"), pooled)
        yield places
