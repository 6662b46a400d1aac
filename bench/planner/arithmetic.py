"""Readings of presets that simulate nothing: rows by the profile alone, or by the model's shapes.

Pure but for the profiles that are read.

    batches    what a stage does a second by the size of its batch, and from which size on it does 90 % of the most
    streams    encode and decode of one device in turns, and side by side at the profile's slowdown
    intensity  operations per byte of linear layers that compute images and tokens at once (HydraInfer, Table 2)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from bench.planner.preset_file import Preset, Row, profile_of
from deploy.planner.profile import DECODE, ENCODE

SATURATED = 0.9
"""Of the most that a stage does a second: the papers say where it is saturated, not by what measure."""


def _batches(preset: Preset) -> Iterator[Row]:
    stage, shapes = profile_of(preset.profile).stages[1], preset.shapes
    took: Mapping[str, Callable[[int], float]] = {
        "encode": lambda batch: stage.encode.seconds(batch * shapes["image_tokens"]),
        "prefill": lambda batch: (
            stage.prefill.seconds(batch * shapes["prompt_tokens"])
            + batch * stage.prefill_context_s * shapes["prompt_tokens"] ** 2 / 2
        ),
        "decode": lambda batch: stage.decode_s(batch, batch * shapes["prompt_tokens"]),
    }
    for name, seconds in took.items():
        rates = {batch: batch / seconds(batch) for batch in preset.sizes[name]}
        at = next(batch for batch, rate in rates.items() if rate >= SATURATED * max(rates.values()))
        for batch, rate in rates.items():
            yield {"method": name, "batch": batch, "per_s": rate, "saturated_at": at}


def _streams(preset: Preset) -> Iterator[Row]:
    profile, shapes = profile_of(preset.profile), preset.shapes
    stage = profile.stages[1]
    for batch in preset.sizes["decode"]:
        decode_s = stage.decode_s(batch, batch * shapes["prompt_tokens"])
        for images in preset.sizes["encode"]:
            encode_s = stage.encode.seconds(images * shapes["image_tokens"])
            for method, slow in (("sequential", 2.0), ("parallel", profile.slows(ENCODE, DECODE))):
                rates = {"encode_per_s": images / encode_s / slow, "decode_per_s": batch / decode_s / slow}
                yield {"method": method, "images": images, "batch": batch, **rates}


def _intensity(preset: Preset) -> Iterator[Row]:
    """Of QKVO projections and FFN of one layer of each model, at 2 bytes a number: Table 2, where BT tokens of the
    images and S tokens of the language model run at once."""
    shapes = preset.shapes
    for images, tokens in itertools.product(preset.sizes["images"], preset.sizes["tokens"]):
        flops = bytes_ = 0.0
        for count, hidden in (
            (images * shapes["image_tokens"], shapes["vision_hidden"]),
            (tokens, shapes["language_hidden"]),
        ):
            if count:
                flops += (8 + 16) * count * hidden**2
                bytes_ += 2 * ((8 + 10) * count * hidden + (4 + 8) * hidden**2)
        yield {"method": f"{images} images", "tokens": tokens, "intensity": flops / bytes_}


ARITHMETIC: Mapping[str, Callable[[Preset], Iterator[Row]]] = {
    "batches": _batches,
    "streams": _streams,
    "intensity": _intensity,
}
