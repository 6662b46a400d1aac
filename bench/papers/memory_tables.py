"""`epd-bench memory-tables`: how much more fits where the encoder is not beside prefill (EPD, tables 2 to 4).

Images of a request, batch, KV, each by where the encoder is. Computed from sizes and weights of the paper's models
(`epd_models.json`); nothing was measured on a device. That real stages get the KV cache that is
computed for them is a test (tests/e2e/test_memory_preview.py); of a model of yours `epd-serve layout LAYOUT --model
DIR` shows it. Printed is what the paper prints, beside it what it reports of its A800; --json has the other sizes, too.

EPD (§5.3) encodes all images of a request at once and prefills its prompt at once; so here. vLLM encodes in portions of
`--max-num-batched-tokens`, and so needs less than EPD's engine where a request has many images: there the context and
the KV cache bound a request, not the encoder's activations. EPD's engine (vLLM 0.6.1) held more per image than the
flash kernels that are counted here: its numbers are smaller, and where the encoder took most of that (MiniCPM-V), its
gain is up to three times the one computed. `prefill` is our P with `--encoder-free`, `spare` our P without it, with an
encoder loaded for lost features. `--real` starts both on this host's CPU: what they weigh (`encoder_free.py`), and the
three tables for a model in the paper's proportions, on devices that the kernel bounds (`real_tables.py`)."""

from __future__ import annotations

import argparse
import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.micro.rows import table_of
from bench.papers import encoder_free, real_tables
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from epd_serve.activation_peak import feature_cache, language_peak, tower_peak
from epd_serve.errors import ConfigError
from epd_serve.model_sizes import LanguageSizes, TowerSizes
from epd_serve.model_weights import ModelWeights
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
SHOWN = {"figure": "{figure}", "value": "{value:g}"}
REAL_PARTS = ("weights", "tables")
REAL_KIND = "real: figures of real/, stages on CPU; all others are computed from sizes of models"
KIND = "emulated: computed from sizes of models, nothing was run"


class EpdModel(msgspec.Struct, frozen=True):
    """Attributes:
    context: tokens of a request. slices: by image. slice_tokens: that a slice becomes. slice_patches: (448 / 14)².
    paper: by figure, without the model's name; a share in percent, or `OOM`, `OOCL` (out of context limit).
    """

    name: str
    tower: TowerSizes
    language: LanguageSizes
    weights: ModelWeights
    context: int
    slices: dict[str, int]
    slice_tokens: int
    paper: dict[str, int | str]
    slice_patches: int = 1024


class _File(msgspec.Struct):
    models: list[EpdModel]


MODELS = msgspec.json.decode(Path(__file__).with_name("epd_models.json").read_bytes(), type=_File).models


class Place(NamedTuple):
    """What is on a device: the encoder's weights, the language model, and the images that a step encodes; None: all."""

    tower: bool
    language: bool
    encodes: int | None


PLACES: Mapping[str, Place] = {
    "together": Place(True, True, None),  # EP; DistServe's prefill node, a monolith's prefill
    "encoder": Place(True, False, None),
    "prefill": Place(False, True, 0),  # EPD's P; ours with --encoder-free
    "spare": Place(True, True, 1),  # our P, which encodes an image again whose feature was lost
}
_APART = {"disaggregated": "prefill", "disaggregated_spare": "spare"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help=f"of a device (default {PAPER_BYTES / 2**30:.1f}, EPD's)"
    )
    parser.add_argument(
        "--real",
        nargs="*",
        choices=REAL_PARTS,
        metavar="PART",
        help="start stages with and without the encoder on this host: weights, what they weigh; tables, what fits "
        "(no PART: both)",
    )
    add_record_arguments(parser, quick="with --real: one family; else nothing, it takes a second")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compute, print, write. Raises ConfigError for a device on which nothing is left."""
    total_bytes = PAPER_BYTES if arguments.device_memory is None else int(arguments.device_memory * 2**30)
    if total_bytes <= CONTEXT_BYTES["cuda"]:
        raise ConfigError(f"--device-memory {arguments.device_memory:g} is less than the runtime takes")
    found = figures(MODELS, total_bytes)
    rows = [
        {"figure": name, "computed": found[name], "paper": printed}
        for model in MODELS
        for figure, printed in model.paper.items()
        for name in [figure_name(figure, model)]
    ]
    print(f"{KIND}; a device of {total_bytes / 2**30:.1f} GiB; 0: it does not run\n")
    print(table_of(rows, {"figure": "{figure}", "computed": "{computed:g}", "EPD": "{paper}"}))
    env = environment(argv, KIND if arguments.real is None else REAL_KIND, asked=arguments)
    if arguments.real is not None:
        parts, more = arguments.real or REAL_PARTS, []
        if "weights" in parts:
            more += [*encoder_free.plan(), *encoder_free.measure(arguments.quick)]
        if "tables" in parts:
            beside = [computed_beside(*one) for one in real_tables.families(arguments.quick)]
            starts = {"together": "together", "apart": "encoder_free"}
            begin = {
                (row["family"], start): row["values"][f"2/FAMILY/max_images_{name}"]
                for row in beside
                for start, name in starts.items()
            }
            more += [*beside, *real_tables.measure(begin, arguments.quick)]
        own = {**encoder_free.figures(more), **real_tables.figures(more)}
        print(table_of([{"figure": name, "value": value} for name, value in own.items()], SHOWN))
        found, rows = {**found, **own}, [*rows, *more]
    write(arguments.json, found, env, rows)
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
        peaks = [tower_peak(tower, encoded * self.slices * self.model.slice_patches, tokens=encoded * tokens, **sizes)]
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

    def kv_share(self, images: int) -> float:
        """Returns the largest share of the free memory that KV can have beside one such request.

        0: the request does not fit, or is longer than the context.
        """
        free = self.free_bytes
        if free <= 0 or self.prompt_tokens(images) > self.model.context:
            return 0.0
        return max(0.0, 1 - self.activation_bytes(images, 1) / free)

    def kv_tokens(self, images: int) -> int:
        """Returns the tokens that such a KV cache of prefill holds."""
        return int(self.kv_share(images) * self.free_bytes) // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return self.model.language.kv_token_bytes(1, ELEMENT_BYTES)


def _most(holds: Callable[[int], bool]) -> int:
    """Returns the largest number for which it holds; it holds for all below that."""
    return bisect.bisect_left(range(1, MOST), True, key=lambda number: not holds(number))


def computed_beside(family: str, sizes: real_tables.Sizes) -> dict[str, Any]:
    """Returns a row with the figures of a model that `real_tables` starts, computed as those of the paper's models."""
    tokens = sizes.language.max_positions
    of_an_image = {"slice_tokens": real_tables.IMAGE_TOKENS, "slice_patches": real_tables.PATCHES}
    model = EpdModel(family, sizes.tower, sizes.language, sizes.weights, tokens, {"": 1}, paper={}, **of_an_image)
    total = real_tables.DEVICE_BYTES + CONTEXT_BYTES["cuda"]
    together, encoder = (Room(model, 1, PLACES[name], total) for name in ("together", "encoder"))
    prefill = Room(model, 1, PLACES["prefill"], total - sizes.slab_bytes)
    images = {"together": together.most_images(), "encoder_free": min(encoder.most_images(), prefill.most_images())}
    values: dict[str, float] = {f"2/FAMILY/max_images_{name}": count for name, count in images.items()}
    for count in real_tables.PEAK_IMAGES:
        for name, room in (("together", together), ("encoder_free", prefill)):
            values[f"4/FAMILY/kv_share/{count} pictures/{name}"] = round(room.kv_share(count), 4)
    return {"kind": "computed", "family": family, "values": values}


def figure_name(figure: str, model: EpdModel) -> str:
    """`TABLE/MODEL/PICTURE/…` of a figure without the model."""
    kind, _, rest = figure.partition("/")
    return f"{kind}/{model.name}/{rest}"


def figures(models: Sequence[EpdModel], total_bytes: int = PAPER_BYTES) -> dict[str, float]:
    """Returns `TABLE/MODEL/PICTURE/PLACE`. 0: it does not run."""
    results: dict[str, float] = {}
    for model, image in ((one, image) for one in models for image in one.slices):
        rooms = {name: Room(model, model.slices[image], place, total_bytes) for name, place in PLACES.items()}
        most = {name: room.most_images() for name, room in rooms.items()}
        images = {"together": most["together"]}
        images |= {name: min(most["encoder"], most[place]) for name, place in _APART.items()}
        found: dict[str, float] = {f"pictures_per_request/{image}/{name}": count for name, count in images.items()}
        found |= {f"max_batch/{image}/{name}": room.largest_batch() for name, room in rooms.items()}
        for count in KV_IMAGES:
            for name, room in ((name, room) for name, room in rooms.items() if room.place.language):
                found[f"kv_share/{image}/{count} pictures/{name}"] = round(room.kv_share(count), 4)
                found[f"kv_tokens/{image}/{count} pictures/{name}"] = room.kv_tokens(count)
        results |= {figure_name(name, model): value for name, value in found.items()}
    return results
