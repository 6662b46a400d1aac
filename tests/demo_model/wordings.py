"""The questions that the demo model knows, chosen and varied; small talk, which needs no picture.

Leaves to others: the sentences about pictures (`train_templates`, `eval_templates`), what is asked about
which scene, and the answers (`dialogue`).
"""

from __future__ import annotations

import re

import numpy as np

from tests.demo_model.eval_templates import EVAL_TEMPLATES
from tests.demo_model.train_templates import TRAIN_TEMPLATES

# Questions and answers that need no picture: (answer, seen wordings, unseen wordings).
SMALL_TALK: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "Hello! Send me a picture of coloured shapes.",
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Good morning",
            "Hi there",
            "Hello there!",
            "Good evening!",
            "Hey there!",
            "Hello, good morning!",
            "Hi, hello!",
        ),
        ("Hey, good evening!", "Hey, hello!", "Good morning, hello there!"),
    ),
    (
        "I am a tiny demo model. I can see coloured shapes.",
        (
            "Who are you?",
            "What are you?",
            "Hello, who are you?",
            "Tell me who you are.",
            "Are you a model?",
            "Hi, who are you?",
            "Tell me what you are.",
            "Hello, what are you?",
        ),
        ("Hello, tell me who you are.", "What model are you?", "Hey, who are you?"),
    ),
    (
        "I can name shapes, colours and places, and count shapes.",
        (
            "What can you do?",
            "Help",
            "How can you help me?",
            "What do you know?",
            "Help me!",
            "What can I ask you?",
            "Tell me what you can do.",
            "What can I ask?",
            "Can you help me?",
        ),
        ("Hello, what can you do?", "What can you tell me?", "Tell me what I can ask you."),
    ),
    (
        "You are welcome!",
        (
            "Thanks",
            "Thank you",
            "Thanks!",
            "Thank you!",
            "Thank you very much.",
            "Thanks a lot",
            "Great, thanks!",
            "Thanks very much!",
            "Great, thank you!",
            "Thank you a lot.",
        ),
        ("Thank you, great!", "Thanks, thank you!", "Great, thanks a lot!"),
    ),
    (
        "Goodbye!",
        (
            "Bye",
            "Goodbye",
            "Bye!",
            "See you!",
            "Good night",
            "Goodbye!",
            "Bye, see you!",
            "Goodbye, see you!",
            "Bye bye!",
            "Good night, bye!",
        ),
        ("Bye, good night!", "See you, bye!", "Goodbye, good night!"),
    ),
    (
        "I am fine, thank you.",
        (
            "How are you?",
            "Hello, how are you?",
            "How are you doing?",
            "Are you well?",
            "How do you do?",
            "Hi, how are you?",
            "Hello, how are you doing?",
        ),
        ("Hey, how are you?", "Good morning, how are you?", "Hey there, how are you doing?"),
    ),
    (
        "I only know coloured shapes.",
        (
            "What is the capital of France?",
            "Write a poem.",
            "Tell me a joke.",
            "What time is it?",
            "What is two plus two?",
            "Who wrote this book?",
            "Write some code.",
            "What is the weather today?",
            "Tell me about cats.",
            "Where is Paris?",
            "How old are you?",
            "Sing a song.",
            "Tell me a poem.",
            "What is the weather in Paris?",
            "Write a joke.",
            "Tell me about France.",
        ),
        (
            "Tell me the time.",
            "What is the capital?",
            "Write me a song.",
            "Where is France?",
            "Sing about the weather.",
            "Tell me about Paris.",
        ),
    ),
)

ORDINALS = ("first", "second", "third", "fourth")
NUMBERS = ("one", "two", "three", "four")
OPENINGS = ("Please: ", "Hi! ", "Tell me: ", "Now: ", "And now: ", "Next question: ")


def picture_names(number: int, of: int) -> tuple[str, ...]:
    """How picture `number` (from 1) of `of` may be called."""
    ordinal = ORDINALS[number - 1]
    names = (f"the {ordinal} picture", f"picture {number}", f"the {ordinal} image", f"image {number}")
    return (*names, "the last picture") if number == of > 1 else names


def wording(chance: np.random.Generator, task: str, *, unseen: bool) -> str:
    """A sentence for `task`, with its fields still open; small talk is not among them."""
    sentences = (EVAL_TEMPLATES if unseen else TRAIN_TEMPLATES)[task]
    return sentences[int(chance.integers(len(sentences)))]


def varied(chance: np.random.Generator, sentence: str) -> str:
    """The sentence as people type it: now and then with an opening, in lower case or without its last mark."""
    if chance.random() < 0.12:
        sentence = OPENINGS[int(chance.integers(len(OPENINGS)))] + sentence
    if chance.random() < 0.12:
        sentence = sentence.lower()
    if chance.random() < 0.12:
        sentence = sentence.rstrip("?.!")
    return sentence


def corpus() -> list[str]:
    """Every sentence of training once: what the tokenizer learns its words from."""
    sentences = [sentence for group in TRAIN_TEMPLATES.values() for sentence in group]
    sentences += [sentence for _, seen, _ in SMALL_TALK for sentence in seen]
    sentences += [answer for answer, _, _ in SMALL_TALK] + [opening + "." for opening in OPENINGS]
    sentences += [name + "." for number in (1, 2, 3, 4) for name in picture_names(number, number)]
    return [re.sub(r"\{\w+\}", "", sentence) for sentence in sentences]
