"""Which architectures can encode apart from prefill, per modality, and why not. Pure data and checks; no vLLM.

An encode-only instance loads the towers and not the language model, and what it sends is all that P sees of an item.
A model fits when its encoder reads nothing of the language model and its decoder finds the encoder's output in the
prompt. The table holds the exceptions of vLLM 0.23 and 0.32; `epd_serve.engine.model_probe` finds them in vLLM's
source, and a test keeps the two equal, as far as the vLLM that is installed has the architecture. `TESTED` is what our
end-to-end tests hold against a monolith, token for token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from epd_serve.errors import ConfigError
from epd_serve.layout import Layout

ANY = "any"  # every modality of the architecture

READS_LANGUAGE_MODEL = "its encoder reads the language model's weights, which an encode-only instance does not load"
CROSS_ATTENTION = "its decoder reads the encoder's output by cross-attention, which no stage can receive from another"

_NEMOTRON = {"video": READS_LANGUAGE_MODEL}

# architecture → modality → why an encode-only instance cannot serve it
REFUSED: dict[str, dict[str, str]] = {
    "CohereAsrForConditionalGeneration": {ANY: CROSS_ATTENTION},
    "FireRedLIDForConditionalGeneration": {ANY: CROSS_ATTENTION},  # last in vLLM 0.28
    "IsaacForConditionalGeneration": {ANY: READS_LANGUAGE_MODEL},
    "Molmo2ForConditionalGeneration": {ANY: READS_LANGUAGE_MODEL},
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Nano_VL_V2": _NEMOTRON,
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronParseForConditionalGeneration": {ANY: CROSS_ATTENTION},
    "TarsierForConditionalGeneration": {ANY: READS_LANGUAGE_MODEL},  # last in vLLM 0.24
    "WhisperForConditionalGeneration": {ANY: CROSS_ATTENTION},
}

TESTED: dict[str, tuple[str, ...]] = {
    "Glm4vForConditionalGeneration": ("image", "video"),
    "InternVLForConditionalGeneration": ("image", "video"),
    "LlavaOnevisionForConditionalGeneration": ("image", "video"),
    "Qwen2AudioForConditionalGeneration": ("audio",),
    "Qwen2_5OmniForConditionalGeneration": ("image", "video", "audio"),
    "Qwen2_5_VLForConditionalGeneration": ("image", "video"),
    "Qwen3VLForConditionalGeneration": ("image", "video"),
    "Qwen3VLMoeForConditionalGeneration": ("image", "video"),
}

ENCODER_FREE = (
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Of which P and D run without the encoder, as tests show: token for token those of a monolith."""

ENCODER_FREE_FROM = (0, 32)
"""The vLLM from which on a stage takes an item as metadata alone (`--language-model-only` on a consumer)."""

_PIXELS_ALONE = "vLLM has no other way to size its items in a prompt than their pixels (no `embedding_fields`)"
NOT_ENCODER_FREE = {
    "Glm4vForConditionalGeneration": _PIXELS_ALONE,
    "Glm4vMoeForConditionalGeneration": _PIXELS_ALONE,
    "InternVLChatModel": _PIXELS_ALONE,
    "InternVLForConditionalGeneration": _PIXELS_ALONE,
    "LlavaOnevisionForConditionalGeneration": _PIXELS_ALONE,
}
"""Architecture → why its P and D need the encoder. Any other one that is not above is untested."""

# modality → packages of which vLLM needs one to decode it; without, a request is a 500
DECODERS = {"audio": ("soundfile", "av", "torchcodec"), "video": ("cv2", "torchcodec")}


def undecodable(modalities: Iterable[str]) -> dict[str, str]:
    """Modalities that this environment cannot decode → what is missing, under any layout. It is that of the stages."""
    return {
        modality: f"no decoder for {modality} is installed (one of {', '.join(DECODERS[modality])})"
        for modality in modalities
        if modality in DECODERS and not any(importlib.util.find_spec(name) for name in DECODERS[modality])
    }


def why_not_apart(architecture: str, modality: str) -> str | None:
    """The reason why items of this modality cannot be encoded by an instance of their own, or None."""
    refused = REFUSED.get(architecture, {})
    return refused.get(ANY) or refused.get(modality)


def left_out(architecture: str, layout: Layout, modalities: Iterable[str]) -> dict[str, str]:
    """Of the modalities that the model has, those that this layout cannot serve → why. The proxy answers them 400."""
    if not any(role.sends_features for role in layout.roles):
        return {}
    reasons = {modality: why_not_apart(architecture, modality) for modality in modalities}
    return {modality: reason for modality, reason in reasons.items() if reason is not None}


def why_not_encoder_free(architecture: str, vllm: tuple[int, int] | None) -> str:
    """Why P and D of this architecture cannot do without the encoder under this vLLM, or "".

    Args:
        architecture: "" where it is unknown: a stage then says so itself. vllm: None where it is unknown.
    """
    if vllm is not None and vllm < ENCODER_FREE_FROM:
        wanted = ".".join(map(str, ENCODER_FREE_FROM))
        return f"vLLM {vllm[0]}.{vllm[1]} takes no item without its pixels, which P and D would encode; {wanted} does"
    if not architecture or architecture in ENCODER_FREE:
        return ""
    return f"{architecture}: {NOT_ENCODER_FREE.get(architecture, 'no test shows its P and D to do without')}"


def check_encoder_free(architecture: str, layout: Layout, vllm: tuple[int, int] | None) -> None:
    """Refuse `--encoder-free` where somebody but an encode-only instance would have to encode.

    Raises:
        ConfigError: names the flag, what speaks against it, and what to do.
    """
    whole = sorted({role.value for role in layout.roles if role.has_language_model and role.encodes})
    if whole:
        named = ", ".join("TP (EPD)" if role == "EPD" else role for role in whole)
        raise ConfigError(
            f"--encoder-free: {named} of {layout} encodes beside the language model; it is for P, D and PD behind "
            "encoders: use --layout E-P-D or E-PD, or leave the flag away",
            param="encoder_free",
        )
    if not any(role.sends_features for role in layout.roles):
        raise ConfigError(
            f"--encoder-free: {layout} has no E, so nobody would encode; use --layout E-{layout}, or leave the flag "
            "away",
            param="encoder_free",
        )
    if why := why_not_encoder_free(architecture, vllm):
        raise ConfigError(f"--encoder-free: {why}; leave the flag away", param="encoder_free")


def check_encoders_fit(architecture: str, layout: Layout) -> str | None:
    """Refuse an architecture that cannot encode apart under a layout with encode-only instances.

    Returns:
        A warning when parts of the model are left out, or when no test of ours covers the architecture; else None.

    Raises:
        ConfigError: names the architecture, the reason and the layouts that do work.
    """
    if not architecture or not any(role.sends_features for role in layout.roles):
        return None
    refused = REFUSED.get(architecture, {})
    if (reason := refused.get(ANY)) is not None:
        # Cross-attention's KV is not in the blocks that P hands to D: only a whole instance serves such a model.
        works = "TP1" if reason is CROSS_ATTENTION else "EP-D or TP1"
        raise ConfigError(
            f"{architecture} cannot encode apart from prefill: {reason}; use --layout {works}", param="--layout"
        )
    if refused:
        modality, reason = next(iter(refused.items()))
        return f"{architecture} serves no {modality} under {layout}: {reason}; --layout EP-D does"
    if architecture not in TESTED:
        return (
            f"{architecture} with encoders apart is not among the tested architectures; --layout EP-D is the safe one"
        )
    return None
