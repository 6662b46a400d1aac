"""The demo model's tokenizer and chat template: byte-level BPE in which every word of the task is one token.

Owns the tokenizer files and how a conversation becomes tokens. The template shows pictures before text, and numbers
every picture after a conversation's first, so that "the second picture" has something to hold on to.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, KINDS
from tests.demo_model.architecture import MERGE, picture_grid
from tests.demo_model.dialogue import NO_PICTURE, PLACES, Turn
from tests.demo_model.scenes import Scene
from tests.demo_model.wordings import NUMBERS, ORDINALS, corpus

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% set seen = namespace(pictures=0) %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{m.role}}\n"
    "{% if m.content is string %}{{m.content}}{% else %}"
    "{% for c in m.content %}"
    "{% if c.type=='image' or 'image' in c or 'image_url' in c %}"
    "{% set seen.pictures = seen.pictures + 1 %}{% if seen.pictures > 1 %}{{seen.pictures}}{% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type=='video' or 'video' in c or 'video_url' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% endif %}{% endfor %}"
    "{% for c in m.content %}{% if c.type=='text' %}{{c.text}}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MOST_TOKENS = 1200


def build() -> Tokenizer:
    """Learn the tokenizer from the sentences of training; the same on every machine."""
    things = [*COLOURS, *BACKGROUNDS, *KINDS, *PLACES.values(), *NUMBERS, *ORDINALS, "none", "nothing", "yes", "no"]
    things += ["user", "assistant", "anything", "an", "a", "and", "the", NO_PICTURE, "; :, . 1 2 3 4 picture image"]
    text = [line for it in [*corpus(), *things] for line in (it, it.lower(), " " + it, " " + it.lower())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MOST_TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "extra_special_tokens": list(SPECIAL),
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "TokenizersBackend",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


@dataclass
class Tokens:
    """One conversation, or several questions about the same pictures that do not see each other.

    Attributes:
        ids: tokens; one placeholder per picture token.
        is_answer: which of them the model has to say: answers and their ends.
        branch: per token the number of its question where questions do not see each other, 0 where all see it.
        positions: [length, 3], M-RoPE.
    """

    ids: list[int]
    is_answer: list[bool]
    branch: list[int]
    positions: list[tuple[int, int, int]]


class Encoder:
    """Conversations → tokens, as the template and the tokenizer do it, with their M-RoPE positions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: dict[str, int] = {token: int(tokenizer.token_to_id(token) or 0) for token in SPECIAL}
        self._encoded = functools.lru_cache(maxsize=65_536)(self._encode)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokenizer: tokens of two with the same mean the same."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def dialogue(self, turns: tuple[Turn, ...], *, branched: bool = False) -> Tokens:
        """Tokens of a conversation.

        Args:
            turns: the conversation.
            branched: every question sees the pictures and itself only, as if it were the first; all pictures have to
                come with the first turn.
        """
        tokens = Tokens([], [], [], [])
        start, end, pad = self.ids["<|im_start|>"], self.ids["<|im_end|>"], self.ids["<|image_pad|>"]
        at = branch = pictures = 0

        def add(new: tuple[int, ...], says: bool = False) -> None:
            nonlocal at
            tokens.ids.extend(new)
            tokens.is_answer.extend([says] * len(new))
            tokens.branch.extend([branch] * len(new))
            tokens.positions.extend((at + i,) * 3 for i in range(len(new)))
            at += len(new)

        def show(scene: Scene) -> None:
            nonlocal at
            rows, columns = (side // MERGE for side in picture_grid(*scene.size))
            tokens.ids.extend([pad] * (rows * columns))
            tokens.is_answer.extend([False] * (rows * columns))
            tokens.branch.extend([branch] * (rows * columns))
            tokens.positions.extend((at, at + row, at + column) for row in range(rows) for column in range(columns))
            at += max(rows, columns)

        shared = 0
        for index, turn in enumerate(turns):
            if index == 0 or not branched:
                add((start, *self._encoded("user\n")))
            for scene in turn.scenes:
                pictures += 1
                add((*(self._encoded(str(pictures)) if pictures > 1 else ()), self.ids["<|vision_start|>"]))
                show(scene)
                add((self.ids["<|vision_end|>"],))
            if branched:
                shared, at = (at, at) if index == 0 else (shared, shared)
                branch = index + 1
            add((*self._encoded(turn.question), end, *self._encoded("\n"), start, *self._encoded("assistant\n")))
            add((*self._encoded(turn.answer), end), says=True)
            add(self._encoded("\n"))
        return tokens
