"""The training's network computes what transformers computes with the weights that it exports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.demo_model.architecture import DEMO, Architecture  # noqa: E402
from tests.demo_model.batches import batch_of, dialogue_batch, picture_batch  # noqa: E402
from tests.demo_model.dialogue import Turn  # noqa: E402
from tests.demo_model.losses import Heads, dialogue_loss  # noqa: E402
from tests.demo_model.network import Network, dct_waves  # noqa: E402
from tests.demo_model.scenes import random_scene  # noqa: E402
from tests.demo_model.tokenizer import Encoder, build  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL = Architecture(hidden=64, intermediate=64, text_layers=2, vision_layers=2, vision_heads=1)

# A process of its own: transformers imports torchvision, which needs a repair on CPU machines.
COMPARE = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from epd_serve.demo.pictures import draw
from tests.demo_model.architecture import DEMO
from tests.demo_model.batches import batch_of
from tests.demo_model.dialogue import Turn
from tests.demo_model.export import export
from tests.demo_model.network import Network
from tests.demo_model.preview import drawn
from tests.demo_model.scenes import random_scene
from tests.demo_model.tokenizer import Encoder, TEMPLATE, build
import numpy as np

torch.set_num_threads(1)
folder = Path(sys.argv[1])
encoder = Encoder(build())
network = Network(DEMO, encoder.vocabulary, 1).to(torch.bfloat16).to(torch.float32)
export(network, encoder, folder, about={})
model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
processor = AutoProcessor.from_pretrained(folder)
found = []
for sizes in [(), ((224, 224),), ((64, 64), (640, 360)), ((200, 500), (100, 100), (3840, 2160))]:
    chance = np.random.default_rng(len(sizes))
    scenes = tuple(random_scene(chance, size=size) for size in sizes)
    turns = (Turn("What is in the picture?", "a red circle", scenes), Turn("And now?", "no"))
    batch = batch_of([turns], encoder, rasters=[[drawn(scene) for scene in scenes]])
    messages = []
    for turn in turns:
        shown = [{"type": "image"} for _ in turn.scenes] + [{"type": "text", "text": turn.question}]
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": turn.answer}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, chat_template=TEMPLATE)
    pictures = [draw(scene.shapes, scene.size, scene.background) for scene in scenes]
    inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**inputs).logits[0]
        encoded = [network.model.visual(it.patches, it.grid) for it in batch.pictures]
        features, deep = (
            torch.cat([it[part].flatten(0, 1) for it in encoded] or [torch.zeros(0, DEMO.hidden)]) for part in (0, 1)
        )
        hidden = network.model.language_model(batch.ids, batch.positions, batch.at, features, deep)
        ours = network.lm_head(hidden)[0]
    found.append({
        "tokens": inputs["input_ids"][0].tolist() == batch.ids[0].tolist(),
        "difference": (ours - theirs).abs().max().item() / theirs.abs().max().item(),
    })
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(build())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_computes_the_same_from_the_exported_folder(tmp_path):
    path = os.pathsep.join([str(ROOT / "epd_serve/engine/site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4
    # Pictures differ by the resizing of 8-bit values: PIL there, torchvision here.
    assert all(it["tokens"] and it["difference"] < 0.02 for it in found), found


def answers_lost(encoder: Encoder, turns: list[tuple[Turn, ...]], branched: bool) -> list[float]:
    torch.manual_seed(0)
    network, heads = Network(SMALL, encoder.vocabulary, 0), Heads(SMALL.hidden)
    with torch.no_grad():
        return [
            dialogue_loss(network, heads, batch_of([it], encoder, branched=branched)).answers.item() for it in turns
        ]


def test_branched_questions_do_not_see_each_other(encoder):
    scene = random_scene(np.random.default_rng(0), size=(224, 224))
    first, second = Turn("What is this?", "nothing", (scene,)), Turn("What is this?", "nothing")
    together = answers_lost(encoder, [(first, second)], branched=True)
    alone = answers_lost(encoder, [(first,), (Turn("What is this?", "nothing", (scene,)),)], branched=False)

    assert together == pytest.approx([sum(alone)], rel=1e-4)


def test_each_picture_goes_to_its_own_place(encoder):
    """Swapping two pictures of a row swaps their features: the loss of a row does not depend on the other rows."""
    chance = np.random.default_rng(1)
    rows = [
        (Turn("Describe each picture.", "nothing", tuple(random_scene(chance, size=size) for size in sizes)),)
        for sizes in [((224, 224), (320, 200))] * 2
    ]
    torch.manual_seed(0)
    network, heads = Network(SMALL, encoder.vocabulary, 0), Heads(SMALL.hidden)
    with torch.no_grad():
        together = dialogue_loss(network, heads, batch_of(rows, encoder)).answers.item()

    assert together == pytest.approx(sum(answers_lost(encoder, rows, branched=False)), rel=1e-4)


def test_batches_are_a_function_of_what_decides_them(encoder):
    one, two = (dialogue_batch(np.random.default_rng([1, 2]), encoder, 2, 2) for _ in range(2))

    assert torch.equal(one.ids, two.ids) and torch.equal(one.answers, two.answers)
    assert all(torch.equal(a.patches, b.patches) for a, b in zip(one.pictures, two.pictures, strict=True))
    assert torch.equal(
        picture_batch(np.random.default_rng(3), 2).labels, picture_batch(np.random.default_rng(3), 2).labels
    )


def test_an_answer_is_right_only_if_every_token_is(encoder):
    network, heads = Network(SMALL, encoder.vocabulary, 0), Heads(SMALL.hidden)
    batch = batch_of([(Turn("Hi", "yes"), Turn("Hi", "a red circle"))], encoder)
    with torch.no_grad():
        network.lm_head.weight.zero_()
        network.lm_head.weight[encoder.ids["<|im_end|>"]] = 1.0
        said = dialogue_loss(network, heads, batch)

    assert said.right.tolist() == [False, False]
    assert batch.answer_of.tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.weights.tolist() == pytest.approx([2**-0.5] * 2 + [0.5] * 4)


def test_the_first_filters_are_orthonormal_waves():
    waves = dct_waves(16, 5).flatten(1)

    assert torch.allclose(waves @ waves.T, torch.eye(25), atol=1e-5)
    assert Network(DEMO, 300, 0).model.visual.patch_embed.proj.weight.isfinite().all()
