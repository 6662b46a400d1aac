"""The wordings that the demo model is evaluated with and never trained on, per task: new sentences of seen words.

A test holds them apart from `train_templates`, whose fields they have. One that was looked at while wordings were added
belongs there: what is evaluated with has to be new to whoever trains, too.
"""

from __future__ import annotations

EVAL_TEMPLATES: dict[str, tuple[str, ...]] = {
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
