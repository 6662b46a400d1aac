"""Stages whose KV is too small for what they run: vLLM preempts, computes again, and no token changes.

In float32, because a request that is preempted computes in one batch what it computed in several, and bfloat16 rounds
these differently. D has no prefix cache, so that a preempted request needs its features again.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from store.arena import Arena
from tests.e2e.bodies import Body, about, ask, chat, conversation, fresh, fresh_prompt, png
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Endpoint, Serving, plain_vllm
from tests.e2e.test_features import arena_of
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
SAME = "--dtype float32 --max-model-len 512 --no-enable-prefix-caching"
# Prompts of two requests fit into D together, not into P. Two run at P at a time because none gets a whole step.
P_BLOCKS, D_BLOCKS = 18, 30
P = f"P:--num-gpu-blocks-override {P_BLOCKS} --long-prefill-token-threshold 32 --no-scheduler-reserve-full-isl"
D = f"D:--num-gpu-blocks-override {D_BLOCKS}"
PATIENT = ("--proxy", "timeouts.stage_silence_s=100")  # with stages that a test stops for a while
SMALL = ("(E-P)-D", *PATIENT, "--stage-args", "all:" + SAME, "--stage-args", P, "--stage-args", D)
without_metadata = pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no item as metadata alone")
small_kv = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(SMALL, id="small KV"),
        pytest.param((*SMALL, "--encoder-free"), marks=without_metadata, id="small KV, encoder-free"),
    ],
    indirect=True,
)
STREAMS = 3
Ask = Callable[[Body], list[list[int]]]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ask]:
    """Tokens of plain vLLM in the same arithmetic, with KV for everybody."""
    with plain_vllm(None, *SAME.split()) as endpoint:
        yield lambda body: ask(endpoint, body)


def long(body: Body) -> Body:
    """An answer of 12 blocks, whatever the model thinks of its length: three of them are too many for D in the end, and
    all have begun long before."""
    return {**body, "max_tokens": 390, "ignore_eos": True}


def preemptions(launch: Serving, instance: str) -> float:
    return launch.stage(instance).metric("vllm:num_preemptions_total")


class Stream:
    """One streamed answer: its tokens as they come, and how it ended."""

    def __init__(self, endpoint: Endpoint, body: Body) -> None:
        self.tokens: list[int] = []
        self.begun = threading.Event()
        self.errors: list[str] = []
        self.done = False
        self._endpoint, self._body = endpoint, body

    def read(self) -> None:
        url, body = self._endpoint.url + "/v1/chat/completions", {**self._body, "stream": True}
        with self._endpoint.client.stream("POST", url, json=body) as response:
            assert response.status_code == 200, response.read()[:500]
            with contextlib.suppress(httpx.RemoteProtocolError):  # how the proxy ends an answer that it cannot finish
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, chunk: Body) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"]["message"])
        for choice in chunk.get("choices", ()):
            if ids := choice.get("token_ids"):
                self.tokens += ids
                self.begun.set()


@contextlib.contextmanager
def streaming(launch: Endpoint, bodies: list[Body]) -> Iterator[list[Stream]]:
    """All bodies at a time; entered when each has sent its first token, left when all have ended."""
    streams = [Stream(launch, body) for body in bodies]
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        for stream in streams:
            assert stream.begun.wait(120), "no first token"
        yield streams
        for future in reading:
            future.result(timeout=300)


def pictures(first: int) -> list[Body]:
    return [long(fresh(first + number)) for number in range(STREAMS)]


@contextlib.contextmanager
def everything_unpinned_is_evicted(arena: Arena) -> Iterator[None]:
    over = threading.Event()

    def evict() -> None:
        while not over.wait(0.005):
            for entry in arena.entries():
                if not entry.leases:
                    arena.remove(entry.meta.key)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@small_kv
def test_text_that_decode_preempts_goes_on_with_the_same_tokens(launch: Serving, alone: Ask) -> None:
    bodies = [long(chat(text)) for text, _ in TEXT_ONLY]
    right = [alone(body)[0] for body in bodies]
    before = preemptions(launch, "D0")
    with streaming(launch, bodies) as streams:
        pass
    assert [stream.tokens for stream in streams] == right
    assert all(stream.done for stream in streams)
    assert preemptions(launch, "D0") > before


@pytest.mark.parametrize(
    "launch", [("EPD", "--stage-args", f"all:{SAME} --num-gpu-blocks-override 30")], indirect=True, ids=["one stage"]
)
@pytest.mark.parametrize("how", [{}, {"replay": True}], ids=["made prompt", "sampled again"])
def test_answers_that_began_elsewhere_are_preempted_and_stay_whole(launch: Serving, alone: Ask, how: Body) -> None:
    bodies = [long(chat(text)) for text, _ in TEXT_ONLY]
    right = [alone(body)[0] for body in bodies]
    stage, before = launch.stage("EPD0"), preemptions(launch, "EPD0")
    given = [{"goes_on_after": tokens[:150], **how} for tokens in right]
    with streaming(stage, [{**body, "kv_transfer_params": one} for body, one in zip(bodies, given, strict=True)]) as (
        streams
    ):
        pass
    assert [stream.tokens for stream in streams] == right
    assert preemptions(launch, "EPD0") > before


@small_kv
def test_pictures_that_decode_preempts_are_seen_again(launch: Serving, alone: Ask) -> None:
    bodies = pictures(300)
    right = [alone(body)[0] for body in bodies]
    before = preemptions(launch, "D0")
    as_metadata = launch.metric('epd_proxy_deliveries_total{delivery="metadata"}')
    with streaming(launch, bodies) as streams:
        pass
    assert [stream.tokens for stream in streams] == right
    as_metadata_since = launch.metric('epd_proxy_deliveries_total{delivery="metadata"}') - as_metadata
    assert as_metadata_since == (STREAMS if METADATA_TRAVELS else 0)
    assert preemptions(launch, "D0") > before
    with arena_of(launch) as arena:
        wait_for(lambda: arena.stats().leased == 0, "all pins to be given back", 15)


@small_kv
def test_an_arena_that_evicts_what_it_may_takes_nothing_from_running_requests(launch: Serving, alone: Ask) -> None:
    bodies = pictures(320)
    right = [alone(body)[0] for body in bodies]
    before = preemptions(launch, "D0")
    with arena_of(launch) as arena, streaming(launch, bodies) as streams, everything_unpinned_is_evicted(arena):
        assert preemptions(launch, "D0") == before, "the features were needed before anything was evicted"
    assert [stream.tokens for stream in streams] == right
    assert preemptions(launch, "D0") > before


@small_kv
def test_streams_whose_features_are_lost_go_on(launch: Serving, alone: Ask) -> None:
    bodies = pictures(340)
    right = [alone(body)[0] for body in bodies]
    before = preemptions(launch, "D0")
    with streaming(launch, bodies) as streams, arena_of(launch) as arena:
        assert preemptions(launch, "D0") == before, "the features were needed before they were lost"
        for entry in arena.entries():
            arena.remove(entry.meta.key)  # leased or not
    assert preemptions(launch, "D0") > before
    assert [stream.tokens for stream in streams] == right
    body = about(PAIRWISE_DIFFERENT[0])
    assert ask(launch, body) == alone(body)
    wait_for(lambda: launch.kv_blocks_in_use("D0") == 0, "D to have all its blocks back", 15)


@contextlib.contextmanager
def prefill_gets_at_once_what_decode_holds_blocks_for(launch: Serving) -> Iterator[None]:
    """For whoever sends several requests: P has two of them before D may reserve blocks, and goes on once D has
    reserved more than P has itself. Else one request might have left P before the next comes."""

    def waiting_at_p() -> int:
        return int(launch.instances()["P0"]["stage"]["waiting"])

    launch.signal_stage("D0", signal.SIGSTOP)
    try:
        yield
        wait_for(lambda: waiting_at_p() >= 2, "P to have two requests", 40)
        launch.signal_stage("P0", signal.SIGSTOP)
        launch.signal_stage("D0", signal.SIGCONT)
        wait_for(lambda: launch.kv_blocks_in_use("D0") > P_BLOCKS / D_BLOCKS, "D to have reserved for two", 40)
    finally:
        for name in ("P0", "D0"):
            launch.signal_stage(name, signal.SIGCONT)


@small_kv
def test_prompts_that_prefill_preempts_arrive_whole(launch: Serving, alone: Ask) -> None:
    bodies = [conversation(turns, png(fresh_prompt(360 + turns).picture())) for turns in (14, 15, 16, 17, 18, 19)]
    right = [alone(body) for body in bodies]
    assert [ask(launch, body) for body in bodies] == right  # from here on nothing waits for features
    before = preemptions(launch, "P0")
    with ThreadPoolExecutor(len(bodies)) as pool:
        with prefill_gets_at_once_what_decode_holds_blocks_for(launch):
            answers = [pool.submit(ask, launch, body) for body in bodies]
        assert [answer.result() for answer in answers] == right
    assert preemptions(launch, "P0") > before
    for name in ("P0", "D0"):
        wait_for(lambda name=name: launch.kv_blocks_in_use(name) == 0, f"{name} to have all its blocks back", 15)
