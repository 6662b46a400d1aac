"""The real part of `epd-bench transfer pd`: prompts of exact lengths through P-D, two vLLM processes.

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
from itertools import groupby, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx

from bench.micro.measurement import Row, in_turns
from bench.micro.pd.figures import BASE, row_of
from bench.micro.pd.transfers import Transfer, arrived, together, transfer_of_requests
from bench.served import Served, scratch, served
from epd_serve.demo.presets import RANDOM_PRESETS, write_preset
from epd_serve.engine.kv.grouping_file import LOOK_EVERY_S, PREFIX, replace_mode
from epd_serve.errors import StageError
from epd_serve.kv.grouping import LinkCost, Step, parse_grouping
from epd_serve.phases.stamps import read_stamps

LAYOUT = "P-D"
FROM_DECODE = ("--first-token", "decode")  # one token is all that is asked for: P would answer alone, and send no KV
TRANSPORTS = ("shm", "mooncake")
TOKENS = range(16, 512)  # ordinary tokens of the demo model's vocabulary: no image, no end
PAUSE_S = 3 * LOOK_EVERY_S  # P has noticed the new mode, and the remains of the turn before have ended
LONGEST = 7936  # tokens: the model's 8192 positions less SPARE
SPARE = 256
STAMPS_S = 10.0
ANSWER_S = 300.0


@dataclass(frozen=True)
class Turns:
    """What is asked of one launch.

    Attributes:
        rounds: by concurrency.
        budget_s: of each concurrency; after so long no further round is begun.
    """

    lengths: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: dict[int, int]
    budget_s: float = float("inf")


def available_transports() -> tuple[str, ...]:
    return TRANSPORTS if find_spec("mooncake") else ("shm",)


def measure(transport: str, turns: Turns, device: str, preset: str) -> Iterator[Row]:
    """Launch, warm up, ask all turns; a row per mode, case and round.

    Raises:
        StageError: a stage did not start, refused a request, lost a transfer or did not follow the mode.
    """
    longest = max(turns.lengths) + SPARE
    with scratch() as folder:
        model, mode = folder / preset, folder / "mode"
        write_preset(model, preset)
        replace_mode(mode, BASE)
        hollow = preset in RANDOM_PRESETS and RANDOM_PRESETS[preset].hollow
        words = f"--max-model-len {longest} --max-num-batched-tokens {longest}" + " --load-format dummy" * hollow
        flags = [str(model), "--device", device, "--share-devices", "--stage-args", f"all:{words}"]
        flags += ["--kv-transport", transport, "--kv-grouping", f"{PREFIX}{mode}", *FROM_DECODE]
        with served(LAYOUT, flags) as launch, httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            about = {} if device == "cpu" else {"device": device}
            yield from ({**about, **row} for row in take_turns(launch, client, mode, transport, turns))


def take_turns(launch: Served, client: httpx.Client, mode: Path, transport: str, turns: Turns) -> Iterator[Row]:
    """Ask a launch whose P reads its mode from the file `mode`; rows come round by round."""
    prompts, cases = random.Random(0), [*product(turns.lengths, turns.modes)]

    def ask(tokens: int, name: str, concurrency: int) -> list[tuple[str, float]]:
        replace_mode(mode, name)
        time.sleep(PAUSE_S)
        bodies = [_body(launch.model, prompts.choices(TOKENS, k=tokens)) for _ in range(concurrency)]
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda body: _ask(client, f"{launch.url}/v1/completions", body), bodies))

    for tokens, name in product(turns.lengths, dict.fromkeys((turns.modes[0], turns.modes[-1]))):
        ask(tokens, name, 1)  # unmeasured: from these the link and P's layer times are known
    for concurrency, rounds in turns.rounds.items():
        taken = in_turns(cases, rounds, turns.budget_s, f"{transport}, {concurrency} at a time")
        for turn, drawn in groupby(taken, key=itemgetter(0)):
            waves = {case: ask(*case, concurrency) for _, case in drawn}
            transfers = _transfers(launch.traces, [request for wave in waves.values() for request, _ in wave])
            for tokens, name in cases:
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
