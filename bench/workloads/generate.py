"""Requests of a profile: endless, lazy, fixed by (profile, knobs). Pure but for the tokenizer that counts.

Reuse: each occurrence of an image repeats an earlier one with probability `reuse`. Which one is drawn from those seen
so far, by age with weights rank^-zipf (the first image is rank 1): a few images are popular, as logos and screenshots
are; zipf 0 takes each as likely. A request never has an image twice while there are others, so in the first requests of
a workload with many images in each, and there alone, fewer repeats than asked for are possible.

Texts have an exact number of tokens: by a model's own tokenizer, or by the rule that a common word is a token. The
large byte-pair vocabularies (Qwen's, Llama's, GPT's) have each of them as one. Chat templates and image placeholders
come on top in either case: papers leave them out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads.distributions import Traffic, seeded_rng, spread_quantile
from bench.workloads.profiles import Profile
from bench.workloads.requests import ImageRef, RequestSpec
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


REDRAWS = 16
"""Of a repeated image that the request has already; after that a new image is taken."""


@dataclass(frozen=True)
class Knobs:
    """What a user may turn on any profile.

    Attributes:
        reuse: share of image occurrences that repeat an earlier image, 0 to below 1.
        zipf: how unevenly repeats fall on images; 0 is evenly.
        images: in each request that has any; None leaves it to the profile.
        output_tokens: None leaves it to the profile.
    """

    seed: int = 0
    reuse: float = 0.0
    zipf: float = 1.0
    images: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"reuse is {self.reuse:g}: from 0 to below 1", param="--reuse")
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"zipf is {self.zipf:g}: from 0 (evenly) to 10", param="--zipf")
        for flag, value in (("--pictures-each", self.images), ("--output-tokens", self.output_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}: 1 or more", param=flag)


def requests(profile: Profile, knobs: Knobs, words: Words | None) -> Iterator[RequestSpec]:
    """Without arrival times, which `bench/workloads/requests.py` puts on.

    Args:
        words: None draws sizes and repeats alone, some times as fast: no text, and images that are only told apart.
    """
    drawn, names = _Images(profile, knobs, seeded=words is not None), (profile.name, knobs.seed)
    for index, traffic in enumerate(_traffic(profile, knobs.seed)):
        text_only = spread_quantile(index, *names, "text only") < traffic.text_only
        count = 0 if text_only else traffic.images.at(spread_quantile(index, *names, "images"))
        lengths = profile.text_only_tokens if text_only and profile.text_only_tokens else profile.text_tokens
        tokens = lengths.at(spread_quantile(index, *names, "tokens"))
        yield RequestSpec(
            id=f"{profile.name}-{knobs.seed}-{index}",
            text=words.exactly(tokens, seeded_rng(*names, "text", index)) if words else "",
            images=drawn.take((knobs.images or count) if count else 0),
            max_tokens=knobs.output_tokens or profile.max_tokens,
            text_tokens=tokens,
            pace=traffic.pace,
        )


def _traffic(profile: Profile, seed: int) -> Iterator[Traffic]:
    """What traffic is like around each request: the profile's kinds take turns."""
    for turn, traffic in enumerate(itertools.cycle(profile.traffic)):
        yield from itertools.repeat(traffic, traffic.length(turn, profile.name, seed))


class _Images:
    """Draws images, new ones and repeats. seeded: each has what it is drawn by, else its number."""

    def __init__(self, profile: Profile, knobs: Knobs, *, seeded: bool) -> None:
        self._sizes, self._knobs, self._names = profile.sizes, knobs, (profile.name, knobs.seed)
        self._seeded = seeded
        self._occurrences = itertools.count()
        self._seen: list[ImageRef] = []
        self._weights: list[float] = []  # running sums over ranks

    def take(self, count: int) -> tuple[ImageRef, ...]:
        taken: list[ImageRef] = []
        for _ in range(count):
            taken.append(self._one(taken))
        return tuple(taken)

    def _one(self, beside: list[ImageRef]) -> ImageRef:
        index = next(self._occurrences)
        reuse = self._knobs.reuse if self._seen else 0.0
        repeats = reuse > 0 and spread_quantile(index, *self._names, "repeats") < reuse
        rng = seeded_rng(*self._names, "image", index) if self._seeded or repeats else None
        if repeats and rng is not None:
            for draw in rng.random(REDRAWS):
                again = self._seen[bisect.bisect_left(self._weights, draw * self._weights[-1])]
                if again not in beside:
                    return again
        width, height = self._sizes.at(index, *self._names, "sizes")
        seed = index if rng is None else int(rng.integers(1 << 48))
        self._seen.append(ImageRef(width, height, seed))
        rank = len(self._seen)
        self._weights.append((self._weights[-1] if self._weights else 0.0) + rank**-self._knobs.zipf)
        return self._seen[-1]
