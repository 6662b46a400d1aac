"""The demo model's tokens: those of training are those that a server makes of the same conversation."""

from __future__ import annotations

import json

import jinja2
import numpy as np
import pytest

pytest.importorskip("tokenizers")

from epd_serve.demo.presets import builtin_model_dir
from tests.demo_model.architecture import picture_grid
from tests.demo_model.dialogue import Turn, conversation, questions
from tests.demo_model.eval_templates import EVAL_TEMPLATES
from tests.demo_model.tokenizer import SPECIAL, TEMPLATE, Encoder, build
from tests.demo_model.train_templates import TRAIN_TEMPLATES


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(build())


def rendered(turns: tuple[Turn, ...]) -> str:
    """The conversation as a server renders it, each picture's placeholder repeated as the processor does."""
    messages = []
    for turn in turns:
        content = [{"type": "text", "text": turn.question}, *({"type": "image"} for _ in turn.scenes)]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    text = jinja2.Environment().from_string(TEMPLATE).render(messages=messages, add_generation_prompt=False)
    for scene in [scene for turn in turns for scene in turn.scenes]:
        rows, columns = picture_grid(*scene.size)
        text = text.replace("<|image_pad|>", "<PAD>" * (rows * columns // 4), 1)
    return text.replace("<PAD>", "<|image_pad|>")


def test_the_model_that_ships_has_this_tokenizer_and_template(encoder):
    shipped = builtin_model_dir()

    assert json.loads((shipped / "tokenizer.json").read_text()) == json.loads(encoder.tokenizer.to_str())
    assert (shipped / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("pictures", [0, 1, 4])
def test_a_conversation_has_the_tokens_of_the_chat_template(encoder, pictures):
    for seed in range(10):
        turns = conversation(np.random.default_rng(seed), ((224, 224), (64, 64), (640, 360), (96, 200))[:pictures], 4)
        assert encoder.dialogue(turns).ids == encoder.tokenizer.encode(rendered(turns)).ids


def test_only_answers_and_their_ends_are_said(encoder):
    made = encoder.dialogue(conversation(np.random.default_rng(1), ((224, 224),), 3))
    said = [token for token, says in zip(made.ids, made.is_answer, strict=True) if says]

    assert said.count(encoder.ids["<|im_end|>"]) == 3
    assert encoder.ids["<|im_start|>"] not in said and encoder.ids["<|image_pad|>"] not in said


def test_a_branched_question_sits_where_it_would_alone(encoder):
    turns = questions(np.random.default_rng(2), ((224, 224), (320, 200)), 3)
    made = encoder.dialogue(turns, branched=True)
    for number, turn in enumerate(turns, 1):
        alone = encoder.dialogue((Turn(turn.question, turn.answer, turns[0].scenes),))
        kept = [i for i, branch in enumerate(made.branch) if branch in (0, number)]
        assert [made.ids[i] for i in kept] == alone.ids
        assert [made.positions[i] for i in kept] == alone.positions


def test_the_second_picture_of_a_conversation_is_numbered():
    shown = [{"type": "image"}, {"type": "image"}]
    text = (
        jinja2.Environment()
        .from_string(TEMPLATE)
        .render(
            messages=[{"role": "system", "content": "x"}, {"role": "user", "content": shown}],
            add_generation_prompt=True,
        )
    )
    picture = "<|vision_start|><|image_pad|><|vision_end|>"

    assert text == f"<|im_start|>user\n{picture}2{picture}<|im_end|>\n<|im_start|>assistant\n"


def test_words_inside_sentences_are_single_tokens(encoder):
    words = {
        word.strip("?.,:;!").removesuffix("'s")
        for group in (*TRAIN_TEMPLATES.values(), *EVAL_TEMPLATES.values())
        for sentence in group
        for word in sentence.split()[1:]
        if "{" not in word
    }

    assert [word for word in sorted(words) if len(encoder.tokenizer.encode(" " + word).ids) > 1] == []


def test_any_text_survives(encoder):
    text = "Ünïcode 漢字 and\ttabs 12345 \u200b"

    assert encoder.tokenizer.decode(encoder.tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_is_the_same_every_time():
    assert build().to_str() == build().to_str()


def test_special_tokens_come_first(encoder):
    assert [encoder.ids[token] for token in SPECIAL] == list(range(len(SPECIAL)))
