"""`epd-bench prefixes`: what a front door's knowledge of prefix caches costs it: memory, and time for each prompt.

One process, one index with as many blocks as are noted at most, of sixteen instances. Looked up are prompts of 8192
tokens, in blocks of 16, of which four instances hold a part. `recognise` is to cut the prompt and name its places,
`look up` to find what is known of it and who holds how much, `take in` to note a report of an instance, per block.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from bench.micro.measurement import Goal, Measurement, Row, Usually
from bench.micro.rows import grouped
from deploy.memory.placement_table import table
from epd_serve.cache_ledger import HASHES_PER_REPORT, packed
from epd_serve.wire import CacheReport, PromptBlocks
from proxy.registry.prefix_index import PrefixIndex
from proxy.stages.prompt_nodes import prompt_nodes

BLOCKS = 1_000_000
INSTANCES, HOLDERS = 16, 4
BLOCK_TOKENS, PROMPT_TOKENS = 16, 8192
PROMPTS = 128
TURNS = 8


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of the memory, then one per round and kind of work."""
    chance = random.Random(1)
    length = PROMPT_TOKENS // BLOCK_TOKENS
    chains = [[chance.getrandbits(60) for _ in range(length)] for _ in range(PROMPTS)]
    bodies = [_body(number) for number in range(PROMPTS)]
    nodes = [prompt_nodes(body, {}).nodes for body in bodies]
    before = _resident_bytes()
    index = PrefixIndex(max_blocks=BLOCKS)
    reports = list(_reports(chance, chains, nodes))
    took_s = _timed(lambda: [index.report(report) for report in reports])
    reports.clear()
    assert index.blocks == BLOCKS, f"{index.blocks} blocks are noted"
    yield {"mib": (_resident_bytes() - before) / (1 << 20)}
    yield {"work": "take in", "us": took_s / BLOCKS * 1e6}
    for turn in range(arguments.rounds):
        cut_s = _timed(lambda: [prompt_nodes(body, {}) for body in bodies])
        look_s = _timed(lambda: [index.known(one) for one in nodes])
        yield {"round": turn, "work": "recognise", "us": cut_s / PROMPTS * 1e6}
        yield {"round": turn, "work": "look up", "us": look_s / PROMPTS * 1e6}
    assert all(len(index.known(one).held) == HOLDERS for one in nodes)


def _body(number: int) -> dict[str, object]:
    """A conversation of 8 turns, whose text has about as many tokens as is said."""
    text = f"{number} " + "word" * (PROMPT_TOKENS // (2 * TURNS))
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[at % 2], "content": text} for at in range(2 * TURNS)]}


def _reports(
    chance: random.Random, chains: Sequence[list[int]], nodes: Sequence[tuple[int, ...]]
) -> Iterator[CacheReport]:
    """Each instance holds beginnings of its part of the prompts, and other blocks up to its share."""
    for at in range(INSTANCES):
        some = chains[at % (INSTANCES // HOLDERS) :: INSTANCES // HOLDERS]
        held = [block for chain in some for block in chain[: chance.randrange(1, len(chain))]]
        held += [chance.getrandbits(60) for _ in range(BLOCKS // INSTANCES - len(held))]
        held = held[: BLOCKS // INSTANCES]
        pieces = range(0, len(held), HASHES_PER_REPORT)
        for seq, start in enumerate(pieces, start=1):
            yield CacheReport(f"P{at}", "1", seq, BLOCK_TOKENS, packed(held[start : start + HASHES_PER_REPORT]))
        if not at:
            prompts = [PromptBlocks(packed(one), packed(chain)) for one, chain in zip(nodes, chains, strict=True)]
            yield CacheReport("P0", "1", len(pieces) + 1, BLOCK_TOKENS, prompts=prompts)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _timed(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def figures(rows: Sequence[Row]) -> dict[str, float]:
    by = grouped([row for row in rows if "work" in row], "work")
    named = {f"{work.replace(' ', '_')}_us": statistics.median(row["us"] for row in own) for (work,), own in by.items()}
    named["index_mib"] = next(row["mib"] for row in rows if "mib" in row)
    return {name: round(value, 3) for name, value in named.items()}


def tables(rows: Sequence[Row]) -> Iterable[str]:
    found = figures(rows)
    return [table([("", "median"), *((name, f"{value:.2f}") for name, value in found.items())])]


MEASUREMENT = Measurement(
    quick="fewer rounds",
    settings={"rounds": Usually(20, 5)},
    about=lambda arguments: {"kind": "one process, made-up reports"},
    measure=measure,
    figures=figures,
    tables=tables,
    goals=(
        Goal("index_mib", "<=", 200 / 1.048576, "200 MB for a million blocks"),
        Goal("look_up_us", "<=", 50.0, "for a prompt of 8192 tokens"),
    ),
)
add_arguments = MEASUREMENT.add_arguments
