"""How often an image is decoded and transformed on its way through the stages: never twice at one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bodies import ask, conversation, fresh, fresh_prompt, png
from tests.e2e.counted_media import NOTES_ENV, counted
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Serving, serving
from tests.e2e.vllm_plugin import plugin

pytestmark = pytest.mark.slow
WHOSE = ("E0",) if METADATA_TRAVELS else ("E0", "P0", "D0")
"""Where metadata does not travel (vLLM 0.23), P and D get the media and make of it what E does:
`docs/reference/vllm-versions.md` names the hooks that are missing there."""
ONCE = {f"{stage} {what}": 1 for stage in WHOSE for what in ("decode", "transform")}


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes") / "media"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES_ENV, str(notes))
        with plugin(tmp_path_factory.mktemp("plugin"), "tests.e2e.counted_media"), serving("(E-P)-D") as started:
            yield started


def test_an_image_is_decoded_and_transformed_by_its_encoder_alone(launch: Serving, notes: Path) -> None:
    before = notes.stat().st_size
    ask(launch, fresh(910))
    assert counted(notes, before) == ONCE


def test_of_an_image_that_is_known_nothing_is_done_again(launch: Serving, notes: Path) -> None:
    ask(launch, fresh(911))
    before = notes.stat().st_size
    ask(launch, conversation(2, png(fresh_prompt(911).picture())))
    again = {} if METADATA_TRAVELS else {"P0 decode": 1, "D0 decode": 1}
    assert counted(notes, before) == again
