"""The real part of `epd-bench transfer pd`: prompts of exact lengths through P-D, two vLLM processes on CPU.

One launch per transport. All modes take turns on it, in an order drawn for every case of every round: P reads its mode
from a file (`epd_serve.engine.kv.grouping_file`), which is replaced between two turns. Prompts are random tokens, so no
prefix is ever known; one token is generated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.micro.measurement import Row
from bench.micro.pd.figures import BASE, row_of
from bench.micro.pd.transfers import Transfer, arrived, together, transfer_of_requests
from bench.scratch import scratch
from bench.served import Served, served
from bench.stamps import read_stamps
from epd_serve.demo.presets import write_preset
from epd_serve.engine.kv.grouping_file import LOOK_EVERY_S, PREFIX, replace_mode
from epd_serve.errors import StageError
from epd_serve.kv.grouping import LinkCost, Step, parse_grouping

LAYOUT = "P-D"
PRESET = "bench"
TRANSPORTS = ("shm", "mooncake")
TOKENS = range(16, 512)  # ordinary tokens of the demo model's vocabulary: no image, no end
PAUSE_S = 3 * LOOK_EVERY_S  # P has noticed the new mode, and the remains of the turn before have ended
LEAST_ROUNDS = 2
LONGEST = 7936  # tokens: the model's 8192 positions less SPARE
SPARE = 256
STAMPS_S = 10.0
ANSWER_S = 300.0


@dataclass(frozen=True)
class Turns:
    """What is asked of one launch.

    Attributes:
        rounds: by concurrency.
        budget_s: after so long no further round is begun, once there are `LEAST_ROUNDS`.
    """

    lengths: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: dict[int, int]
    budget_s: float = float("inf")


def available_transports() -> tuple[str, ...]:
    return TRANSPORTS if find_spec("mooncake") else ("shm",)


def measure(transport: str, turns: Turns) -> Iterator[Row]:
    """Launch, warm up, ask all turns; a row per mode, case and round.

    Raises:
        StageError: a stage did not start, refused a request, lost a transfer or did not follow the mode.
    """
    longest = max(turns.lengths) + SPARE
    with scratch() as folder:
        model, mode = folder / PRESET, folder / "mode"
        write_preset(model, PRESET)
        replace_mode(mode, BASE)
        flags = [str(model), "--kv-transport", transport, "--kv-grouping", f"{PREFIX}{mode}"]
        flags += ["--stage-args", f"all:--max-model-len {longest} --max-num-batched-tokens {longest}"]
        with served(LAYOUT, flags) as launch, httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            yield from take_turns(launch, client, mode, transport, turns)


def take_turns(launch: Served, client: httpx.Client, mode: Path, transport: str, turns: Turns) -> Iterator[Row]:
    """Ask a launch whose P reads its mode from the file `mode`; rows come round by round."""
    prompts, order = random.Random(0), random.Random(1)

    def ask(tokens: int, concurrency: int, name: str) -> list[tuple[str, float]]:
        replace_mode(mode, name)
        time.sleep(PAUSE_S)
        bodies = [_body(launch.model, prompts.choices(TOKENS, k=tokens)) for _ in range(concurrency)]
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda body: _ask(client, f"{launch.url}/v1/completions", body), bodies))

    for tokens in turns.lengths:  # unmeasured: from these the link and P's layer times are known
        for name in dict.fromkeys((turns.modes[0], turns.modes[-1])):
            ask(tokens, 1, name)
    end = time.monotonic() + turns.budget_s
    for concurrency, rounds in turns.rounds.items():
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() > end:
                print(f"a slow or busy machine: {turn} rounds instead of {rounds}", flush=True)
                break
            waves = {
                (tokens, name): ask(tokens, concurrency, name)
                for tokens in order.sample(turns.lengths, len(turns.lengths))
                for name in order.sample(turns.modes, len(turns.modes))
            }
            transfers = _transfers(launch.traces, [request for wave in waves.values() for request, _ in wave])
            for tokens in turns.lengths:
                for name in turns.modes:
                    own = [transfers[request] for request, _ in waves[tokens, name]]
                    for one in own:
                        check_mode(name, one)
                    case = {"transport": transport, "tokens": tokens, "concurrency": concurrency}
                    ttft_s = [seconds for _, seconds in waves[tokens, name]]
                    yield row_of(together(own), ttft_s, **case, mode=name, round=turn)


def check_mode(mode: str, transfer: Transfer) -> None:
    """Raises StageError when P packed otherwise than the mode says, where it says so whatever the link."""
    if mode == "adaptive":
        return
    groups, layers = transfer.groups, max(packet.last for packet in transfer.packets)
    cuts = (0, *parse_grouping(mode, 0).cuts(Step(layers, 1, 1.0), LinkCost(1.0, 1.0)))
    step = tuple(last - first for first, last in pairwise(cuts))  # and so for each step of the prompt
    if groups != len(groups) // len(step) * step:
        raise StageError(f"P sent groups of {groups} layers in mode {mode}", stage="P0")


def _body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}


def _ask(client: httpx.Client, url: str, body: dict[str, Any]) -> tuple[str, float]:
    """(request id, seconds to the one token)"""
    begun = time.monotonic()
    answer = client.post(url, json=body)
    taken = time.monotonic() - begun
    if answer.status_code != 200:
        raise StageError(f"{url} answers {answer.status_code}: {answer.text[:500]}", stage=url)
    counted, sent = answer.json()["usage"]["prompt_tokens"], len(body["prompt"])
    if counted != sent:
        raise StageError(f"{sent} tokens sent, {counted} counted", stage=url)
    return answer.headers["x-request-id"], taken


def _transfers(traces: Path, asked: Sequence[str]) -> dict[str, Transfer]:
    """By request id. The last stamps of a request may be written after its answer."""
    end = time.monotonic() + STAMPS_S
    while True:
        stamps = read_stamps(traces)
        of = transfer_of_requests(stamps)
        there = arrived(stamps, (of[one] for one in asked))
        missing = [one for one in asked if of[one] not in there]
        if not missing:
            return {one: there[of[one]] for one in asked}
        if time.monotonic() > end:
            raise StageError(f"{len(missing)} of {len(asked)} transfers lack stamps, {missing[0]} first", stage=LAYOUT)
        time.sleep(0.1)
