"""The questions that the demo model knows, in many wordings; some are kept for evaluation and never trained on.

Owns the sentences. `SEEN` are trained on, `UNSEEN` are evaluated with; a test holds them apart. Unseen wordings are new
sentences of words that occur in seen ones. Leaves to others: what is asked about which scene, and the
answers (`dialogue`).

Fields: {kind} circle, {colour} red, {name} red circle, {a} "a red circle", "a circle" or "anything red", {p} "the
second picture", "image 2" and the like.
"""

from __future__ import annotations

import re

import numpy as np

SEEN: dict[str, tuple[str, ...]] = {
    "describe": (
        "What is in the picture?",
        "What do you see?",
        "Describe the picture.",
        "What can you see in the picture?",
        "What does the picture show?",
        "Tell me what is in the picture.",
        "What is shown here?",
        "Which shapes are in the picture?",
        "List the shapes.",
        "Name the shapes in the picture.",
        "What is this?",
        "What are the shapes in this image?",
        "Describe this image.",
        "What is in this image?",
        "Describe what you see.",
        "Say what the image shows.",
        "Name everything you can see.",
        "What's in the image?",
        "What is there in the photo?",
        "Describe the shapes.",
        "Which things does this picture show?",
        "List everything in the picture.",
        "What do you see in the picture?",
        "Which shapes can you see?",
        "Tell me what the image shows.",
        "Describe the shapes in this picture.",
        "What's in the picture?",
        "List everything you see in the image.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "Count the shapes.",
        "How many shapes do you see?",
        "How many things are in the image?",
        "What is the number of shapes?",
        "How many objects are there?",
        "Can you count the shapes in the picture?",
        "Count the objects in the image.",
        "Tell me how many shapes there are.",
        "How many figures can you see?",
        "Give me the number of shapes in the picture.",
        "How many things does the picture show?",
        "How many shapes can you see?",
        "How many objects are in the picture?",
        "Count the things in the picture.",
        "Tell me the number of shapes.",
        "How many shapes does the image show?",
    ),
    "colour": (
        "What colour is the {kind}?",
        "Which colour is the {kind}?",
        "What is the colour of the {kind}?",
        "Tell me the colour of the {kind}.",
        "What color is the {kind}?",
        "The {kind} is which colour?",
        "Which colour does the {kind} have?",
        "Name the colour of the {kind}.",
        "What color does the {kind} have?",
        "In what colour is the {kind} drawn?",
        "The {kind}: what colour is it?",
        "Say what colour the {kind} is.",
        "Tell me the color of the {kind}.",
        "Which color is the {kind}?",
        "What colour does the {kind} have?",
        "Tell me what colour the {kind} is.",
        "What is the color of the {kind}?",
        "Name the color of the {kind}.",
    ),
    "shape": (
        "What shape is {colour}?",
        "Which shape is {colour}?",
        "What is {colour}?",
        "What is the {colour} one?",
        "What is that {colour} thing?",
        "What is the {colour} shape?",
        "What kind of shape is the {colour} one?",
        "Name the {colour} shape.",
        "Which shape has the colour {colour}?",
        "The {colour} thing: what is it?",
        "What {colour} shape is there?",
        "Tell me which shape is {colour}.",
        "What is the shape of the {colour} object?",
        "What shape does the {colour} thing have?",
        "Tell me what shape is {colour}.",
        "What is the {colour} thing?",
        "Which shape is the {colour} one?",
        "What kind of shape is {colour}?",
        "What shape is the {colour} object?",
    ),
    "where": (
        "Where is the {name}?",
        "Where is the {name} in the picture?",
        "In which place is the {name}?",
        "Tell me where the {name} is.",
        "Where do you see the {name}?",
        "What is the position of the {name}?",
        "Find the {name}.",
        "The {name}: where is it?",
        "Can you find the {name}?",
        "Where in the image is the {name}?",
        "Which part of the picture has the {name}?",
        "Say where the {name} is.",
        "Where can you see the {name}?",
        "Where is the {name} in the image?",
        "Tell me the position of the {name}.",
        "In which part of the picture is the {name}?",
        "Where in the picture is the {name}?",
    ),
    "yes or no": (
        "Is there {a}?",
        "Is there {a} in the picture?",
        "Do you see {a}?",
        "Can you see {a}?",
        "Does the picture show {a}?",
        "Is {a} in the picture?",
        "Does the image have {a}?",
        "Is there {a} here?",
        "Tell me if there is {a}.",
        "Do you see {a} anywhere?",
        "Is {a} shown?",
        "Do you see {a} in the image?",
        "Is there {a} in the image?",
        "Can you see {a} in the picture?",
        "Does the image show {a}?",
        "Do you see {a} here?",
        "Tell me if you see {a}.",
    ),
    "background": (
        "What colour is the background?",
        "What is the background colour?",
        "Which colour is the background?",
        "What is the colour of the background?",
        "Tell me the background colour.",
        "What color is the background?",
        "What is behind the shapes?",
        "Name the colour of the background.",
        "The background is which colour?",
        "What color does the background have?",
        "Which color is the background?",
        "What colour does the background have?",
        "Tell me the colour of the background.",
        "What is the background color?",
    ),
    "nth": (
        "What is in {p}?",
        "Describe {p}.",
        "What does {p} show?",
        "What do you see in {p}?",
        "Tell me what is in {p}.",
        "Which shapes are in {p}?",
        "List the shapes in {p}.",
        "What is shown in {p}?",
        "And {p}?",
        "What is there in {p}?",
        "Say what {p} shows.",
        "What can you see in {p}?",
        "Name the shapes in {p}.",
        "Tell me what {p} shows.",
        "Describe what is in {p}.",
    ),
    "nth count": (
        "How many shapes are in {p}?",
        "Count the shapes in {p}.",
        "How many shapes do you see in {p}?",
        "How many things are in {p}?",
        "What is the number of shapes in {p}?",
        "Tell me how many shapes {p} has.",
        "How many shapes does {p} show?",
        "How many shapes can you see in {p}?",
        "How many objects are in {p}?",
        "Tell me the number of shapes in {p}.",
    ),
    "each": (
        "Describe each picture.",
        "What is in each picture?",
        "Describe all pictures.",
        "What is in the pictures?",
        "Describe the pictures in order.",
        "Describe the pictures one by one.",
        "List what is in each picture.",
        "Tell me what each picture shows.",
        "What do the pictures show?",
        "What do you see in each picture?",
        "Describe the pictures.",
        "Describe the images.",
        "What does each image show?",
        "Describe each of the images in order.",
        "Tell me what is in each picture.",
        "What does each picture show?",
        "Describe each image.",
        "What is in each image?",
        "Describe all images in order.",
    ),
}

UNSEEN: dict[str, tuple[str, ...]] = {
    "describe": (
        "Tell me what you see.",
        "Name the shapes you see.",
        "Which shapes does the picture show?",
        "What is there in the image?",
        "Say what you see in the picture.",
        "What can you see here?",
    ),
    "count": (
        "How many things can you see?",
        "Tell me how many objects there are.",
        "What is the number of objects in the picture?",
        "Count the figures.",
        "How many figures are there in the image?",
    ),
    "colour": (
        "Tell me which colour the {kind} has.",
        "In which colour is the {kind} drawn?",
        "Say the colour of the {kind}.",
        "The {kind} has which colour?",
        "Give me the color of the {kind}.",
    ),
    "shape": (
        "The {colour} one: what shape is it?",
        "Say what shape the {colour} thing is.",
        "Which shape does the {colour} object have?",
        "Tell me the shape of the {colour} one.",
        "What is the {colour} object?",
    ),
    "where": (
        "Where in this picture do you see the {name}?",
        "Tell me where in the image the {name} is.",
        "In what place is the {name}?",
        "What is the place of the {name}?",
        "Say in which part of the picture the {name} is.",
    ),
    "yes or no": (
        "Is there {a} in this image?",
        "Does this picture have {a}?",
        "Can you see {a} anywhere?",
        "Is {a} in the image?",
        "Do you see {a} in this picture?",
    ),
    "background": (
        "Say what colour the background is.",
        "Which background color does the picture have?",
        "The background: what colour is it?",
        "What colour is behind the shapes?",
    ),
    "nth": (
        "Say what is in {p}.",
        "Which shapes do you see in {p}?",
        "What shapes does {p} show?",
        "Tell me the shapes in {p}.",
    ),
    "nth count": (
        "How many things does {p} show?",
        "Count the objects in {p}.",
        "What is the number of objects in {p}?",
    ),
    "each": (
        "Tell me what all pictures show.",
        "List the shapes in each picture.",
        "Say what each image shows.",
        "What can you see in each picture?",
        "Describe all the pictures in order.",
    ),
}

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
    sentences = (UNSEEN if unseen else SEEN)[task]
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
    sentences = [sentence for group in SEEN.values() for sentence in group]
    sentences += [sentence for _, seen, _ in SMALL_TALK for sentence in seen]
    sentences += [answer for answer, _, _ in SMALL_TALK] + [opening + "." for opening in OPENINGS]
    sentences += [name + "." for number in (1, 2, 3, 4) for name in picture_names(number, number)]
    return [re.sub(r"\{\w+\}", "", sentence) for sentence in sentences]
