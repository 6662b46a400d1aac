"""EPD's memory tables as arithmetic: what fits on a device with the encoder beside prefill, and with each alone. Pure.

EPD (§5.3) encodes all pictures of a request at once and prefills its prompt at once; so here. Four ways to place them:

- `together`: encoder and prefill on one device (EP; DistServe's prefill node, a monolith's prefill).
- `encoder`: the encoder alone (E). No KV cache.
- `prefill`: the language model alone, EPD's P. Ours is so with `--language-model-only`.
- `spare`: our P as it starts, with the encoder loaded, to encode a picture again whose feature was lost.

vLLM encodes in portions of `--max-num-batched-tokens`, and so needs less than EPD's engine where a request has many
pictures: there the context and the KV cache bound a request, not the encoder's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd_serve.activation_peak import feature_cache, language_peak, tower_peak
from epd_serve.model_sizes import LanguageSizes, TowerSizes
from epd_serve.model_weights import ModelWeights

ELEMENT_BYTES = 2
KV_SHARE = 0.8
"""Of the free memory, as EPD's tables 2 and 3 allot it."""
TEXT_TOKENS = 22
"""Of a request beside its pictures (EPD §5)."""
MOST = 100_000
PLACES = ("together", "encoder", "prefill", "spare")


@dataclass(frozen=True)
class Subject:
    """A model and a kind of picture.

    Attributes:
        patches, tokens: of a picture: what goes through the tower, what comes out.
        context: tokens of a request at most.
    """

    tower: TowerSizes
    language: LanguageSizes
    weights: ModelWeights
    patches: int
    tokens: int
    context: int

    def prompt(self, pictures: int) -> int:
        return pictures * self.tokens + TEXT_TOKENS


@dataclass(frozen=True)
class Room:
    """One way to place a subject on a device of `total` bytes, of which `runtime` are taken by the runtime."""

    subject: Subject
    place: str
    total: int
    runtime: int

    @property
    def free(self) -> int:
        """Beside weights and runtime; below 0 where not even these fit."""
        weights = self.subject.weights
        taken = {
            "together": weights.tower + weights.language,
            "encoder": weights.tower,
            "prefill": weights.language,
            "spare": weights.tower + weights.language,
        }[self.place]
        return self.total - self.runtime - taken

    def activations(self, pictures: int, batch: int) -> int:
        """The most that a step takes, with the features of all its pictures."""
        one, count = self.subject, pictures * batch
        features = feature_cache(one.tower, count * one.tokens, element_bytes=ELEMENT_BYTES)
        encoded = {"together": count, "encoder": count, "prefill": 0, "spare": 1}[self.place]
        peak = 0
        if encoded:
            patches = encoded * one.patches
            peak = tower_peak(one.tower, patches, tp=1, element_bytes=ELEMENT_BYTES, tokens=encoded * one.tokens)
        if self.place != "encoder":
            tokens = batch * one.prompt(pictures)
            peak = max(peak, language_peak(one.language, tokens, batch, tp=1, element_bytes=ELEMENT_BYTES))
        return peak + features

    def fits(self, pictures: int, batch: int, kv_share: float = KV_SHARE) -> bool:
        """Such a batch runs: its activations, its KV and each request's length have room."""
        free = self.free
        if free <= 0:
            return False
        if self.place == "encoder":
            return self.activations(pictures, batch) <= free
        prompt = self.subject.prompt(pictures)
        kv = batch * prompt * self.subject.language.kv_token_bytes(1, ELEMENT_BYTES)
        within = prompt <= self.subject.context and kv <= kv_share * free
        return within and self.activations(pictures, batch) <= (1 - kv_share) * free

    def most_pictures(self) -> int:
        """Of one request alone."""
        return _most(lambda count: self.fits(count, 1))

    def largest_batch(self, pictures: int) -> int:
        """Requests of so many pictures in one step."""
        return _most(lambda count: self.fits(pictures, count))

    def kv_share(self, pictures: int) -> float | str:
        """The largest share of the free memory that KV can have beside one such request; else `OOM`, or `OOCL`: it is
        longer than the context."""
        if self.free <= 0:
            return "OOM"
        if self.subject.prompt(pictures) > self.subject.context:
            return "OOCL"
        share = 1 - self.activations(pictures, 1) / self.free
        return share if share > 0 else "OOM"

    def kv_tokens(self, pictures: int) -> int:
        """Tokens that such a KV cache holds; 0 where there is none."""
        share = self.kv_share(pictures)
        if isinstance(share, str) or self.place == "encoder":
            return 0
        return int(share * self.free) // self.subject.language.kv_token_bytes(1, ELEMENT_BYTES)


def _most(holds: Callable[[int], bool]) -> int:
    """The largest number from 0 on for which it holds; it holds for all below that."""
    low, high = 0, 1
    while high <= MOST and holds(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
