"""The models that ship or can be made on the spot: `demo` (trained, built in); `tiny`, `bench` and others (random).

Owns the names, the sizes and the writing of a model folder. Leaves to others: other architectures than the demo
model's (`epd_serve.demo.families`), drawing the weights or leaving them out
(`epd_serve.demo.checkpoint`), run as a process of its own so that nothing here imports torch; training,
pictures.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import epd_serve
from epd_serve.demo.families import family_names, write_family
from epd_serve.errors import ConfigError

_WEIGHTS = Path(__file__).parent / "weights"
# What random models are made from: configs, tokenizer and template of their own, so that a newly trained demo model
# leaves them, and everything that was measured and tested with them, as they are.
_BLANK = Path(__file__).parent / "blank"
_SITE = Path(epd_serve.__file__).parent / "engine" / "site"
_BUILD_TIMEOUT_S = 300.0
_INITIALIZER_RANGE = 0.08  # wide enough that greedy tokens vary from step to step
_MOST_FRAMES = 8  # of a video


@dataclass(frozen=True)
class RandomPreset:
    """Sizes of a random-weight model, as changes to the configs in `blank/` (whose tokenizer it has, too).

    Attributes:
        text, vision: keys of `text_config` and `vision_config` that differ.
        min_pixels, max_pixels: bounds of the picture processor. The upper one matters: an encoder's start-up runs
            the largest possible picture.
        hollow: without weights, only their sizes: for `--load-format dummy`, where drawing and reading them takes long.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    min_pixels: int = 16_384
    max_pixels: int = 50_176
    hollow: bool = False


RANDOM_PRESETS = {
    # 7.1 M parameters: eight layers and two DeepStack levels, so that packets and feature rows are not trivial.
    "tiny": RandomPreset(
        text={"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8},
        vision={"depth": 4, "deepstack_visual_indexes": [1, 2], "out_hidden_size": 256},
    ),
    # 41.7 M parameters with the proportions of an 8B model: a 1280x720 picture is 880 tokens.
    "bench": RandomPreset(
        text={
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        vision={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "deepstack_visual_indexes": [0, 1, 2],
            "num_position_embeddings": 2304,
            "out_hidden_size": 512,
        },
        min_pixels=65_536,
        max_pixels=1_048_576,
    ),
    # 11.3 M parameters: as `tiny`, with vision heads of 64. vllm-ascend hands a vision tower's heads of up to 64 to its
    # fused attention as they are, which takes 64, 128 or 192 (docs/guides/ascend-testing.md): `tiny`'s do not fit.
    "npu": RandomPreset(
        text={"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8},
        vision={"hidden_size": 256, "depth": 4, "deepstack_visual_indexes": [1, 2], "out_hidden_size": 256},
    ),
    # 7.5 billion parameters without weights: Qwen3-VL-8B-Instruct's config.json but for the vocabulary, which stays
    # small with its tokenizer. 1280x720 is 880 tokens.
    "8b": RandomPreset(
        text={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_theta": 5_000_000.0,
                "rope_type": "default",
            },
        },
        vision={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        min_pixels=65_536,
        max_pixels=1_048_576,
        hollow=True,
    ),
}
PRESETS = ("demo", *RANDOM_PRESETS, *family_names())


def builtin_model_dir() -> Path:
    """Folder of the trained demo model inside the installed package. Read-only: copy it with `write_preset`."""
    return _WEIGHTS


def write_preset(directory: Path, preset: str | RandomPreset, seed: int = 0) -> None:
    """Write a complete model folder that transformers and vLLM load.

    The folder appears whole or not at all. The same seed gives the same weights.

    Args:
        directory: must not exist, or be empty; parents are made.
        preset: one of `PRESETS`, or sizes of the caller's own.
        seed: for the random weights; the `demo` preset ignores it.

    Raises:
        ConfigError: unknown preset, a directory in use, or torch/transformers missing for random weights.
    """
    sizes = preset if isinstance(preset, RandomPreset) else RANDOM_PRESETS.get(preset)
    if isinstance(preset, str) and preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown preset {preset!r}: did you mean {near[0]!r}? (one of {', '.join(PRESETS)})", param="--preset"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory: name a new one", param="DIR")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            built = Path(scratch) / "model"
            shutil.copytree(_WEIGHTS if preset == "demo" else _BLANK, built)
            if sizes is not None:
                _write_configs(built, sizes)
                if sizes.hollow:
                    write_checkpoint(built, "hollow")
                else:
                    _draw_weights(built, seed)
            elif isinstance(preset, str) and preset != "demo":
                _draw_weights(built, seed, write_family(built, preset))
            built.replace(directory)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror or error}", param="DIR") from error


def _write_configs(model: Path, preset: RandomPreset) -> None:
    config = json.loads((model / "config.json").read_text())
    for section, changes in (("text_config", preset.text), ("vision_config", preset.vision)):
        config[section] |= changes
        config[section]["initializer_range"] = _INITIALIZER_RANGE
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, most in (("preprocessor_config.json", 1), ("video_preprocessor_config.json", _MOST_FRAMES)):
        processor = json.loads((model / name).read_text())
        processor["size"] = {"longest_edge": preset.max_pixels * most, "shortest_edge": preset.min_pixels}
        if most > 1:
            processor |= {"min_frames": 2, "max_frames": _MOST_FRAMES}
        (model / name).write_text(json.dumps(processor, indent=2) + "\n")


def _draw_weights(model: Path, seed: int, changes: dict[str, Any] | None = None) -> None:
    write_checkpoint(model, "random", str(seed), json.dumps(changes or {}))


def write_checkpoint(model: Path, *arguments: str) -> None:
    """Writes the weights of a model folder by `epd_serve.demo.checkpoint`, whose arguments follow the folder, with the
    torchvision repair that CPU machines need."""
    ours = [str(_SITE), str(Path(epd_serve.__file__).parents[1])]
    path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "epd_serve.demo.checkpoint", str(model), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"making weights took longer than {_BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"cannot make weights: {reason} (needs torch and transformers: pip install '.[cpu]')")
