"""vLLM's KV-cache events and requests become an account of its prefix cache: the pool is believed, not the events."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.cache_ledger import CacheLedger, packed, short, unpacked
from epd_serve.engine.status import cache_events
from epd_serve.engine.status.cache_events import CacheEvents
from epd_serve.wire import PROMPT_XARG, CacheReport

SIZE = 4


def digest(number: int) -> bytes:
    return bytes(24) + (number << 4).to_bytes(8)


def stored(*numbers: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(block_hashes=[digest(one) for one in numbers], parent_block_hash=None, **more)


def removed(*numbers: int) -> SimpleNamespace:
    return SimpleNamespace(block_hashes=[digest(one) for one in numbers], group_idx=0)


class Engine:
    """vLLM's scheduler, the part that is looked at."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.published: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(enable_kv_cache_events=True, get_cached_block=self._cached_block)
        )
        self.kv_event_publisher: Any = SimpleNamespace(publish=self.published.append, shutdown=lambda: None)
        self.block_size = SIZE

    def _cached_block(self, block_hash: bytes, groups: list[int]) -> list[str] | None:
        assert groups == [0]
        return ["block"] if block_hash in self.cached else None


def request(prompt: int, *answer: int, nodes: tuple[int, ...] = (1, 2), name: str = "r") -> Any:
    total = prompt + len(answer)
    word = base64.b64encode(packed(nodes)).decode()
    return SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(extra_args={PROMPT_XARG: word} if nodes else None),
        num_prompt_tokens=prompt,
        num_tokens=total,
        num_output_tokens=len(answer),
        block_hashes=[digest(number) for number in range(total // SIZE)],
    )


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def ledger() -> CacheLedger:
    return CacheLedger("P0", "life", SIZE)


@pytest.fixture
def events(engine: Engine, ledger: CacheLedger) -> CacheEvents:
    return CacheEvents(engine, ledger)


def known(reports: list[CacheReport]) -> set[int]:
    return {number for one in reports for number in unpacked(one.stored)}


def test_a_block_counts_while_a_copy_of_it_is_left(engine: Engine, events: CacheEvents, ledger: CacheLedger) -> None:
    engine.cached = {digest(1), digest(2)}
    events.publish(SimpleNamespace(events=[stored(1, 2), stored(1)]))
    assert known(ledger.take()) == {1, 2} and len(engine.published) == 1
    events.publish(SimpleNamespace(events=[removed(1)]))
    assert ledger.take() == [], "one copy of two has gone"
    engine.cached = {digest(2)}
    events.publish(SimpleNamespace(events=[removed(1)]))
    (report,) = ledger.take()
    assert list(unpacked(report.removed)) == [1]
    events.publish(SimpleNamespace(events=[SimpleNamespace()]))  # AllBlocksCleared
    assert [one.part for one in ledger.take()] == ["first"]


def test_other_groups_of_a_hybrid_model_are_left_out(engine: Engine, events: CacheEvents, ledger: CacheLedger) -> None:
    engine.cached = {digest(1), digest(2)}
    events.publish(SimpleNamespace(events=[stored(1, group_idx=1), stored(2, group_idx=0)]))
    assert known(ledger.take()) == {2}


def test_an_operators_own_listener_gets_numbers_and_so_do_we(events: CacheEvents, ledger: CacheLedger) -> None:
    number = int.from_bytes(digest(5)[-8:])
    events.publish(SimpleNamespace(events=[SimpleNamespace(block_hashes=[number], parent_block_hash=None)]))
    assert known(ledger.take()) == {short(digest(5))} == {5}


def test_a_prompt_is_told_when_it_comes_and_how_it_went_on_when_it_ends(
    events: CacheEvents, ledger: CacheLedger
) -> None:
    one = request(10)
    events.added(one, tell=True)
    (report,) = ledger.take()
    (told,) = report.prompts
    assert (list(unpacked(told.nodes)), list(unpacked(told.blocks)), told.grown) == ([1, 2], [0, 1], False)
    ended = request(10, 7, 7, 7, 7, 7, 7, 7)
    one.num_tokens, one.num_output_tokens, one.block_hashes = 17, 7, ended.block_hashes
    events.finished(["r", "unknown"])
    (report,) = ledger.take()
    (told,) = report.prompts
    assert (list(unpacked(told.nodes)), list(unpacked(told.blocks)), told.grown) == ([2], [0, 1, 2, 3], True)


@pytest.mark.parametrize("odd", [{"nodes": ()}, {"prompt": SIZE - 1}, {"hashes": []}, {"word": "no base64"}])
def test_of_some_requests_there_is_nothing_to_tell(
    odd: dict[str, Any], events: CacheEvents, ledger: CacheLedger
) -> None:
    one = request(odd.get("prompt", 10), nodes=odd.get("nodes", (1, 2)))
    one.block_hashes = odd.get("hashes", one.block_hashes)  # prefix caching is off
    if "word" in odd:
        one.sampling_params.extra_args = {PROMPT_XARG: odd["word"]}
    events.added(one, tell=True)
    events.finished(["r"])
    assert ledger.take() == []


def test_a_defect_ends_the_account_and_not_the_engine(
    engine: Engine, events: CacheEvents, ledger: CacheLedger, caplog: pytest.LogCaptureFixture
) -> None:
    engine.cached = {digest(1)}
    events.publish(SimpleNamespace(events=[stored(1)]))
    ledger.take()
    for _ in range(2):
        events.publish(SimpleNamespace(events=[SimpleNamespace(block_hashes=5)]))
        events.added(object(), tell=True)
    assert caplog.text.count("cannot be told of") == 1
    (report,) = ledger.take()
    assert report.part == "first" and not report.stored and len(engine.published) == 3


def test_vllm_has_to_note_events(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "name_blocks_alike", lambda: None)
    made = cache_events.events_of(engine, "P0", "life")
    assert made is not None and engine.kv_event_publisher is made[0] and made[1].block_tokens == SIZE
    engine.kv_cache_manager.block_pool.enable_kv_cache_events = False
    assert cache_events.events_of(engine, "P0", "life") is None
    assert cache_events.events_of(SimpleNamespace(), "E0", "life") is None
