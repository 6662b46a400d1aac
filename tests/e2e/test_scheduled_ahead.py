"""Steps that are scheduled while the one before runs, as on every accelerator: what a client gets is plain vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import SOLO, about, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.scheduled_ahead import SAID, scheduled_ahead
from tests.e2e.serving import Endpoint, Serving, serving
from tests.e2e.test_first_token import CHAT, FORMS, TEXT, assert_streams_alike
from tests.e2e.test_go_on import PLAIN, SAMPLED, assert_goes_on, gone_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with scheduled_ahead(tmp_path_factory.mktemp("plugin")), serving("(E-P)-D") as launch:
        for instance in ("E0", "P0", "D0"):
            assert SAID.format(2) in launch.stage_log(instance)
        yield launch


@pytest.mark.parametrize("name", SOLO)
def test_a_stream_is_plain_vllms(ahead: Serving, monolith: Endpoint, name: str) -> None:
    assert_streams_alike(ahead, monolith, SOLO[name])


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_asked_of_the_answer(ahead: Serving, monolith: Endpoint, form: str) -> None:
    assert_streams_alike(ahead, monolith, {**TEXT, **FORMS[form]})


def test_many_at_once_get_the_answers_to_their_own_pictures(ahead: Serving) -> None:
    prompts = PAIRWISE_DIFFERENT[:8] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: text_of(ahead.post(CHAT, about(prompt))), prompts))
    assert answers == [prompt.answer for prompt in prompts]
    assert ahead.recomputed("P0") == 0
    (link,) = ahead.instances()["P0"]["kv_links"]
    assert (link["state"], link["failed"]) == ("up", 0)


def test_an_answer_that_was_cut_is_gone_on_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Placeholders stand for the tokens of the last step: how many there are is all that is known."""
    with scheduled_ahead(tmp_path_factory.mktemp("plugin")), serving("EPD") as launch:
        assert SAID.format(2) in launch.stage_log("EPD0")
        stage = launch.stage("EPD0")
        for body in PLAIN.values():
            assert_goes_on(stage, body)
        for body in SAMPLED.values():
            assert_goes_on(stage, body, whole=True, replay=True)
        others = [500, 501, 502, 503]
        assert gone_on(stage, CHAT, TEXT, others, replay=True)["ids"][:4] == others
