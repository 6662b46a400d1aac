"""The sizes of a model that its memory follows from, read from its configs: towers, language model, KV cache. Pure.

Owns the names under which the families keep them (Qwen2/2.5/3-VL, openPangu-VL, InternVL in both its forms, LLaVA and
LLaVA-OneVision, Qwen2-Audio; others by the same words). What items become of a picture is `epd_serve.largest_items`'s,
and what they take in memory `epd_serve.activation_peak`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_VISION = ("vision_config", "visual", "vision_tower_config")
_AUDIO = ("audio_config",)
_TEXT = ("text_config", "llm_config", "language_config")
_GATED = ("silu", "swish", "swiglu")


@dataclass(frozen=True)
class TowerSizes:
    """One encoder. Sizes in values, per patch (or audio frame) unless said otherwise.

    Attributes:
        width: of the hidden state.
        intermediate: of the MLP, one matrix. gated: the MLP has two of it side by side (SwiGLU).
        patch_values: what a patch is of pixels, all channels and frames of it.
        merge: patches that become one token of the language model.
        feature_width: of the feature of one token, DeepStack levels included.
    """

    width: int
    intermediate: int
    gated: bool
    patch_values: int
    merge: int
    feature_width: int


@dataclass(frozen=True)
class LanguageSizes:
    """The language model. Sizes in values per token unless said otherwise.

    Attributes:
        hidden: width. intermediate: of the MLP that a token passes through, experts times experts per token.
        heads, kv_heads, head_dim: of attention.
        kv_layers: layers whose cache grows with the sequence.
        latent: width of the cached row of a layer with latent attention (MLA), or 0.
        vocabulary, max_positions: tokens.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_layers: int
    latent: int
    vocabulary: int
    max_positions: int

    def kv_token_bytes(self, tp: int, element_bytes: float) -> int:
        """KV cache of one token on one of `tp` ranks: heads are divided, but never below one; latents are whole."""
        if self.latent:
            return int(self.kv_layers * self.latent * element_bytes)
        heads = max(1, -(-self.kv_heads // tp))
        return int(self.kv_layers * 2 * heads * self.head_dim * element_bytes)


@dataclass(frozen=True)
class ModelSizes:
    """Of one config.json.

    Attributes:
        towers: by modality: `vision` (pictures and video), `audio`; only those whose sizes the config tells.
        quantised: the checkpoint says how it is quantised, so its tensors are loaded as they are stored.
        tied: output layer and embedding are one tensor.
    """

    language: LanguageSizes
    towers: Mapping[str, TowerSizes]
    quantised: bool
    tied: bool


def model_sizes(config: Mapping[str, Any]) -> ModelSizes | None:
    """Sizes from a parsed config.json; None where the language model's are not there."""
    inner = config.get("thinker_config")
    config = inner if isinstance(inner, dict) else config
    text = _section(config, _TEXT)
    text = config if text is None else {**config, **text}
    language = _language(text)
    if language is None:
        return None
    towers = {}
    vision, audio = _section(config, _VISION), _section(config, _AUDIO)
    if vision is not None and (tower := _vision(vision, config, language.hidden)) is not None:
        towers["vision"] = tower
    if audio is not None and (tower := _audio(audio, language.hidden)) is not None:
        towers["audio"] = tower
    return ModelSizes(
        language, towers, quantised="quantization_config" in text, tied=text.get("tie_word_embeddings") is True
    )


def number(section: Mapping[str, Any], *keys: str) -> int | None:
    """The first of the keys that holds a positive number; of a pair (height, width) the larger."""
    for key in keys:
        value = section.get(key)
        if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return int(value)
    return None


def _section(config: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any] | None:
    return next((config[name] for name in names if isinstance(config.get(name), dict)), None)


def _language(text: Mapping[str, Any]) -> LanguageSizes | None:
    hidden = number(text, "hidden_size", "n_embd", "d_model")
    layers = number(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = number(text, "num_attention_heads", "n_head")
    if hidden is None or layers is None or heads is None:
        return None
    kinds = text.get("layer_types")
    growing = layers
    if isinstance(kinds, list) and len(kinds) == layers:
        growing = sum("linear" not in str(kind) and "mamba" not in str(kind) for kind in kinds)
    lora = number(text, "kv_lora_rank")
    experts = number(text, "num_experts_per_tok", "moe_topk")
    dense = number(text, "intermediate_size", "n_inner") or 4 * hidden
    routed = (number(text, "moe_intermediate_size") or 0) * (experts or 0)
    shared = number(text, "shared_expert_intermediate_size") or 0
    return LanguageSizes(
        hidden=hidden,
        intermediate=max(dense, routed + shared),
        heads=heads,
        kv_heads=number(text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads,
        head_dim=number(text, "head_dim") or hidden // heads,
        kv_layers=growing,
        latent=lora + (number(text, "qk_rope_head_dim") or 0) if lora is not None else 0,
        vocabulary=number(text, "vocab_size") or 0,
        max_positions=number(text, "max_position_embeddings", "model_max_length", "seq_length") or 0,
    )


def _vision(vision: Mapping[str, Any], config: Mapping[str, Any], hidden: int) -> TowerSizes | None:
    # Qwen2-VL calls the tower's width `embed_dim`, and `hidden_size` the width of what leaves it.
    width = number(vision, "embed_dim", "hidden_size", "width")
    patch = number(vision, "patch_size")
    if width is None or patch is None:
        return None
    ratio = vision.get("mlp_ratio")
    ratio = float(ratio) if isinstance(ratio, int | float) and ratio > 0 else 4.0
    side = number(vision, "spatial_merge_size") or 1
    if side == 1 and isinstance(down := config.get("downsample_ratio"), int | float) and 0 < down < 1:
        side = round(1 / down)  # InternVL's pixel shuffle
    levels = vision.get("deepstack_visual_indexes")
    out = number(vision, "out_hidden_size") or hidden
    return TowerSizes(
        width=width,
        intermediate=number(vision, "intermediate_size") or int(ratio * width),
        gated=str(vision.get("hidden_act", "")) in _GATED,
        patch_values=(number(vision, "in_channels", "in_chans", "num_channels") or 3)
        * (number(vision, "temporal_patch_size") or 1)
        * patch**2,
        merge=side**2,
        feature_width=out * (1 + (len(levels) if isinstance(levels, list) else 0)),
    )


def _audio(audio: Mapping[str, Any], hidden: int) -> TowerSizes | None:
    width = number(audio, "d_model", "hidden_size")
    if width is None:
        return None
    return TowerSizes(
        width=width,
        intermediate=number(audio, "encoder_ffn_dim", "intermediate_size") or 4 * width,
        gated=False,
        # The first of two convolutions runs at twice the frames, as wide as the tower.
        patch_values=2 * (number(audio, "num_mel_bins") or 128) + 2 * width,
        merge=2,
        feature_width=number(audio, "output_dim") or hidden,
    )
