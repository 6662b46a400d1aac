"""The models of EPD's memory tables, as far as memory follows from them: sizes as published, what an image becomes.

Sizes are of the models' config.json on huggingface.co (openbmb/MiniCPM-V-2_6, OpenGVLab/InternVL2-8B and
InternVL2-26B). Weights are counted by them: the matrices of blocks, embeddings and projector; biases and norms, which
are left out, are below a thousandth. How many slices of 448 x 448 an image is cut into is EPD's Table 3 (column
#Patch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epd_serve.model_sizes import LanguageSizes, TowerSizes
from epd_serve.model_weights import ModelWeights

SLICE_PATCHES = 1024
"""(448 / 14)² of a slice."""
IMAGES = ("313x234", "787x444", "4032x3024")


@dataclass(frozen=True)
class EpdModel:
    """Attributes:
    context: tokens of a request, as the paper's tables imply it: the most that fit, below the fewest that are "out of
        context limit". slices: of an image, by `IMAGES`. slice_tokens: that a slice becomes.
    paper_images, paper_batch, paper_kv: of EPD's tables 2, 3 and 4: (with the encoder beside prefill, EPD).
        `paper_batch` is (together, E, P). `paper_kv` is by images of a request.
    """

    name: str
    tower: TowerSizes
    language: LanguageSizes
    weights: ModelWeights
    context: int
    slices: tuple[int, int, int]
    slice_tokens: int
    paper_images: tuple[tuple[int, int], ...]
    paper_batch: tuple[tuple[int | str, int, int], ...]
    paper_kv: Mapping[int, tuple[str, str]]


MODELS = (
    EpdModel(
        "MiniCPM-V 2.6",
        TowerSizes(1152, 4304, gated=False, patch_values=588, merge=1, feature_width=3584),
        LanguageSizes(
            hidden=3584,
            intermediate=18944,
            heads=28,
            kv_heads=4,
            head_dim=128,
            kv_layers=28,
            latent=0,
            vocabulary=151666,
            max_positions=32768,
        ),
        ModelWeights(tower=2 * 417_203_712, language=2 * 7_612_430_336),
        49_152,
        (1, 3, 10),
        64,
        ((77, 490), (26, 165), (7, 49)),
        ((7, 49, 86), (2, 16, 29), ("OOM", 4, 9)),
        {5: ("86%", "99%"), 10: ("74%", "97%"), 20: ("49%", "95%"), 40: ("OOM", "92%"), 80: ("OOM", "OOCL")},
    ),
    EpdModel(
        "InternVL2-8B",
        TowerSizes(1024, 4096, gated=False, patch_values=588, merge=4, feature_width=4096),
        LanguageSizes(
            hidden=4096,
            intermediate=14336,
            heads=32,
            kv_heads=8,
            head_dim=128,
            kv_layers=32,
            latent=0,
            vocabulary=92553,
            max_positions=32768,
        ),
        ModelWeights(tower=2 * 336_146_432, language=2 * 7_737_516_032),
        65_536,
        (13, 3, 13),
        256,
        ((19, 19), (19, 19), (19, 19)),
        ((2, 15, 2), (9, 67, 10), (2, 15, 2)),
        {5: ("94%", "95%"), 10: ("89%", "91%"), 20: ("OOCL", "OOCL")},
    ),
    EpdModel(
        "InternVL2-26B",
        TowerSizes(3200, 12800, gated=False, patch_values=588, merge=4, feature_width=6144),
        LanguageSizes(
            hidden=6144,
            intermediate=16384,
            heads=48,
            kv_heads=8,
            head_dim=128,
            kv_layers=48,
            latent=0,
            vocabulary=92553,
            max_positions=32768,
        ),
        ModelWeights(tower=2 * 5_773_964_800, language=2 * 19_860_664_320),
        131_072,
        (13, 3, 13),
        256,
        ((1, 10), (11, 45), (1, 10)),
        (("OOM", 6, 1), (1, 22, 4), ("OOM", 6, 1)),
        {5: ("67%", "89%"), 10: ("36%", "80%"), 20: ("OOM", "63%"), 40: ("OOM", "OOCL")},
    ),
)
