"""How many bytes of weights a model directory holds, tower and language model apart, read from safetensors headers.

Owns the reading of the files and the sorting of tensor names into parts; what a process of a stage loads of them is
`epd_serve.stage_memory`'s. A header is 8 bytes of length and a JSON object (huggingface.co/docs/safetensors), so a
checkpoint of 100 GB is read in milliseconds, without torch. Other formats (`.bin`, `.gguf`) tell nothing: None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_serve.errors import ConfigError

INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_LFS = b"version https://git-lfs"

_OUTER = frozenset({"model", "module", "thinker", "base_model"})  # wrappers around the parts
_TOWER = re.compile(
    r"visual|vision.*|image_.*|audio.*|sound.*|vit|vpm|apm|resampler|mlp1|connector|aligner|sam_model"
    r"|multi_modal_projector|mm_projector|projector|embed_vision|embed_audio|patch_merger|pre_mm_projector_norm"
    r"|view_sep.*|vit_large_projector"
)
_UNUSED = re.compile(r"talker|token2wav|code2wav|mtp|nextn")  # speech output and draft layers: vLLM's servers skip them

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class ModelWeights:
    """Bytes as loaded by one process that has the whole model.

    Attributes:
        tower: vision and audio encoders with their projectors.
        language: everything else.
    """

    tower: int
    language: int


def read_model_weights(
    directory: Path, *, element_bytes: int, quantised: bool = False, tied: bool = False
) -> ModelWeights | None:
    """Sizes of the parts of a checkpoint; None where it has no safetensors.

    Args:
        element_bytes: of the dtype that the model is run in: vLLM casts floating-point weights to it.
        quantised: the checkpoint is stored quantised, then every tensor stays as it is.
        tied: the output layer is the embedding; a copy in the checkpoint is not loaded.

    Raises:
        ConfigError: a file that is missing, cut short, or no safetensors file at all; says which and what to do.
    """
    files = _files(directory)
    if not files:
        return None
    tower = language = 0
    for path in files:
        for name, entry in _tensors(path):
            part = part_of(name)
            if part == "unused" or (tied and name.endswith("lm_head.weight")):
                continue
            loaded = _loaded_bytes(entry, element_bytes, quantised)
            if part == "tower":
                tower += loaded
            else:
                language += loaded
    return ModelWeights(tower, language)


def part_of(name: str) -> str:
    """`tower`, `language` or `unused` by a tensor's name: the first component that is not a wrapper decides."""
    for component in name.split("."):
        if component in _OUTER:
            continue
        if _UNUSED.fullmatch(component):
            return "unused"
        return "tower" if _TOWER.fullmatch(component) else "language"
    return "language"


def _files(directory: Path) -> list[Path]:
    """Those that vLLM loads: of the index where there is one; Mistral's `consolidated` copies only when alone."""
    index = directory / INDEX
    if index.is_file():
        named = {directory / name for name in _weight_map(index).values()}
        missing = sorted(path.name for path in named if not path.is_file())
        if missing:
            raise ConfigError(
                f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(named)} files are missing); "
                "download the model again",
                param="MODEL",
            )
        return sorted(named)
    files = sorted(directory.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith("consolidated")] or files


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        named = content["weight_map"]
        assert isinstance(named, dict) and all(isinstance(file, str) for file in named.values())
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{index} cannot be read as an index of weights; download it again", param="MODEL") from error
    return named


def _tensors(path: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Name and entry of each tensor of one file, whose length is checked against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if _LFS.startswith(start) and start:
            raise ConfigError(f"{path} is a Git LFS pointer, not the weights: run git lfs pull there", param="MODEL")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is not a safetensors file; download it again", param="MODEL")
        if 8 + length > size:
            raise ConfigError(f"{path} is cut short: {size} bytes; download it again", param="MODEL")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{path}: its header is no safetensors header; download it again", param="MODEL"
            ) from error
    if 8 + length + end > size:
        raise ConfigError(f"{path} is cut short: {size} of {8 + length + end} bytes; download it again", param="MODEL")
    return entries.items()


def _loaded_bytes(entry: Mapping[str, Any], element_bytes: int, quantised: bool) -> int:
    start, end = entry["data_offsets"]
    stored = int(end) - int(start)
    if quantised or entry.get("dtype") not in _FLOATS:
        return stored
    return math.prod(int(length) for length in entry.get("shape", ())) * element_bytes
