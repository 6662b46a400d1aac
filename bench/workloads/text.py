"""Text of an exact number of tokens: by a model's own tokenizer, or by the rule that a common word is a token.

Without a tokenizer n tokens are n common English words: the large byte-pair vocabularies (Qwen's, Llama's, GPT's) have
each of them as one token. Chat templates and image placeholders come on top in either case: papers leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epd_serve.errors import ConfigError

OPENERS: Sequence[str] = (
    "What Where When Which Who Why How Is Are Does Can Could Please Tell Show Find Read Count Name Describe"
).split()
WORDS: Sequence[str] = (
    "the of and to in is that it for on with as at by from this have not are but what all were when your can said "
    "there use each which she how their will other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been call who oil its "
    "now find long down day did get come made may part over new sound take only little work know place year live me "
    "back give most very after thing our just name good sentence man think say great where help through much before "
    "line right too mean old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land different home us move "
    "try kind hand picture again change off play spell air away animal house point page letter mother answer found "
    "study still learn should world high every near add food between own below country plant last school father keep "
    "tree never start city earth eye light thought head under story saw left few while along might close something "
    "seem next hard open example begin life always those both paper together got group often run important until "
    "children side feet car mile night walk white sea began grow took river four carry state once book hear stop "
    "without second later miss idea enough eat face watch far really almost let above girl sometimes mountain cut "
    "young talk soon list song being leave family body music color stand sun question fish area mark dog horse birds "
    "problem complete room knew since ever piece told usually friends easy heard order red door sure become top ship "
    "across today during short better best however low hours black products happened whole measure remember early "
    "waves reached"
).split()

TRIES = 400


class Words:
    """Makes texts of a length. Here a word is a token."""

    def exactly(self, tokens: int, rng: np.random.Generator) -> str:
        """A text of that many tokens (1 or more)."""
        opener = OPENERS[int(rng.integers(len(OPENERS)))]
        return " ".join([opener, *(WORDS[at] for at in rng.integers(len(WORDS), size=tokens - 1))])

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(text.split())


class TokenizedWords(Words):
    """Counted by the tokenizer of a model directory (`tokenizer.json`), without special tokens.

    Raises:
        ConfigError: there is no tokenizer that can be read.
    """

    def __init__(self, directory: Path) -> None:
        self._where, self._tokenizer = directory, _tokenizer(directory)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def exactly(self, tokens: int, rng: np.random.Generator) -> str:
        """
        Raises:
            ConfigError: the tokenizer cannot make that length from our words.
        """
        for _ in range(TRIES):
            ids = self._tokenizer.encode(super().exactly(tokens, rng), add_special_tokens=False).ids
            text: str = self._tokenizer.decode(ids[:tokens])
            if self.count(text) == tokens:  # a word that was cut may make other tokens
                return text
        raise ConfigError(
            f"the tokenizer in {self._where} makes no text of exactly {tokens} tokens from common words: "
            "leave --tokenizer out, a word counts as a token then",
            param="--tokenizer",
        )


def words(tokenizer: Path | None) -> Words:
    """By the tokenizer of that directory, or by the rule without one."""
    return Words() if tokenizer is None else TokenizedWords(tokenizer)


def _tokenizer(directory: Path) -> Any:
    file = directory / "tokenizer.json"
    wrong = f"{directory} has no tokenizer.json: name a model directory that has"
    if file.is_file():
        try:
            from tokenizers import Tokenizer  # with vLLM; only who names a tokenizer needs it

            return Tokenizer.from_file(str(file))
        except ImportError:
            wrong = "counting tokens needs the package tokenizers: pip install tokenizers"
        except Exception as error:  # noqa: BLE001  (the library raises nothing more exact)
            wrong = f"{file} is not a tokenizer: {error}"
    raise ConfigError(f"{wrong}, or leave --tokenizer out", param="--tokenizer")
