"""What a model directory says about itself, read from its config.json without transformers or torch.

Used to refuse early and in one line what vLLM would refuse late and in fifty. A hub name passes through: its facts
are unknown until the stages download it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epd_serve.errors import ConfigError
from epd_serve.layout import Layout

T = TypeVar("T")

_SAMPLE_BYTES = 1 << 20

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MULTIMODAL_KEY = re.compile(r"vision|visual|audio|img_processor|image_token|video_token")
_IMAGE_KEY = re.compile(r"vision|visual|img_processor|image_token|mm_vision_tower")
_AUDIO_KEY = re.compile(r"audio_(?:config|processor|tower|token|encoder)|num_mel_bins|sound_")
_VIDEO_KEY = re.compile(r"video_token|video_start_token|video_pad_token|video_config")
_TAKES_VIDEO = re.compile(
    r"Qwen2VL|Qwen2_5_VL|Qwen3VL|Qwen3_5|Qwen2_5Omni|Qwen3Omni|Glm4v|Glm4_1v|InternS1|InternVL|LlavaNextVideo"
    r"|LlavaOnevision|MiniCPMV|MiniCPMO|Keye|Molmo2|Ernie4_5_?VL|OpenPanguVL|Ovis2_5|NemotronH_Nano_VL|HCXVision|MiMoV2",
    re.IGNORECASE,
)
"""Architectures to whose vLLM classes a clip can be given (`get_supported_mm_limits`, vLLM 0.32)."""

CPU_LIMITS: Mapping[str, int] = {"image": 8, "video": 0}
"""What CPU stages are started with as `--limit-mm-per-prompt`: profiling a worst-case clip takes minutes there."""

_PROCESSING_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.safetensors.index.json")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model directory; None where the config does not say.

    Attributes:
        directory: absolute path.
        architecture: first of `architectures`, "" when absent.
        multimodal: it has a vision or audio tower.
        max_positions: context limit of the language model in tokens.
        dtype: as written, e.g. `bfloat16`.
        revision: digest of configs, custom code and samples of the weights; the same on every host.
        towers: `image`, `video`, `audio`: what the model takes, or None where the config does not tell.
    """

    directory: Path
    architecture: str
    multimodal: bool
    max_positions: int | None
    dtype: str | None
    revision: str = ""
    towers: frozenset[str] | None = None


def read_model_facts(model: str) -> ModelFacts | None:
    """Facts of a model directory, or None for a hub name.

    Raises:
        ConfigError: the path does not exist, is no model directory, or its config.json is not readable JSON.
    """
    directory = Path(model).expanduser()
    if not directory.exists():
        if _is_hub_name(model):
            return None
        raise ConfigError(f"model directory {model} does not exist; give a directory or a hub name such as org/name")
    if not directory.is_dir():
        raise ConfigError(f"model {model} is a file; give the directory that holds its config.json")
    config = _read_config(directory)
    language = next((config[key] for key in ("text_config", "llm_config", "thinker_config") if key in config), config)
    language = language.get("text_config", language) if isinstance(language, dict) else config
    architectures = config.get("architectures") or [""]
    return ModelFacts(
        directory=directory.resolve(),
        architecture=str(architectures[0]),
        multimodal=_is_multimodal(config, str(architectures[0])),
        max_positions=_first(int, language.get("max_position_embeddings"), config.get("max_position_embeddings")),
        dtype=_first(str, config.get("dtype"), config.get("torch_dtype"), language.get("dtype")),
        revision=_revision(directory),
        towers=_towers(config, str(architectures[0])),
    )


def check_model_fits(facts: ModelFacts | None, layout: Layout) -> None:
    """Refuse a text-only model under a layout with encode-only instances: they would have nothing to run.

    Raises:
        ConfigError: names the layout without its encoders.
    """
    if facts is None or facts.multimodal:
        return
    if any(role.sends_features for role in layout.roles):
        fix = "P-D" if any(role.sends_kv for role in layout.roles) else "PD"
        raise ConfigError(
            f"{facts.directory.name} ({facts.architecture or 'unknown architecture'}) is a text-only model, "
            f"but layout {layout} has encoders; use --layout {fix}",
            param="--layout",
        )


def modalities(facts: ModelFacts | None, stage_args: Sequence[str], device: str) -> frozenset[str] | None:
    """What a stage takes that is started with these vLLM flags on this kind of device; None: unknown, let it decide.

    A modality that `--limit-mm-per-prompt` sets to 0 is not taken: on CPU that is video, unless the flags say other.
    """
    if facts is None or facts.towers is None:
        return None
    if "--language-model-only" in stage_args:
        return frozenset()
    limits = _limits(stage_args)
    if limits is None:
        limits = CPU_LIMITS if device == "cpu" else {}
    off = {name for name, limit in limits.items() if (limit.get("count") if isinstance(limit, dict) else limit) == 0}
    return facts.towers - off


def _limits(stage_args: Sequence[str]) -> Mapping[str, Any] | None:
    """The last `--limit-mm-per-prompt`, which replaces those before it; None without one."""
    limits: dict[str, Any] | None = None
    for at, argument in enumerate(stage_args):
        name, equals, value = argument.partition("=")
        name, dot, modality = name.replace("_", "-").partition(".")
        if name != "--limit-mm-per-prompt":
            continue
        if not equals:
            value = stage_args[at + 1] if at + 1 < len(stage_args) else ""
        try:
            parsed = json.loads(value)
        except ValueError:
            continue  # vLLM refuses it with its own words
        if dot:
            limits = {**(limits or {}), modality: parsed}
        elif isinstance(parsed, dict):
            limits = parsed
    return limits


def _is_hub_name(model: str) -> bool:
    """`org/name` or `name`, unless `org` is a folder here: then a path was meant and is missing."""
    if not _HUB_NAME.fullmatch(model):
        return False
    owner, slash, _ = model.partition("/")
    return not (slash and Path(owner).is_dir())


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model directory {directory} has no config.json; is it in Hugging Face format?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def _revision(directory: Path) -> str:
    """Configs and code whole, weights by name, size, head and tail: a retrained model of equal shape still differs.

    No dates: copies of a model on several hosts have to agree.
    """
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=8)
    texts = [directory / name for name in _PROCESSING_FILES] + sorted(directory.glob("*.py"))
    for path in texts:
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)}:".encode() + content)
    for path in sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as weights:
            digest.update(weights.read(_SAMPLE_BYTES))
            weights.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _towers(config: dict[str, Any], architecture: str) -> frozenset[str] | None:
    """Modalities by the keys of the config, and by the architecture where keys do not tell."""
    if not _is_multimodal(config, architecture):
        return frozenset()
    nested = config.get("thinker_config")
    levels = (config, nested if isinstance(nested, dict) else {})
    keys = {key for level in levels for key, value in level.items() if value is not None and value is not False}

    def has(pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(key) for key in keys)

    audio = has(_AUDIO_KEY)
    image = has(_IMAGE_KEY)
    if not (audio or image):
        return None
    video = image and (has(_VIDEO_KEY) or _TAKES_VIDEO.search(architecture) is not None)
    taken = {"image": image, "video": video, "audio": audio}
    return frozenset(name for name, there in taken.items() if there)


def _is_multimodal(config: dict[str, Any], architecture: str) -> bool:
    nested = config.get("thinker_config")
    keys = set(config) | (set(nested) if isinstance(nested, dict) else set())
    if any(_MULTIMODAL_KEY.search(key) for key in keys if config.get(key, True) not in (None, False)):
        return True
    # T5, BART and other encoder-decoders carry the same suffix but read only text (Whisper has num_mel_bins).
    if config.get("is_encoder_decoder"):
        return "num_mel_bins" in config
    return architecture.endswith("ForConditionalGeneration")


def _first(kind: type[T], *values: object) -> T | None:
    return next((value for value in values if isinstance(value, kind)), None)
