"""How many bytes of weights a model has by its config alone: for models whose files are not here. Pure.

Counts the matrices of dense transformers as the families build them; biases and norms, which are left out, are below a
thousandth. Where there are files, `epd_serve.model_weights` reads what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd_serve.model_sizes import LanguageSizes, ModelSizes, TowerSizes, number
from epd_serve.model_weights import ModelWeights

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def weights_of(config: Mapping[str, Any], sizes: ModelSizes, element_bytes: int = 2) -> ModelWeights | None:
    """Of a parsed config.json; None for experts, latent attention and layers without any, which are not counted."""
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    vision = config.get("vision_config")
    depth = number(vision, "depth", "num_hidden_layers", "num_layers") if isinstance(vision, dict) else None
    layers = number(text, "num_hidden_layers", "n_layer", "num_layers")
    tower = sizes.towers.get("vision")
    if any(number(text, key) for key in _EXPERTS) or sizes.language.latent or layers != sizes.language.kv_layers:
        return None
    if tower is None or depth is None or not isinstance(vision, dict):
        return None
    positions = (number(vision, "num_position_embeddings") or 0) * tower.width
    vision_values = _tower(tower, depth, sizes.language.hidden) + positions
    return ModelWeights(vision_values * element_bytes, _language(sizes.language, sizes.tied) * element_bytes)


def _language(language: LanguageSizes, tied: bool) -> int:
    heads = language.heads * language.head_dim
    keys = language.kv_heads * language.head_dim
    layer = 2 * language.hidden * heads + 2 * language.hidden * keys + 3 * language.hidden * language.intermediate
    return language.kv_layers * layer + (1 if tied else 2) * language.vocabulary * language.hidden


def _tower(tower: TowerSizes, depth: int, hidden: int) -> int:
    """Blocks, the patch embedding, and a projector of two matrices for each level of features."""
    block = 4 * tower.width**2 + (3 if tower.gated else 2) * tower.width * tower.intermediate
    merged = tower.width * tower.merge
    levels = max(1, tower.feature_width // hidden)
    return depth * block + tower.patch_values * tower.width + levels * (merged**2 + merged * hidden)
