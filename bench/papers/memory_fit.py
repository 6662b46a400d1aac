"""EPD's memory tables as arithmetic: what fits on a device with the encoder beside prefill, and with each alone. Pure.

EPD (§5.3) encodes all images of a request at once and prefills its prompt at once; so here. Four ways to place them:

- `together`: encoder and prefill on one device (EP; DistServe's prefill node, a monolith's prefill).
- `encoder`: the encoder alone (E). No KV cache.
- `prefill`: the language model alone, EPD's P. Ours is so with `--language-model-only`.
- `spare`: our P as it starts, with the encoder loaded, to encode an image again whose feature was lost.

vLLM encodes in portions of `--max-num-batched-tokens`, and so needs less than EPD's engine where a request has many
images: there the context and the KV cache bound a request, not the encoder's activations.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from epd_serve.activation_peak import feature_cache, language_peak, tower_peak
from epd_serve.model_sizes import LanguageSizes, TowerSizes
from epd_serve.model_weights import ModelWeights

ELEMENT_BYTES = 2
KV_SHARE = 0.8
"""Of the free memory, as EPD's tables 2 and 3 allot it."""
TEXT_TOKENS = 22
"""Of a request beside its images (EPD §5)."""
MOST = 100_000


class Place(NamedTuple):
    """What is on a device: the encoder's weights, the language model, and the images that a step encodes; None: all."""

    tower: bool
    language: bool
    encodes: int | None


PLACES: Mapping[str, Place] = {
    "together": Place(True, True, None),
    "encoder": Place(True, False, None),
    "prefill": Place(False, True, 0),
    "spare": Place(True, True, 1),
}


@dataclass(frozen=True)
class Subject:
    """A model and a kind of image.

    Attributes:
        patches, tokens: of an image: what goes through the tower, what comes out.
        context: tokens of a request at most.
    """

    tower: TowerSizes
    language: LanguageSizes
    weights: ModelWeights
    patches: int
    tokens: int
    context: int

    def prompt_tokens(self, images: int) -> int:
        return images * self.tokens + TEXT_TOKENS


@dataclass(frozen=True)
class Room:
    """A subject at a place on a device of `total_bytes`, of which `runtime_bytes` are taken by the runtime."""

    subject: Subject
    place: str
    total_bytes: int
    runtime_bytes: int

    @property
    def free_bytes(self) -> int:
        """Beside weights and runtime; below 0 where not even these fit."""
        weights, place = self.subject.weights, PLACES[self.place]
        return self.total_bytes - self.runtime_bytes - place.tower * weights.tower - place.language * weights.language

    def activation_bytes(self, images: int, batch: int) -> int:
        """Returns the most that a step takes, with the features of all its images."""
        one, place, count = self.subject, PLACES[self.place], images * batch
        encoded = count if place.encodes is None else place.encodes
        peaks = [0]
        if encoded:
            sizes = {"tp": 1, "element_bytes": ELEMENT_BYTES, "tokens": encoded * one.tokens}
            peaks.append(tower_peak(one.tower, encoded * one.patches, **sizes))
        if place.language:
            tokens = batch * one.prompt_tokens(images)
            peaks.append(language_peak(one.language, tokens, batch, tp=1, element_bytes=ELEMENT_BYTES))
        return max(peaks) + feature_cache(one.tower, count * one.tokens, element_bytes=ELEMENT_BYTES)

    def fits(self, images: int, batch: int) -> bool:
        """Such a batch runs: its activations, its KV and each request's length have room."""
        free, activations = self.free_bytes, self.activation_bytes(images, batch)
        if free <= 0 or not PLACES[self.place].language:
            return 0 < activations <= free
        prompt_tokens = self.subject.prompt_tokens(images)
        within = prompt_tokens <= self.subject.context and batch * prompt_tokens * self._token_bytes <= KV_SHARE * free
        return within and activations <= (1 - KV_SHARE) * free

    def most_images(self) -> int:
        """Returns how many one request alone may have."""
        return _most(lambda images: self.fits(images, 1))

    def largest_batch(self, images: int) -> int:
        """Returns how many requests of so many images one step may have."""
        return _most(lambda batch: self.fits(images, batch))

    def kv_share(self, images: int) -> float | str:
        """Returns the largest share of the free memory that KV can have beside one such request.

        Else `OOM`: it does not fit, or `OOCL`: it is longer than the context.
        """
        free = self.free_bytes
        if free > 0 and self.subject.prompt_tokens(images) > self.subject.context:
            return "OOCL"
        share = 1 - self.activation_bytes(images, 1) / free if free > 0 else 0.0
        return share if share > 0 else "OOM"

    def kv_tokens(self, images: int) -> int:
        """Returns the tokens that such a KV cache holds; 0 where there is none."""
        share = self.kv_share(images)
        if isinstance(share, str) or not PLACES[self.place].language:
            return 0
        return int(share * self.free_bytes) // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return self.subject.language.kv_token_bytes(1, ELEMENT_BYTES)


def _most(holds: Callable[[int], bool]) -> int:
    """Returns the largest number for which it holds; it holds for all below that."""
    return bisect.bisect_left(range(1, MOST), True, key=lambda number: not holds(number))
