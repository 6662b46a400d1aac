"""A model's folder as the subject of the memory tables: sizes and weights by its files, pictures by its processor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.ablations.memory_rooms import ELEMENT_BYTES, Subject
from bench.ablations.parameters import weights_of
from epd_serve.errors import ConfigError
from epd_serve.largest_items import ProcessorConfigs, largest_items, picture_pixels
from epd_serve.model_facts import read_model_facts
from epd_serve.model_sizes import ModelSizes, model_sizes, number
from epd_serve.model_weights import read_model_weights

_PICTURE = re.compile(r"(\d{1,6})x(\d{1,6})")


def subject_of(model: str, picture: str) -> Subject:
    """The model in the folder with pictures of a size, or `largest`.

    Weights are read from its safetensors; without any they are counted by its config.

    Raises:
        ConfigError: no such folder, or it does not tell what is asked; names what is missing.
    """
    facts = read_model_facts(model)
    if facts is None:
        raise ConfigError(f"--model {model} is not a folder on this machine: its sizes are unknown", param="--model")
    config, image = (_object(facts.directory / name) for name in ("config.json", "preprocessor_config.json"))
    sizes = model_sizes(config)
    if sizes is None or "vision" not in sizes.towers:
        raise ConfigError(f"--model {model}: its config.json does not tell its sizes, or has no tower", param="--model")
    weights = read_model_weights(
        facts.directory, element_bytes=ELEMENT_BYTES, quantised=sizes.quantised, tied=sizes.tied
    ) or weights_of(config, sizes, ELEMENT_BYTES)
    if weights is None:
        raise ConfigError(
            f"--model {model}: no safetensors are there, and its weights cannot be counted by its config: give the "
            "folder with its weights",
            param="--model",
        )
    processors = ProcessorConfigs(config, image, {}, {})
    context = sizes.language.max_positions
    patches, tokens = _picture(picture, sizes, processors, context)
    return Subject(sizes.towers["vision"], sizes.language, weights, patches, tokens, context)


def _picture(picture: str, sizes: ModelSizes, processors: ProcessorConfigs, context: int) -> tuple[int, int]:
    """(patches, tokens) of a picture."""
    items = largest_items(sizes, processors, ("image",), context)
    if picture == "largest" and items:
        return items[0].patches, items[0].tokens
    found = _PICTURE.fullmatch(picture)
    patch = number(processors.config.get("vision_config", {}), "patch_size")
    most = picture_pixels(processors)
    if found is None or patch is None or most is None or sizes.towers["vision"].merge == 1:
        raise ConfigError(
            f"--picture {picture}: write WIDTHxHEIGHT, of a family that bounds pixels (Qwen-VL, openPangu-VL), or "
            "`largest`",
            param="--picture",
        )
    side = patch * round(sizes.towers["vision"].merge ** 0.5)
    width, height = int(found[1]), int(found[2])
    shrink = min(1.0, (most / (width * height)) ** 0.5) if width and height else 0.0
    columns, rows = (max(1, round(length * shrink / side)) for length in (width, height))
    tokens = columns * rows
    return tokens * sizes.towers["vision"].merge, tokens


def _object(path: Path) -> dict[str, Any]:
    """{} where there is no such file. `read_model_facts` has read config.json before."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="--model") from error
    return found if isinstance(found, dict) else {}
