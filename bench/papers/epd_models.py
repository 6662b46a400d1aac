"""The models of EPD's memory tables, as far as memory follows from them: sizes as published, what an image becomes.

Sizes are of the models' config.json on huggingface.co (openbmb/MiniCPM-V-2_6, OpenGVLab/InternVL2-8B and
InternVL2-26B). How many slices of 448 x 448 an image is cut into is EPD's Table 3 (column #Patch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLICE_PATCHES = 1024
"""(448 / 14)² of a slice."""
IMAGES = ("313x234", "787x444", "4032x3024")


@dataclass(frozen=True)
class EpdModel:
    """Attributes:
    config: config.json. context: tokens of a request, as the paper's tables imply it: the most that fit, below the
        fewest that are "out of context limit". slices: of an image, by `IMAGES`. slice_tokens: that a slice becomes.
    paper_images, paper_batch, paper_kv: of EPD's tables 2, 3 and 4: (with the encoder beside prefill, EPD).
        `paper_batch` is (together, E, P); None is out of memory. `paper_kv` is by images of a request.
    """

    name: str
    config: Mapping[str, Any]
    context: int
    slices: tuple[int, int, int]
    slice_tokens: int
    paper_images: tuple[tuple[int, int], ...]
    paper_batch: tuple[tuple[int | None, int, int], ...]
    paper_kv: Mapping[int, tuple[str, str]]


MODELS = (
    EpdModel(
        "MiniCPM-V 2.6",
        {
            "model_type": "minicpmv",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 151666,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "image_size": 980,
            },
        },
        49_152,
        (1, 3, 10),
        64,
        ((77, 490), (26, 165), (7, 49)),
        ((7, 49, 86), (2, 16, 29), (None, 4, 9)),
        {5: ("86%", "99%"), 10: ("74%", "97%"), 20: ("49%", "95%"), 40: ("OOM", "92%"), 80: ("OOM", "OOCL")},
    ),
    EpdModel(
        "InternVL2-8B",
        {
            "model_type": "internvl_chat",
            "llm_config": {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 92553,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "image_size": 448,
            },
            "downsample_ratio": 0.5,
        },
        65_536,
        (13, 3, 13),
        256,
        ((19, 19), (19, 19), (19, 19)),
        ((2, 15, 2), (9, 67, 10), (2, 15, 2)),
        {5: ("94%", "95%"), 10: ("89%", "91%"), 20: ("OOCL", "OOCL")},
    ),
    EpdModel(
        "InternVL2-26B",
        {
            "model_type": "internvl_chat",
            "llm_config": {
                "hidden_size": 6144,
                "intermediate_size": 16384,
                "num_hidden_layers": 48,
                "num_attention_heads": 48,
                "num_key_value_heads": 8,
                "vocab_size": 92553,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": 3200,
                "intermediate_size": 12800,
                "num_hidden_layers": 45,
                "patch_size": 14,
                "image_size": 448,
            },
            "downsample_ratio": 0.5,
        },
        131_072,
        (13, 3, 13),
        256,
        ((1, 10), (11, 45), (1, 10)),
        ((None, 6, 1), (1, 22, 4), (None, 6, 1)),
        {5: ("67%", "89%"), 10: ("36%", "80%"), 20: ("OOM", "63%"), 40: ("OOM", "OOCL")},
    ),
)
