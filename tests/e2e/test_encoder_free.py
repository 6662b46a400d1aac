"""P and D without the encoder, on real stages: what they lose is encoded again, and an encoder is waited for.

That every kind of request gets a monolith's tokens is in `test_layouts.py`, for other families in `test_models.py`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from epd_serve.stage_flags import WITHOUT_ENCODER
from tests.e2e.bodies import Body, ask, chat, conversation, fresh, fresh_prompt, png
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Serving
from tests.e2e.test_features import arena_of, newest
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no item as metadata alone"),
]
PIXELS = ('epd_proxy_deliveries_total{delivery="pixels"}', 'epd_proxy_deliveries_total{delivery="features"}')
METADATA = 'epd_proxy_deliveries_total{delivery="metadata"}'
encoder_free = pytest.mark.parametrize("launch", [("E-P-D", "--encoder-free")], indirect=True, ids=["encoder-free"])


@encoder_free
def test_stages_take_metadata_and_no_media(launch: Serving, solo_answer: Solo) -> None:
    assert ask(launch, fresh(920)) == solo_answer(fresh(920))
    assert launch.metric(METADATA) > 0 and set(map(launch.metric, PIXELS)) == {0.0}
    for instance in ("P0", "D0"):
        assert launch.stage(instance).post("/v1/chat/completions", fresh(920)).status_code == 400


@encoder_free
def test_a_feature_that_is_lost_is_encoded_again(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(921)
    assert ask(launch, body) == solo_answer(body)
    again = launch.metric("epd_proxy_encoded_again_total")
    with arena_of(launch) as arena:
        wait_for(lambda: arena.stats().leased == 0, "all pins to be given back", 15)
        lease = arena.lease(newest(arena), verify=False)
        assert lease is not None
        arena.memory()[lease.offset + lease.nbytes // 2] ^= 1
        lease.release()
    later = conversation(2, png(fresh_prompt(921).picture()))  # no prefix of it is known: P needs the feature again
    assert ask(launch, later) == solo_answer(later)
    assert launch.metric("epd_proxy_encoded_again_total") > again
    assert launch.recomputed("P0") == launch.recomputed("D0") == 0


@encoder_free
def test_features_that_vanish_at_any_moment_cost_no_answer(launch: Serving, solo_answer: Solo) -> None:
    over = threading.Event()
    bodies = [fresh(922 + number) for number in range(8)]
    alone = [solo_answer(body) for body in bodies]

    def vanish() -> None:
        while not over.wait(0.05):
            for entry in arena.entries():
                if not entry.leases:
                    arena.remove(entry.meta.key)

    with arena_of(launch) as arena, ThreadPoolExecutor(4) as pool:
        thread = threading.Thread(target=vanish)
        thread.start()
        try:
            assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone
        finally:
            over.set()
            thread.join()


@encoder_free
def test_a_killed_encoder_is_waited_for_and_text_is_served_meanwhile(launch: Serving, solo_answer: Solo) -> None:
    text, pictures = chat("Hello"), [fresh(931), fresh(932)]
    alone = [solo_answer(body) for body in pictures]
    with ThreadPoolExecutor(2) as pool:
        with launch.slow_restarts():
            launch.signal_stage("E0", signal.SIGKILL)
            answers = [pool.submit(ask, launch, body) for body in pictures]
            wait_for(lambda: not launch.instances()["E0"]["up"], "E0 to be seen dead", 30)
            assert ask(launch, text) == solo_answer(text)
            assert not any(answer.done() for answer in answers)
        assert [answer.result(timeout=170) for answer in answers] == alone
    assert WITHOUT_ENCODER not in launch.stage_log("E0")


@encoder_free
@pytest.mark.parametrize("killed", ["P0", "D0"])
def test_a_killed_stage_comes_back_without_its_encoder(launch: Serving, solo_answer: Solo, killed: str) -> None:
    body = fresh(933 + (killed == "D0"))
    launch.signal_stage(killed, signal.SIGKILL)
    assert ask(launch, body) == solo_answer(body)
    assert set(map(launch.metric, PIXELS)) == {0.0}
