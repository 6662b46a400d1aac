"""Pictures, questions and the demo model's answers: fixed, so that a wrong picture's feature shows as a wrong answer.

Verified in plain transformers (bfloat16, greedy) by `tests/epd_serve/test_demo_answers.py`. The answers to
"What is in the picture?" differ pairwise, the sizes range from 64 to 1024 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from epd_serve.demo.pictures import Shape, draw

WHAT = "What is in the picture?"


@dataclass(frozen=True)
class DemoPrompt:
    """One picture with a question that the demo model answers rightly."""

    shapes: tuple[Shape, ...]
    size: int | tuple[int, int]
    answer: str
    question: str = WHAT
    background: str = "white"

    def picture(self) -> Image.Image:
        return draw(self.shapes, self.size, self.background)


PAIRWISE_DIFFERENT = (
    DemoPrompt((Shape("red", "circle"),), 224, "a red circle"),
    DemoPrompt((Shape("blue", "square"),), 64, "a blue square"),
    DemoPrompt((Shape("green", "triangle", 0, 2),), 128, "a green triangle"),
    DemoPrompt((Shape("yellow", "circle", 2, 0),), (320, 200), "a yellow circle", background="black"),
    DemoPrompt((Shape("purple", "square", 0, 0),), 512, "a purple square"),
    DemoPrompt((Shape("orange", "triangle", 2, 2),), 1024, "an orange triangle"),
    DemoPrompt((Shape("blue", "circle", 1, 0),), (200, 320), "a blue circle", background="grey"),
    DemoPrompt((Shape("red", "square", 0, 1),), (640, 480), "a red square"),
    DemoPrompt(
        (Shape("blue", "square", 1, 0), Shape("green", "triangle", 1, 2)), 256, "a blue square and a green triangle"
    ),
    DemoPrompt(
        (Shape("red", "circle", 1, 0), Shape("yellow", "square", 1, 2)), 384, "a red circle and a yellow square"
    ),
    DemoPrompt(
        (Shape("purple", "circle", 0, 0), Shape("orange", "square", 2, 2)), 160, "a purple circle and an orange square"
    ),
    DemoPrompt(
        (Shape("green", "circle", 1, 0), Shape("red", "triangle", 1, 2)), 768, "a green circle and a red triangle"
    ),
)

OTHER_QUESTIONS = (
    DemoPrompt((Shape("red", "circle"),), 224, "one", "How many shapes are there?"),
    DemoPrompt(
        (Shape("blue", "square", 1, 0), Shape("green", "triangle", 1, 2)), 256, "two", "How many shapes are there?"
    ),
    DemoPrompt((Shape("red", "circle"),), 224, "red", "What colour is the circle?"),
    DemoPrompt((Shape("yellow", "circle"),), 224, "black", "What colour is the background?", background="black"),
    DemoPrompt((Shape("green", "triangle"),), 224, "a triangle", "What shape is green?"),
    DemoPrompt((Shape("red", "circle"),), 224, "in the middle", "Where is the red circle?"),
)

TEXT_ONLY = (
    ("Hello", "Hello! Send me a picture of coloured shapes."),
    ("Who are you?", "I am a tiny demo model. I can see coloured shapes."),
    ("Thanks", "You are welcome!"),
)
