"""The real part of `epd-bench transfer pd`: prompts of exact lengths through P-D, two vLLM processes on CPU.

One launch per transport. All modes take turns on it, in an order drawn for every case of every round: P reads its mode
from a file (`epd_serve.engine.kv.grouping_file`), which is replaced between two turns. Prompts are random tokens, so no
prefix is ever known; one token is generated.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import httpx

from bench.served import Served, served
from bench.stamps import read_stamps
from bench.transfer_pd_figures import BASE, Case, Sample
from bench.transfer_pd_stamps import Transfer, arrived, transfer_of_requests
from epd_serve.demo.presets import write_preset
from epd_serve.engine.kv.grouping_file import LOOK_EVERY_S, PREFIX, replace_mode
from epd_serve.errors import StageError
from epd_serve.kv.grouping import LinkCost, Step, parse_grouping

LAYOUT = "P-D"
PRESET = "bench"
TRANSPORTS = ("shm", "mooncake")
WORDS = range(16, 512)  # ordinary tokens of the demo model's vocabulary: no picture, no end
PAUSE_S = 3 * LOOK_EVERY_S  # P has noticed the new mode, and the remains of the turn before have ended
LEAST_ROUNDS = 2
LONGEST = 7936  # tokens: the model's 8192 positions less ROOM
ROOM = 256
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


def measure(transport: str, turns: Turns) -> list[Sample]:
    """Launch, warm up, ask all turns; the samples of all requests.

    Raises:
        StageError: a stage did not start, refused a request, lost a transfer or did not follow the mode.
    """
    room = max(turns.lengths) + ROOM
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        model, mode = Path(scratch) / PRESET, Path(scratch) / "mode"
        write_preset(model, PRESET)
        replace_mode(mode, BASE)
        flags = [str(model), "--kv-transport", transport, "--kv-grouping", f"{PREFIX}{mode}"]
        flags += ["--stage-args", f"all:--max-model-len {room} --max-num-batched-tokens {room}"]
        with served(LAYOUT, flags) as launch, httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            return take_turns(launch, client, mode, transport, turns)


def take_turns(launch: Served, client: httpx.Client, mode: Path, transport: str, turns: Turns) -> list[Sample]:
    """Ask a launch whose P reads its mode from the file `mode`."""
    asked = list(_ask_all(_Asker(launch, client, mode), transport, turns))
    transfers = _transfers(launch.traces, asked)
    samples = [Sample(one.case, one.mode, one.turn, transfers[one.request], one.ttft_s) for one in asked]
    for sample in samples:
        check_mode(sample)
    return samples


def check_mode(sample: Sample) -> None:
    """Raises StageError when P packed otherwise than the mode says, where it says so whatever the link."""
    if sample.mode == "adaptive":
        return
    groups, layers = sample.transfer.groups, max(packet.last for packet in sample.transfer.packets)
    cuts = (0, *parse_grouping(sample.mode, 0).cuts(Step(layers, 1, 1.0), LinkCost(1.0, 1.0)))
    step = tuple(last - first for first, last in pairwise(cuts))  # and so for each step of the prompt
    if groups != len(groups) // len(step) * step:
        raise StageError(f"P sent groups of {groups} layers in mode {sample.mode}", stage="P0")


@dataclass(frozen=True)
class _Asked:
    """One measured request."""

    case: Case
    mode: str
    turn: int
    request: str
    ttft_s: float


class _Asker:
    """Asks one launch, several requests at a time, in a mode."""

    def __init__(self, launch: Served, client: httpx.Client, mode: Path) -> None:
        self._url = f"{launch.url}/v1/completions"
        self._model = launch.model
        self._client = client
        self._mode = mode
        self._chance = random.Random(0)

    def wave(self, case: Case, mode: str, turn: int) -> list[_Asked]:
        replace_mode(self._mode, mode)
        time.sleep(PAUSE_S)
        prompts = [self._chance.choices(WORDS, k=case.tokens) for _ in range(case.together)]
        with ThreadPoolExecutor(case.together) as pool:
            return [_Asked(case, mode, turn, *answer) for answer in pool.map(self._ask, prompts)]

    def _ask(self, prompt: list[int]) -> tuple[str, float]:
        """(request id, seconds to the one token)"""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        begun = time.monotonic()
        answer = self._client.post(self._url, json=body)
        taken = time.monotonic() - begun
        if answer.status_code != 200:
            raise StageError(f"{self._url} answers {answer.status_code}: {answer.text[:500]}", stage=self._url)
        counted = answer.json()["usage"]["prompt_tokens"]
        if counted != len(prompt):
            raise StageError(f"{len(prompt)} tokens sent, {counted} counted", stage=self._url)
        return answer.headers["x-request-id"], taken


def _ask_all(asker: _Asker, transport: str, turns: Turns) -> Iterator[_Asked]:
    """All measured requests, after unmeasured ones from which the link and P's layer times are known."""
    for tokens in turns.lengths:
        for mode in dict.fromkeys((turns.modes[0], turns.modes[-1])):
            asker.wave(Case(transport, tokens, 1), mode, -1)
    chance = random.Random(1)
    end = time.monotonic() + turns.budget_s
    for together, rounds in turns.rounds.items():
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() > end:
                print(f"a slow or busy machine: {turn} rounds instead of {rounds}", flush=True)
                break
            for tokens in chance.sample(turns.lengths, len(turns.lengths)):
                for mode in chance.sample(turns.modes, len(turns.modes)):
                    yield from asker.wave(Case(transport, tokens, together), mode, turn)


def _transfers(traces: Path, asked: Sequence[_Asked]) -> dict[str, Transfer]:
    """By request id. The last stamps of a request may be written after its answer."""
    end = time.monotonic() + STAMPS_S
    while True:
        stamps = read_stamps(traces)
        of = transfer_of_requests(stamps)
        found = arrived(stamps, (of[one.request] for one in asked))
        missing = [one.request for one in asked if of[one.request] not in found]
        if not missing:
            return {one.request: found[of[one.request]] for one in asked}
        if time.monotonic() > end:
            raise StageError(f"{len(missing)} of {len(asked)} transfers lack stamps, {missing[0]} first", stage=LAYOUT)
        time.sleep(0.1)
