"""What the MM Store promises, and what may go wrong with it, on real stages of `(E-P)-D`."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from store.arena import Arena
from tests.e2e.bodies import Body, ask, conversation, fresh, fresh_prompt, png
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Serving, recomputed
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
pytestmark = pytest.mark.slow
epd = pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)
small_arena = pytest.mark.parametrize(
    "launch",
    [("(E-P)-D", "--arena-mib", "1", "--send-pixels", "always", "--on-missing-feature", "reencode")],
    indirect=True,
    ids=["an arena of 1 MiB, pixels for everybody"],
)


@contextlib.contextmanager
def arena_of(launch: Serving) -> Iterator[Arena]:
    arena = Arena.attach(next(path for path in launch.shared_memory() if path.name.endswith("-arena")))
    try:
        yield arena
    finally:
        arena.close()


def newest(arena: Arena) -> str:
    return min(arena.entries(), key=lambda entry: entry.age_s).meta.key


@contextlib.contextmanager
def slowed(launch: Serving, instance: str, share: float) -> Iterator[None]:
    """The stage runs for this share of the time only."""
    over = threading.Event()

    def toggle() -> None:
        while not over.is_set():
            launch.signal_stage(instance, signal.SIGSTOP)
            time.sleep(0.1 * (1 - share))
            launch.signal_stage(instance, signal.SIGCONT)
            time.sleep(0.1 * share)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@epd
@pytest.mark.promise("encoded-once")
def test_a_known_picture_is_not_encoded_again_and_its_media_stays_at_the_proxy(
    launch: Serving, solo_answer: Solo
) -> None:
    body = fresh(0)
    assert ask(launch, body) == solo_answer(body)
    encoded = launch.settled_counters("E0")["encoded"]
    as_metadata = launch.metric('epd_proxy_deliveries_total{delivery="metadata"}')
    skipped = launch.metric("epd_proxy_encode_skipped_total")
    again = {**body, "max_tokens": 7}
    assert ask(launch, again) == solo_answer(again)
    assert ask(launch, body) == solo_answer(body)
    as_metadata_since = launch.metric('epd_proxy_deliveries_total{delivery="metadata"}') - as_metadata
    assert as_metadata_since == (2 if METADATA_TRAVELS else 0)
    assert launch.metric("epd_proxy_encode_skipped_total") == skipped + 2
    assert launch.settled_counters("E0")["encoded"] == encoded


@epd
@pytest.mark.promise("encoded-once")
def test_concurrent_duplicates_are_encoded_once(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(1)
    alone = solo_answer(body)
    encoded = launch.settled_counters("E0").get("encoded", 0)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: ask(launch, body), range(16))) == [alone] * 16
    assert launch.settled_counters("E0")["encoded"] == encoded + 1


@epd
@pytest.mark.promise("recomputed")
def test_a_bit_that_flips_in_memory_never_reaches_an_answer(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(2)
    assert ask(launch, body) == solo_answer(body)
    with arena_of(launch) as arena:
        wait_for(lambda: arena.stats().leased == 0, "all pins to be given back", 15)
        corrupt, counted = arena.stats().corrupt, launch.settled_counters("P0")["corrupt"]
        lease = arena.lease(newest(arena), verify=False)
        assert lease is not None
        arena.memory()[lease.offset + lease.nbytes // 2] ^= 1
        lease.release()
        later = conversation(2, png(fresh_prompt(2).picture()))  # no prefix of it is known: P needs the feature again
        assert ask(launch, later) == solo_answer(later)
        assert arena.stats().corrupt == corrupt + 1
        assert launch.settled_counters("P0")["corrupt"] == counted + 1, "an alert goes by it"
    assert ask(launch, body) == solo_answer(body)


@epd
@pytest.mark.promise("recomputed")
def test_features_that_vanish_at_any_moment_cost_no_answer(launch: Serving, solo_answer: Solo) -> None:
    over = threading.Event()

    def vanish(arena: Arena) -> None:
        while not over.wait(0.001):
            for entry in arena.entries():
                if not entry.leases:
                    arena.remove(entry.meta.key)

    bodies = [fresh(20 + number) for number in range(16)]
    alone = [solo_answer(body) for body in bodies]
    with arena_of(launch) as arena, ThreadPoolExecutor(4) as pool:
        thread = threading.Thread(target=vanish, args=(arena,))
        thread.start()
        try:
            assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone
        finally:
            over.set()
            thread.join()
    assert ask(launch, fresh(40)) == solo_answer(fresh(40))


@epd
@pytest.mark.promise("recomputed")
def test_a_slow_encoder_does_not_turn_prefill_into_an_encoder(launch: Serving, solo_answer: Solo) -> None:
    bodies = [fresh(60 + number) for number in range(16)]
    alone = [solo_answer(body) for body in bodies]
    before = recomputed(launch.settled_counters("P0"))
    with slowed(launch, "E0", 1 / 20), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone
    slow = recomputed(launch.settled_counters("P0"))
    assert (slow - before) / len(bodies) <= 0.25
    for number in range(80, 84):
        assert ask(launch, fresh(number)) == solo_answer(fresh(number))
    assert recomputed(launch.settled_counters("P0")) == slow, "with the encoder back to its speed nothing is recomputed"


@pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM's P and D need the media itself")
@pytest.mark.parametrize("launch", [("(E-P)-D", "--proxy", "overlap=always")], indirect=True, ids=["overlap=always"])
def test_prefill_and_decode_wait_for_the_encoder_without_blocks_and_outlive_it(
    launch: Serving, solo_answer: Solo
) -> None:
    bodies = [fresh(130 + number) for number in range(2)]
    alone = [solo_answer(body) for body in bodies]
    answered = launch.metric('epd_proxy_went_ahead_total{outcome="answered"}')
    assert ask(launch, bodies[0]) == alone[0]
    assert launch.metric('epd_proxy_went_ahead_total{outcome="answered"}') == answered + 1
    with ThreadPoolExecutor(1) as pool:
        with slowed(launch, "E0", 1 / 20):
            answer = pool.submit(ask, launch, bodies[1])
            wait_for(lambda: launch.requests_inside("D0") == 1 or answer.done(), "D to have the request", 20)
            assert launch.requests_inside("P0") <= 1 and launch.kv_blocks_in_use("D0") == 0
        killed = launch.stage_pid("E0")
        launch.signal_stage("E0", signal.SIGKILL)
        assert answer.result(timeout=170) == alone[1]
    wait_for(lambda: launch.stage_pid("E0") != killed and launch.healthy(), "E0 to be back", 180)


@epd
def test_a_prefill_stage_restarted_before_it_fetched_finds_the_feature(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(100)
    alone = solo_answer(body)
    encoded = launch.settled_counters("E0").get("encoded", 0)
    launch.signal_stage("P0", signal.SIGSTOP)  # hears no event, fetches nothing …
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, launch, body)
        wait_for(lambda: launch.counters("E0").get("encoded", 0) == encoded + 1, "E to have encoded", 10)
        wait_for(lambda: launch.instances()["P0"]["in_flight"]["prefill"] == 1, "P to have been asked", 10)
        launch.signal_stage("P0", signal.SIGKILL)  # … and dies
        assert answer.result(timeout=170) == alone
    wait_for(launch.healthy, "P0 to be back", 180)
    assert launch.counters("E0")["encoded"] == encoded + 1, "the event was for the dead one; the index is the truth"


@epd
def test_an_encoder_killed_while_it_stores_costs_no_answer(launch: Serving, solo_answer: Solo) -> None:
    bodies = [fresh(110 + number) for number in range(8)]
    alone = [solo_answer(body) for body in bodies]
    encoded = launch.settled_counters("E0").get("encoded", 0)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, launch, body) for body in bodies]
        wait_for(lambda: launch.counters("E0").get("encoded", 0) > encoded or answers[0].done(), "the first", 10)
        launch.signal_stage("E0", signal.SIGKILL)
        assert [answer.result(timeout=170) for answer in answers] == alone
    wait_for(launch.healthy, "E0 to be back", 180)
    with arena_of(launch) as arena:
        wait_for(lambda: arena.stats().leased == 0, "all pins to be given back", 15)
    assert ask(launch, fresh(120)) == solo_answer(fresh(120))


@small_arena
def test_more_pictures_than_the_arena_holds_are_all_answered(launch: Serving, solo_answer: Solo) -> None:
    bodies = [fresh(200 + number) for number in range(80)]  # 1.5 MB of features
    alone = [solo_answer(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone
    with arena_of(launch) as arena:
        assert arena.stats().evictions > 0
        assert launch.metric('epd_proxy_deliveries_total{delivery="metadata"}') == 0
        wait_for(lambda: arena.stats().leased == 0, "all pins to be given back", 15)


@small_arena
def test_where_everybody_gets_pixels_a_known_picture_is_not_encoded_again_either(
    launch: Serving, solo_answer: Solo
) -> None:
    body = fresh(180)
    skipped = launch.metric("epd_proxy_encode_skipped_total")
    assert ask(launch, body) == ask(launch, {**body, "max_tokens": 25}) == solo_answer(body)
    assert launch.metric("epd_proxy_encode_skipped_total") == skipped + 1
