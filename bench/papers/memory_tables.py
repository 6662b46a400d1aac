"""`epd-bench memory-tables`: how much more fits where the encoder is not beside prefill (EPD, tables 2 to 4).

Images of a request, batch, KV, each by where the encoder is. Computed from sizes and weights of models; nothing is
started, and nothing was measured on a device. That real stages get the KV cache that is computed for them is a test
(tests/e2e/test_memory_preview.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.papers.epd_models import IMAGES, MODELS, EpdModel
from bench.papers.memory_fit import PLACES, Room, Subject
from bench.papers.memory_models import epd_subject, folder_subject
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from deploy.placement_table import table
from epd_serve.errors import ConfigError
from epd_serve.stage_memory import CONTEXT_BYTES

PAPER_BYTES = 82 * 10**9
"""Of EPD's A800: "82GB memory"."""
BATCH_IMAGES = 10
"""Of a request, in EPD's table 3."""
KV_IMAGES = (5, 10, 20, 40, 80)
"""Of a request, in EPD's table 4."""
KIND = "emulated: computed from sizes of models, nothing was run"

NOTES = """\
Beside them in brackets: what EPD reports of its A800. Its engine (vLLM 0.6.1) held more per image than the flash
kernels that are counted here: its numbers are smaller, and where the encoder took most of that (MiniCPM-V), its gain is
up to three times the one computed. P with spare: our P as it starts, with an encoder loaded for lost features;
`--stage-args 'P:--language-model-only'` leaves that out. vLLM encodes a request in portions, so with it the context
and the KV cache bound a request before the encoder's activations do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="this model instead of the paper's three")
    parser.add_argument("--picture", default="largest", help="with --model: WIDTHxHEIGHT, or largest (default)")
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help=f"of a device (default {PAPER_BYTES / 2**30:.1f}, EPD's)"
    )
    parser.add_argument("--device", choices=sorted(CONTEXT_BYTES), default="cuda", help="whose runtime takes memory")
    add_record_arguments(parser, quick="nothing: it takes a second")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compute, print, write."""
    total_bytes = PAPER_BYTES if arguments.device_memory is None else int(arguments.device_memory * 2**30)
    runtime_bytes = CONTEXT_BYTES[arguments.device]
    if total_bytes <= runtime_bytes:
        raise ConfigError(f"--device-memory {arguments.device_memory:g} is less than the runtime takes")
    cases = epd_cases(total_bytes, runtime_bytes)
    if arguments.model is not None:
        subject = folder_subject(arguments.model, arguments.picture)
        cases = [Case.of(Path(arguments.model).resolve().name, arguments.picture, subject, total_bytes, runtime_bytes)]
    print(f"{KIND}; a device of {total_bytes / 2**30:.1f} GiB\n\n{tables(cases)}")
    if arguments.model is None:
        print(f"\n{NOTES}")
    rows = [{"model": case.model, "picture": case.image} for case in cases]
    write(arguments.json, figures(cases), environment(argv, KIND, asked=arguments), rows)
    return 0


@dataclass(frozen=True)
class Case:
    """A model with a kind of image, on one device.

    Attributes:
        rooms: by place.
        paper_*: beside what is computed, where the paper has it (`EpdModel`).
    """

    model: str
    image: str
    rooms: Mapping[str, Room]
    paper_images: tuple[int, int] | tuple[None, None] = (None, None)
    paper_batch: tuple[int | str | None, ...] = (None,) * 3
    paper_kv: Mapping[int, tuple[str, str]] | None = None

    @classmethod
    def of(
        cls, model: str, image: str, subject: Subject, total_bytes: int, runtime_bytes: int, epd: EpdModel | None = None
    ) -> Case:
        rooms = {place: Room(subject, place, total_bytes, runtime_bytes) for place in PLACES}
        if epd is None:
            return cls(model, image, rooms)
        at = IMAGES.index(image)
        batch = tuple(one or "OOM" for one in epd.paper_batch[at])
        return cls(model, image, rooms, epd.paper_images[at], batch, epd.paper_kv if image == IMAGES[-1] else {})

    @property
    def images(self) -> dict[str, int]:
        """Most of a request, by place. E and P apart: what both allow."""
        most = {place: room.most_images() for place, room in self.rooms.items()}
        apart = {name: min(most["encoder"], most[place]) for name, place in _APART.items()}
        return {"together": most["together"], **apart}

    @property
    def batches(self) -> dict[str, int]:
        """Largest of requests with `BATCH_IMAGES`, by place."""
        return {place: room.largest_batch(BATCH_IMAGES) for place, room in self.rooms.items()}


_APART = {"disaggregated": "prefill", "disaggregated_spare": "spare"}
_PREFILLING = ("together", "prefill", "spare")


def epd_cases(total_bytes: int, runtime_bytes: int) -> list[Case]:
    """Returns the paper's models and images on a device of so many bytes."""
    return [
        Case.of(model.name, image, epd_subject(model, at), total_bytes, runtime_bytes, model)
        for model in MODELS
        for at, image in enumerate(IMAGES)
    ]


def figures(cases: Sequence[Case]) -> dict[str, float]:
    """Returns `TABLE/MODEL/PICTURE/PLACE`. 0: it does not run."""
    results: dict[str, float] = {}
    for case in cases:
        where = f"{case.model}/{case.image}"
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
    images: list[tuple[str, ...]] = [
        ("model", "image", "encoder beside prefill", "E and P apart", "ratio", "P with spare")
    ]
    batches: list[tuple[str, ...]] = [("model", "image", "encoder beside prefill", "E", "P", "P with spare")]
    kv: list[tuple[str, ...]] = [
        ("model", "image", "images", "encoder beside prefill", "P alone", "P with spare", "tokens, beside", "alone")
    ]
    for case in cases:
        about, (together, apart, spare) = (case.model, case.image), case.images.values()
        cells = map(_beside, (together, apart), case.paper_images)
        images.append((*about, *cells, f"{apart / together:.1f}x" if together else "-", str(spare)))
        *own, spare = case.batches.values()
        batches.append((*about, *map(_beside, own, case.paper_batch), str(spare)))
        for count in KV_IMAGES if case.paper_kv != {} else ():  # EPD's table 4 is of the largest images
            shares = [case.rooms[place].kv_share(count) for place in _PREFILLING]
            percent = [one if isinstance(one, str) else f"{one:.0%}" for one in shares]
            beside = map(_beside, percent, (*(case.paper_kv or {}).get(count, (None, None)), None))
            tokens = (f"{case.rooms[place].kv_tokens(count):,}" for place in _PREFILLING[:2])
            kv.append((*about, str(count), *beside, *tokens))
    return "\n\n".join(
        [
            f"Most images of a request (batch 1, KV 80 % of what is free)\n{table(images)}",
            f"Largest batch (requests of {BATCH_IMAGES} images, KV 80 % of what is free)\n{table(batches)}",
            f"Largest KV cache of prefill, share of what is free beside the weights (batch 1)\n{table(kv)}",
        ]
    )


def _beside(own: int | str, paper: int | str | None) -> str:
    return str(own) if paper is None else f"{own} ({paper})"
