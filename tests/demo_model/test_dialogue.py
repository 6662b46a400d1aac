"""Questions, answers and wordings of the demo model."""

from __future__ import annotations

import re

import numpy as np
import pytest

from epd_serve.demo.pictures import Shape
from tests.demo_model.dialogue import (
    NO_PICTURE,
    ONE_PICTURE,
    SEVERAL,
    about_one,
    about_several,
    conversation,
    questions,
    without_picture,
)
from tests.demo_model.eval_templates import EVAL_TEMPLATES
from tests.demo_model.examination import TASKS, examination, question
from tests.demo_model.scenes import Scene, held_out
from tests.demo_model.train_templates import TRAIN_TEMPLATES
from tests.demo_model.wordings import OPENINGS, SMALL_TALK, picture_names, varied
from tests.e2e.demo_prompts import OTHER_QUESTIONS, PAIRWISE_DIFFERENT, TEXT_ONLY

SCENE = Scene((Shape("red", "circle", 0, 0), Shape("blue", "square", 2, 1)), "grey", (224, 224))
EMPTY = Scene((), "white", (64, 64))


def asked(task: str, scene: Scene = SCENE, tries: int = 60) -> dict[str, str]:
    """Questions of a task with their answers, over many chances."""
    made = [about_one(np.random.default_rng(seed), task, scene, unseen=False) for seed in range(tries)]
    return dict(it for it in made if it)


def core(sentence: str) -> str:
    """What is left of a sentence without case, marks and the choice of spelling."""
    return " ".join(re.sub(r"[^a-z0-9{} ]", " ", sentence.lower()).replace("color", "colour").split())


def test_no_wording_is_both_trained_and_evaluated_whatever_it_opens_with_and_however_it_is_typed():
    trained = [it for group in TRAIN_TEMPLATES.values() for it in group] + [
        it for _, seen, _ in SMALL_TALK for it in seen
    ]
    kept = [it for group in EVAL_TEMPLATES.values() for it in group] + [
        it for _, _, unseen in SMALL_TALK for it in unseen
    ]
    seen = {core(opening + it) for it in trained for opening in ("", *OPENINGS)}

    assert TRAIN_TEMPLATES.keys() == EVAL_TEMPLATES.keys()
    assert [it for it in kept if core(it) in seen] == []
    assert len(set(map(core, kept))) == len(kept)


def test_unseen_wordings_are_made_of_seen_words():
    seen = {word for group in TRAIN_TEMPLATES.values() for it in group for word in core(it).split()}
    kept = {word for group in EVAL_TEMPLATES.values() for it in group for word in core(it).split()}

    assert kept - seen == set()


def test_every_wording_keeps_the_fields_of_its_task():
    for task, group in TRAIN_TEMPLATES.items():
        fields = {frozenset(re.findall(r"\{(\w+)\}", sentence)) for sentence in group + EVAL_TEMPLATES[task]}
        assert len(fields) == 1, task


def test_answers_about_one_picture():
    assert set(asked("describe").values()) == {"a red circle and a blue square"}
    assert set(asked("count").values()) == {"two"}
    assert set(asked("background").values()) == {"grey"}
    assert set(asked("colour").values()) == {"red", "blue"}
    assert set(asked("shape").values()) == {"a circle", "a square"}
    assert set(asked("where").values()) == {"at the top left", "at the bottom"}


@pytest.mark.parametrize(("name", "place"), [("red circle", "at the top left"), ("blue square", "at the bottom")])
def test_where_answers_for_the_shape_that_was_named(name, place):
    assert {answer for question, answer in asked("where").items() if name in question} == {place}


def test_yes_or_no_is_true_and_balanced():
    answers = asked("yes or no", tries=400)
    present = ("red circle", "blue square", "a circle", "a square", "anything red", "anything blue")

    for text, answer in answers.items():
        assert answer == ("yes" if any(it in text for it in present) else "no"), text
    made = [about_one(np.random.default_rng(seed), "yes or no", SCENE, unseen=True) for seed in range(400)]
    assert 0.4 < sum(it[1] == "yes" for it in made if it) / 400 < 0.65


def test_the_empty_picture_allows_only_what_has_an_answer():
    assert set(asked("describe", EMPTY).values()) == {"nothing"}
    assert set(asked("count", EMPTY).values()) == {"none"}
    assert not asked("where", EMPTY) and not asked("colour", EMPTY)
    assert set(asked("yes or no", EMPTY).values()) == {"no"}


def test_a_colour_that_two_shapes_have_is_not_asked_for():
    twins = Scene((Shape("red", "circle", 0, 0), Shape("red", "square", 0, 1)), "white", (224, 224))

    assert not asked("shape", twins)
    assert set(asked("colour", twins).values()) == {"red"}


def test_answers_about_several_pictures():
    scenes = (SCENE, EMPTY, Scene((Shape("orange", "triangle"),), "black", (128, 128)))
    made = {task: {} for task in SEVERAL}
    for task in SEVERAL:
        for seed in range(80):
            asked, answer = about_several(np.random.default_rng(seed), task, scenes, unseen=False)
            made[task][asked] = answer

    each = "first: a red circle and a blue square; second: nothing; third: an orange triangle"
    assert set(made["each"].values()) == {each}
    assert {a for q, a in made["nth"].items() if "second" in q or "2" in q} == {"nothing"}
    assert {a for q, a in made["nth"].items() if "last" in q or "third" in q} == {"an orange triangle"}
    assert {a for q, a in made["nth count"].items() if "first" in q} == {"two"}


def test_one_picture_is_described_in_order_too():
    made = [about_several(np.random.default_rng(seed), "each", (SCENE,), unseen=False) for seed in range(9)]

    assert {answer for _, answer in made} == {"first: a red circle and a blue square"}


def test_every_kind_of_question_is_asked_without_a_picture():
    made = [without_picture(np.random.default_rng(seed), unseen=True) for seed in range(600)]
    words = {text for text, _ in made}
    alike = [re.sub(r"\\{\w+\\}", ".+", re.escape(it)) for group in EVAL_TEMPLATES.values() for it in group]

    assert {answer for _, answer in made} == {NO_PICTURE}
    assert [it for it in alike if not any(re.fullmatch(it, word) for word in words)] == []


def test_only_the_last_of_several_is_called_the_last():
    assert "the last picture" in picture_names(3, 3)
    assert not any("last" in name for name in (*picture_names(2, 3), *picture_names(1, 1)))


@pytest.mark.parametrize("pictures", [0, 1, 3])
def test_training_dialogues_show_each_picture_once_and_never_a_held_out_one(pictures):
    for seed in range(40):
        sizes = ((224, 224),) * pictures
        for turns in (
            questions(np.random.default_rng(seed), sizes, 5),
            conversation(np.random.default_rng(seed), sizes, 4),
            conversation(np.random.default_rng(seed), sizes, 10),
        ):
            shown = [scene for turn in turns for scene in turn.scenes]
            assert len(shown) == pictures
            assert not any(held_out(scene.shapes) for scene in shown)
            assert len(turns) in (4, 5, 10)
            assert pictures or all(turn.answer == NO_PICTURE or "picture" not in turn.question for turn in turns)


def test_pictures_come_with_any_turn_and_nobody_denies_one_that_has_come():
    came, denied = set(), 0
    for seed in range(200):
        seen = 0
        for number, turn in enumerate(conversation(np.random.default_rng(seed), ((224, 224),) * 2, 5)):
            seen += len(turn.scenes)
            came |= {number for _ in turn.scenes}
            denied += turn.answer == NO_PICTURE
            assert not (seen and turn.answer == NO_PICTURE)

    assert came == {0, 1, 2, 3, 4} and denied > 5


def test_varied_sentences_keep_their_words():
    chance = np.random.default_rng(0)
    varieties = {varied(chance, "What is in the picture?") for _ in range(200)}

    assert all("what is in the picture" in it.lower() for it in varieties)
    assert len(varieties) > 10


def test_the_examination_is_fixed_by_its_seed_unseen_and_complete():
    items = examination(6, seed=1)

    assert items == examination(6, seed=1) != examination(6, seed=2)
    assert [it.task for it in items] == [task for task in TASKS for _ in range(6)]
    for it in items:
        scenes = [scene for turn in it.turns for scene in turn.scenes]
        assert all(held_out(scene.shapes) for scene in scenes if scene.shapes)
        if it.task in ONE_PICTURE:
            assert len(scenes) == 1 and len(it.turns) == 1
        if it.task in SEVERAL:
            assert 2 <= len(scenes) <= 4
        if it.task == "second turn":
            assert len(it.turns) == 2 and not it.turns[1].scenes


def test_an_item_does_not_depend_on_how_many_are_asked():
    assert examination(3, 1, ("where",)) == [question("where", number, 1) for number in range(3)]


def test_the_prompts_of_the_end_to_end_tests_are_trained_on():
    sentences = {sentence for group in TRAIN_TEMPLATES.values() for sentence in group}
    sentences |= {
        sentence.format(kind="circle", colour="green", name="red circle")
        for task in ("colour", "shape", "where")
        for sentence in TRAIN_TEMPLATES[task]
    }
    talk = {sentence: answer for answer, seen, _ in SMALL_TALK for sentence in seen}

    assert all(prompt.question in sentences for prompt in PAIRWISE_DIFFERENT + OTHER_QUESTIONS)
    assert all(talk[text] == answer for text, answer in TEXT_ONLY)
