"""Models as subjects of the memory tables: sizes and weights by files or config, images by the processor's rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.papers.epd_models import SLICE_PATCHES, EpdModel
from bench.papers.memory_fit import ELEMENT_BYTES, Subject
from epd_serve.errors import ConfigError
from epd_serve.largest_items import ProcessorConfigs, largest_items, picture_pixels
from epd_serve.model_facts import read_model_facts
from epd_serve.model_sizes import LanguageSizes, ModelSizes, TowerSizes, model_sizes, number
from epd_serve.model_weights import ModelWeights, read_model_weights

_SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def epd_subject(model: EpdModel, image: int) -> Subject:
    """Returns one of the paper's models with the image of that number."""
    sizes = model_sizes(model.config)
    weights = weights_of(model.config, sizes) if sizes is not None else None
    assert sizes is not None and weights is not None, "written down with all sizes"
    slices, tower = model.slices[image], sizes.towers["vision"]
    patches, tokens = slices * SLICE_PATCHES, slices * model.slice_tokens
    return Subject(tower, sizes.language, weights, patches, tokens, model.context)


def folder_subject(model: str, image: str) -> Subject:
    """Returns the model in the folder with images of a size, or `largest`.

    Weights are read from its safetensors; without any they are counted by its config.

    Raises:
        ConfigError: no such folder, or it does not tell what is needed; names what is missing.
    """
    facts = read_model_facts(model)
    if facts is None:
        raise ConfigError(f"--model {model} is not a folder on this machine: its sizes are unknown", param="--model")
    config, processor = (_object(facts.directory / name) for name in ("config.json", "preprocessor_config.json"))
    sizes = model_sizes(config)
    if sizes is None or "vision" not in sizes.towers:
        raise ConfigError(f"--model {model}: its config.json does not tell its sizes, or has no tower", param="--model")
    weights = read_model_weights(
        facts.directory, element_bytes=ELEMENT_BYTES, quantised=sizes.quantised, tied=sizes.tied
    ) or weights_of(config, sizes)
    if weights is None:
        raise ConfigError(
            f"--model {model}: no safetensors are there, and its weights cannot be counted by its config: give the "
            "folder with its weights",
            param="--model",
        )
    context = sizes.language.max_positions
    patches, tokens = _image(image, sizes, ProcessorConfigs(config, processor, {}, {}), context)
    return Subject(sizes.towers["vision"], sizes.language, weights, patches, tokens, context)


def _image(image: str, sizes: ModelSizes, processors: ProcessorConfigs, context: int) -> tuple[int, int]:
    """Returns (patches, tokens) of an image."""
    items = largest_items(sizes, processors, ("image",), context)
    if image == "largest" and items:
        return items[0].patches, items[0].tokens
    size, merge = _SIZE.fullmatch(image), sizes.towers["vision"].merge
    patch = number(processors.config.get("vision_config", {}), "patch_size")
    most_pixels = picture_pixels(processors)
    if size is None or patch is None or most_pixels is None or merge == 1:
        raise ConfigError(
            f"--picture {image}: write WIDTHxHEIGHT, of a family that bounds pixels (Qwen-VL, openPangu-VL), or "
            "`largest`",
            param="--picture",
        )
    width, height = map(int, size.groups())
    scale = min(1.0, (most_pixels / (width * height)) ** 0.5) / (patch * round(merge**0.5))
    tokens = max(1, round(width * scale)) * max(1, round(height * scale))
    return tokens * merge, tokens


def _object(path: Path) -> dict[str, Any]:
    """Returns {} where there is no such file. `read_model_facts` has read config.json before."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="--model") from error
    return parsed if isinstance(parsed, dict) else {}


def weights_of(config: Mapping[str, Any], sizes: ModelSizes) -> ModelWeights | None:
    """Returns the bytes of weights by a parsed config.json alone, for models whose files are not here.

    Counts the matrices of dense transformers as the families build them; biases and norms, which are left out, are
    below a thousandth. None for experts, latent attention and layers without any attention, which are not counted.
    """
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    vision, tower = config.get("vision_config"), sizes.towers.get("vision")
    if any(number(text, key) for key in _EXPERTS) or sizes.language.latent or not isinstance(vision, dict):
        return None
    depth = number(vision, "depth", "num_hidden_layers", "num_layers")
    layers = number(text, "num_hidden_layers", "n_layer", "num_layers")
    if tower is None or depth is None or layers != sizes.language.kv_layers:
        return None
    positions = (number(vision, "num_position_embeddings") or 0) * tower.width
    tower_values = _tower_values(tower, depth, sizes.language.hidden) + positions
    return ModelWeights(tower_values * ELEMENT_BYTES, _language_values(sizes.language, sizes.tied) * ELEMENT_BYTES)


def _language_values(language: LanguageSizes, tied: bool) -> int:
    heads, keys = (count * language.head_dim for count in (language.heads, language.kv_heads))
    layer = 2 * language.hidden * heads + 2 * language.hidden * keys + 3 * language.hidden * language.intermediate
    return language.kv_layers * layer + (1 if tied else 2) * language.vocabulary * language.hidden


def _tower_values(tower: TowerSizes, depth: int, hidden: int) -> int:
    """Blocks, the patch embedding, and a projector of two matrices for each level of features."""
    block = 4 * tower.width**2 + (3 if tower.gated else 2) * tower.width * tower.intermediate
    merged, levels = tower.width * tower.merge, max(1, tower.feature_width // hidden)
    return depth * block + tower.patch_values * tower.width + levels * (merged**2 + merged * hidden)
