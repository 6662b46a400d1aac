"""Families of models and what of each is tested, read or refused: `docs/reference/models.md`, in one table.

Run as `python -m epd_serve.model_families` to make the page. What is *tested* is not written here but follows from
`model_support.TESTED` and `ENCODER_FREE`, and what an encode-only instance cannot load from `REFUSED`; a test holds
architectures against the vLLM that is installed. Pure data; no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from epd_serve.model_support import ANY, ENCODER_FREE, REFUSED, TESTED

READ_IN = "0.32.0"
"""The vLLM whose source was read; on CPU its released build ran the tests."""
ON_TWO_RANKS = "Qwen3VLForConditionalGeneration"
"""Whose heads `tests/e2e/test_tp.py` divides: the demo model's."""
COLUMNS = ("image", "video", "audio", "TP", "encode apart", "encoder-free", "MTP", "quantised")


class Status(StrEnum):
    """What is known of a cell. `HAS_NOT`: the family has no such thing."""

    TESTED = "tested"
    READ = "read"
    REFUSED = "refused"
    HAS_NOT = "–"


class KV(StrEnum):
    """How a family's language model keeps what P hands to D."""

    HEADS = "heads"
    LATENT = "latent"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        name: as people say it. architecture: as config.json does. takes: modalities.
        read: what was found in vLLM's model file, for those who ask why; Markdown.
        kv: what P would hand to D.
    """

    name: str
    architecture: str
    takes: tuple[str, ...]
    read: str
    kv: KV = KV.HEADS
    preset: str = ""

    def cell(self, column: str) -> Status:
        """What is known of it in one of `COLUMNS`."""
        if column in ("image", "video", "audio"):
            return self._modality(column)
        if column == "TP":
            if self.kv is KV.HYBRID:
                return Status.REFUSED
            return Status.TESTED if self.architecture == ON_TWO_RANKS else Status.READ
        if column == "encode apart":
            if ANY in REFUSED.get(self.architecture, {}):
                return Status.REFUSED
            return Status.TESTED if self.architecture in TESTED else Status.READ
        if column == "encoder-free":
            return Status.TESTED if self.architecture in ENCODER_FREE else Status.REFUSED
        return Status.READ if column == "quantised" else Status.REFUSED

    def _modality(self, name: str) -> Status:
        if name not in self.takes:
            return Status.HAS_NOT
        return Status.TESTED if name in TESTED.get(self.architecture, ()) else Status.READ


_PICTURES = ("image", "video")
FAMILIES: tuple[Family, ...] = (
    Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        _PICTURES,
        "A feature is one row of the language model's width per merged patch. Positions (M-RoPE) follow from the grid, "
        "which metadata carries.",
        preset="qwen2.5-vl-tiny",
    ),
    Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        _PICTURES,
        "DeepStack: a row holds the tower's output and that of some inner levels, one after the other; features are "
        "sized by what the encoder returns. vLLM splits them only where the tower is loaded (`use_deepstack`); without "
        "it, one name in its module says that it is (`epd_serve/engine/encoder_free.py`).",
        preset="tiny",
    ),
    Family(
        "Qwen3-VL MoE",
        "Qwen3VLMoeForConditionalGeneration",
        _PICTURES,
        "As Qwen3-VL; experts are inside the language model.",
        preset="qwen3-vl-moe-tiny",
    ),
    Family(
        "Qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        _PICTURES,
        "The tower of Qwen3-VL; three of four layers keep a state instead of KV (`IsHybrid`), which "
        "is not handed over: `E-PD` is the layout.",
        kv=KV.HYBRID,
    ),
    Family(
        "InternVL, Intern-S1 (as transformers has them)",
        "InternVLForConditionalGeneration",
        _PICTURES,
        "One feature per image whatever the number of its tiles; rows of the language model's width. The tower takes "
        "each tile by itself, so several encoders can share an image; no metadata stands in for one, so P gets media.",
        preset="internvl-tiny",
    ),
    Family(
        "InternVL (original checkpoints)",
        "InternVLChatModel",
        _PICTURES,
        "As the above (`internvl.py`); its configuration is code of the checkpoint: `--trust-remote-code`.",
    ),
    Family(
        "LLaVA-OneVision",
        "LlavaOnevisionForConditionalGeneration",
        _PICTURES,
        "One feature per image, its rows those of the tiles and line ends after unpadding, which run across tiles: no "
        "image is shared by encoders. Image and video share a tower.",
        preset="llava-onevision-tiny",
    ),
    Family(
        "LLaVA-OneVision-2",
        "LlavaOnevision2ForConditionalGeneration",
        _PICTURES,
        "A tower of its own with grids as Qwen2-VL; the encoder reads nothing of the language model.",
    ),
    Family(
        "MiniCPM-V 2.0–4.5",
        "MiniCPMV",
        _PICTURES,
        "The resampler belongs to the tower; slices of an image are one feature. Configuration and processor are code "
        "of the checkpoint.",
    ),
    Family(
        "MiniCPM-V 4.6",
        "MiniCPMV4_6ForConditionalGeneration",
        _PICTURES,
        "Its language model is Qwen3.5's, of which the state is not handed over: `E-PD` is the layout.",
        kv=KV.HYBRID,
    ),
    Family(
        "GLM-4.1V",
        "Glm4vForConditionalGeneration",
        _PICTURES,
        "As Qwen2.5-VL; the frames of a clip are told apart by time stamps in the prompt.",
        preset="glm4v-tiny",
    ),
    Family(
        "GLM-4.5V, GLM-4.6V",
        "Glm4vMoeForConditionalGeneration",
        _PICTURES,
        "The class of GLM-4.1V but for its language model.",
    ),
    Family(
        "Kimi-VL",
        "KimiVLForConditionalGeneration",
        ("image",),
        "MoonViT's features are rows of the language model's width. MLA: KV without heads, whole at every rank. The "
        "processor is code of the checkpoint.",
        kv=KV.LATENT,
    ),
    Family(
        "Kimi-K2.5",
        "KimiK25ForConditionalGeneration",
        _PICTURES,
        "vLLM makes items of a modality `vision_chunk` of both. An image is one, and keeps its key; a clip becomes "
        "several, each named by the clip's key and a number, and nobody has seen how our proxy takes that. No metadata "
        "in place of media.",
        kv=KV.LATENT,
    ),
    Family(
        "openPangu-VL",
        "OpenPanguVLForConditionalGeneration",
        _PICTURES,
        "The tower adds up several of its levels (`mm_unit_vision_select_layer`), so a row has the language model's "
        "width; grids as Qwen2.5-VL. Its tower raises where attention is not FlashAttention, so no CPU runs it; "
        "how vllm-ascend gets past that was not read.",
    ),
    Family(
        "Qwen2.5-Omni",
        "Qwen2_5OmniForConditionalGeneration",
        (*_PICTURES, "audio"),
        "Text of the thinker only. With `use_audio_in_video` the sound of a clip lies between its frames in the "
        "prompt, and the two are two items: untested.",
        preset="qwen2.5-omni-tiny",
    ),
    Family(
        "Qwen3-Omni",
        "Qwen3OmniMoeForConditionalGeneration",
        (*_PICTURES, "audio"),
        "As Qwen2.5-Omni, with the DeepStack rows of Qwen3-VL for pictures, and rows of one level for sound. It "
        "asks the tower how many levels there are, so P needs it.",
    ),
    Family("Qwen2-Audio", "Qwen2AudioForConditionalGeneration", ("audio",), "", preset="qwen2-audio-tiny"),
)

MEANINGS: Mapping[str, str] = {
    "image, video, audio": "*tested*: `(E-P)-D` gives a plain vLLM's tokens, for the preset named, in "
    "`tests/e2e/test_models.py`.",
    "TP": "of P and D, also of different sizes. KV of heads goes to the ranks that hold them, KV without heads (MLA) "
    "whole to each; nothing of it depends on the family. *refused*: where a layout hands over KV, for its state-space "
    "layers, when the model is loaded ([KV groups](support.md)).",
    "encode apart": "a layout with encode-only instances. *read*: `python -m epd_serve.engine.model_probe` finds "
    "nothing of the language model in the encoder; `serve` warns that no test covers it.",
    "encoder-free": "P, D and PD without the encoder's weights (`--encoder-free`, vLLM 0.32). *refused*: GLM-V, "
    "InternVL and LLaVA-OneVision, whose items vLLM sizes by their pixels alone (no `embedding_fields`), and what no "
    "test shows.",
    "MTP": "and every other drafter with KV of its own. *refused* where KV is handed over, at the start: "
    "`--speculative-config`. With `PD` and `E-PD` it is vLLM's own affair.",
    "quantised": "weights are read by vLLM alone; a feature has the model's data type, and KV that of "
    "`--kv-cache-dtype` ([FP8](support.md)). No preset has quantised weights.",
}

_HEAD = f"""# Families of models

Made by `python -m epd_serve.model_families`. *tested*: a tiny model of the family with random weights gives a plain
vLLM's tokens in real stages. *read*: nothing in the model file of vLLM {READ_IN} speaks against it, and no test shows
it; what was read is below. *refused*: it is not offered, with an error that says so. –: the family has none.

Who has weights settles a *read* in five minutes: `epd-bench model-check` ([Models](../guides/models.md)).

| family | preset | {" | ".join(COLUMNS)} |
|---|---|{"---|" * len(COLUMNS)}"""


def document() -> str:
    """`docs/reference/models.md`."""
    rows = [
        f"| {one.name} | {f'`{one.preset}`' if one.preset else '–'} | {' | '.join(map(one.cell, COLUMNS))} |"
        for one in FAMILIES
    ]
    columns = [f"- **{name}**: {text}" for name, text in MEANINGS.items()]
    read = [f"- **{one.name}** (`{one.architecture}`): {one.read}" for one in FAMILIES if one.read]
    rest = ("", "## The columns", "", *columns, "", "## What was read", "", *read, "")
    return "\n".join((_HEAD, *rows, *rest))


if __name__ == "__main__":
    print(document(), end="")
