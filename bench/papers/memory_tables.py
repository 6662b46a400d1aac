"""`epd-bench memory-tables`: how much more fits where the encoder is not beside prefill (EPD, tables 2 to 4).

Images of a request, batch, KV, each by where the encoder is. Computed from sizes and weights of the paper's models;
nothing is started, and nothing was measured on a device. That real stages get the KV cache that is computed for them is
a test (tests/e2e/test_memory_preview.py); of a model of yours `epd-serve layout LAYOUT --model DIR` shows it.

EPD (§5.3) encodes all images of a request at once and prefills its prompt at once; so here. vLLM encodes in portions of
`--max-num-batched-tokens`, and so needs less than EPD's engine where a request has many images: there the context and
the KV cache bound a request, not the encoder's activations.
"""

from __future__ import annotations

import argparse
import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from bench.micro.rows import table_of
from bench.papers.epd_models import IMAGES, MODELS, SLICE_PATCHES, EpdModel
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from epd_serve.activation_peak import feature_cache, language_peak, tower_peak
from epd_serve.errors import ConfigError
from epd_serve.stage_memory import CONTEXT_BYTES

PAPER_BYTES = 82 * 10**9
"""Of EPD's A800: "82GB memory"."""
BATCH_IMAGES = 10
"""Of a request, in EPD's table 3."""
KV_IMAGES = (5, 10, 20, 40, 80)
"""Of a request, in EPD's table 4."""
ELEMENT_BYTES = 2
KV_SHARE = 0.8
"""Of the free memory, as EPD's tables 2 and 3 allot it."""
TEXT_TOKENS = 22
"""Of a request beside its images (EPD §5)."""
MOST = 100_000
KIND = "emulated: computed from sizes of models, nothing was run"

NOTES = """\
Beside them in brackets: what EPD reports of its A800. Its engine (vLLM 0.6.1) held more per image than the flash
kernels that are counted here: its numbers are smaller, and where the encoder took most of that (MiniCPM-V), its gain is
up to three times the one computed. P with spare: our P, with an encoder loaded for lost features; it has no other form
yet, since with `--language-model-only` at P the proxy answers media with 400. vLLM encodes a request in portions, so
with the encoder beside it the context and the KV cache bound a request before the encoder's activations do."""


class Place(NamedTuple):
    """What is on a device: the encoder's weights, the language model, and the images that a step encodes; None: all."""

    tower: bool
    language: bool
    encodes: int | None


PLACES: Mapping[str, Place] = {
    "together": Place(True, True, None),  # EP; DistServe's prefill node, a monolith's prefill
    "encoder": Place(True, False, None),
    "prefill": Place(False, True, 0),  # EPD's P; not ours yet: see NOTES
    "spare": Place(True, True, 1),  # our P, which encodes an image again whose feature was lost
}
_APART = {"disaggregated": "prefill", "disaggregated_spare": "spare"}
Show = str | Callable[[Any], object]
_PREFILLING = ("together", "prefill", "spare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help=f"of a device (default {PAPER_BYTES / 2**30:.1f}, EPD's)"
    )
    add_record_arguments(parser, quick="nothing: it takes a second")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compute, print, write. Raises ConfigError for a device on which nothing is left."""
    total_bytes = PAPER_BYTES if arguments.device_memory is None else int(arguments.device_memory * 2**30)
    if total_bytes <= CONTEXT_BYTES["cuda"]:
        raise ConfigError(f"--device-memory {arguments.device_memory:g} is less than the runtime takes")
    cases = [Case(model, at, total_bytes) for model in MODELS for at in range(len(IMAGES))]
    print(f"{KIND}; a device of {total_bytes / 2**30:.1f} GiB\n\n{tables(cases)}\n\n{NOTES}")
    rows = [{"model": case.model.name, "picture": IMAGES[case.image]} for case in cases]
    write(arguments.json, figures(cases), environment(argv, KIND, asked=arguments), rows)
    return 0


@dataclass(frozen=True)
class Room:
    """A model at a place on a device of `total_bytes`, with images that are cut into so many slices."""

    model: EpdModel
    slices: int
    place: Place
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """Beside weights and runtime; below 0 where not even these fit."""
        weights, place = self.model.weights, self.place
        used = CONTEXT_BYTES["cuda"] + place.tower * weights.tower + place.language * weights.language
        return self.total_bytes - used

    def prompt_tokens(self, images: int) -> int:
        return images * self.slices * self.model.slice_tokens + TEXT_TOKENS

    def activation_bytes(self, images: int, batch: int) -> int:
        """Returns the most that a step takes, with the features of all its images."""
        tower, tokens = self.model.tower, self.slices * self.model.slice_tokens
        count = images * batch
        encoded = count if self.place.encodes is None else self.place.encodes
        sizes = {"tp": 1, "element_bytes": ELEMENT_BYTES}
        peaks = [tower_peak(tower, encoded * self.slices * SLICE_PATCHES, tokens=encoded * tokens, **sizes)]
        if self.place.language:
            peaks.append(language_peak(self.model.language, batch * self.prompt_tokens(images), batch, **sizes))
        return max(peaks) + feature_cache(tower, count * tokens, element_bytes=ELEMENT_BYTES)

    def fits(self, images: int, batch: int) -> bool:
        """Such a batch runs: its activations, its KV and each request's length have room."""
        free, activations, tokens = self.free_bytes, self.activation_bytes(images, batch), self.prompt_tokens(images)
        if free <= 0 or not self.place.language:
            return 0 < activations <= free
        within = tokens <= self.model.context and batch * tokens * self._token_bytes <= KV_SHARE * free
        return within and activations <= (1 - KV_SHARE) * free

    def most_images(self) -> int:
        """Returns how many one request alone may have."""
        return _most(lambda images: self.fits(images, 1))

    def largest_batch(self) -> int:
        """Returns how many requests with `BATCH_IMAGES` one step may have."""
        return _most(lambda batch: self.fits(BATCH_IMAGES, batch))

    def kv_share(self, images: int) -> float | str:
        """Returns the largest share of the free memory that KV can have beside one such request.

        Else `OOM`: it does not fit, or `OOCL`: it is longer than the context.
        """
        free = self.free_bytes
        if free > 0 and self.prompt_tokens(images) > self.model.context:
            return "OOCL"
        share = 1 - self.activation_bytes(images, 1) / free if free > 0 else 0.0
        return share if share > 0 else "OOM"

    def kv_tokens(self, images: int) -> int:
        """Returns the tokens that such a KV cache of prefill holds; 0 where there is none."""
        share = self.kv_share(images)
        return 0 if isinstance(share, str) else int(share * self.free_bytes) // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return self.model.language.kv_token_bytes(1, ELEMENT_BYTES)


def _most(holds: Callable[[int], bool]) -> int:
    """Returns the largest number for which it holds; it holds for all below that."""
    return bisect.bisect_left(range(1, MOST), True, key=lambda number: not holds(number))


class Case:
    """A model with a kind of image, on one device.

    Attributes:
        image: its number in `IMAGES`. rooms: by place.
        images: most of a request, by place; E and P apart: what both allow. batches: largest of requests with
            `BATCH_IMAGES`, by place.
    """

    def __init__(self, model: EpdModel, image: int, total_bytes: int) -> None:
        self.model, self.image = model, image
        self.rooms = {name: Room(model, model.slices[image], place, total_bytes) for name, place in PLACES.items()}
        most = {name: room.most_images() for name, room in self.rooms.items()}
        apart = {name: min(most["encoder"], most[place]) for name, place in _APART.items()}
        self.images = {"together": most["together"], **apart}
        self.batches = {name: room.largest_batch() for name, room in self.rooms.items()}
        self.paper_images, self.paper_batch = model.paper_images[image], model.paper_batch[image]

    def kv_share(self, place: str, images: int) -> tuple[str, str]:
        """In percent, ours and the paper's."""
        share, paper = self.rooms[place].kv_share(images), self.model.paper_kv.get(images, ("", ""))
        percent = share if isinstance(share, str) else f"{share:.0%}"
        return percent, dict(zip(("together", "prefill"), paper, strict=True)).get(place, "")


def figures(cases: Sequence[Case]) -> dict[str, float]:
    """Returns `TABLE/MODEL/PICTURE/PLACE`. 0: it does not run."""
    results: dict[str, float] = {}
    for case in cases:
        where = f"{case.model.name}/{IMAGES[case.image]}"
        results |= {f"pictures_per_request/{where}/{place}": count for place, count in case.images.items()}
        results |= {f"max_batch/{where}/{place}": batch for place, batch in case.batches.items()}
        for count in KV_IMAGES:
            for place in _PREFILLING:
                share = case.rooms[place].kv_share(count)
                at = f"{where}/{count} pictures/{place}"
                results[f"kv_share/{at}"] = 0.0 if isinstance(share, str) else round(share, 4)
                results[f"kv_tokens/{at}"] = case.rooms[place].kv_tokens(count)
    return results


def tables(cases: Sequence[Case]) -> str:
    """Returns the three tables; the paper's numbers in brackets where it has them."""
    about: dict[str, Show] = {"model": "{0.model.name}", "image": lambda case: IMAGES[case.image]}
    images: dict[str, Show] = {
        "encoder beside prefill": lambda case: _beside(case.images["together"], case.paper_images[0]),
        "E and P apart": lambda case: _beside(case.images["disaggregated"], case.paper_images[1]),
        "ratio": lambda case: f"{case.images['disaggregated'] / (case.images['together'] or math.nan):.1f}x",
        "P with spare": "{0.images[disaggregated_spare]}",
    }
    batches: dict[str, Show] = {
        "encoder beside prefill": lambda case: _beside(case.batches["together"], case.paper_batch[0]),
        "E": lambda case: _beside(case.batches["encoder"], case.paper_batch[1]),
        "P": lambda case: _beside(case.batches["prefill"], case.paper_batch[2]),
        "P with spare": "{0.batches[spare]}",
    }
    kv: dict[str, Show] = {
        "model": "{0[0].model.name}",
        "images": "{0[1]}",
        "encoder beside prefill": lambda one: _beside(*one[0].kv_share("together", one[1])),
        "P alone": lambda one: _beside(*one[0].kv_share("prefill", one[1])),
        "P with spare": lambda one: _beside(*one[0].kv_share("spare", one[1])),
        "tokens, beside": lambda one: f"{one[0].rooms['together'].kv_tokens(one[1]):,}",
        "alone": lambda one: f"{one[0].rooms['prefill'].kv_tokens(one[1]):,}",
    }
    largest = [case for case in cases if IMAGES[case.image] == IMAGES[-1]]
    return "\n\n".join(
        [
            f"Most images of a request (batch 1, KV 80 % of what is free)\n{table_of(cases, about | images)}",
            f"Largest batch ({BATCH_IMAGES} images each, KV 80 % of what is free)\n{table_of(cases, about | batches)}",
            f"Largest KV cache of prefill, share of what is free beside the weights (batch 1, images of {IMAGES[-1]})\n"
            f"{table_of(product(largest, KV_IMAGES), kv)}",
        ]
    )


def _beside(own: int | str, paper: int | str) -> str:
    return f"{own} ({paper})" if paper else str(own)
