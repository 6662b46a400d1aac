"""What a model directory says about itself, read from its config.json without transformers or torch.

Used to refuse early and in one line what vLLM would refuse late and in fifty. A hub name passes through: its facts
are unknown until the stages download it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epd_serve.errors import ConfigError
from epd_serve.layout import Layout

T = TypeVar("T")

_SAMPLE_BYTES = 1 << 20

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MULTIMODAL_KEY = re.compile(r"vision|visual|audio|img_processor|image_token|video_token")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model directory; None where the config does not say.

    Attributes:
        directory: absolute path.
        architecture: first of `architectures`, "" when absent.
        multimodal: it has a vision or audio tower.
        max_positions: context limit of the language model in tokens.
        dtype: as written, e.g. `bfloat16`.
        revision: digest of the config and of samples of the weights; the same on every host.
    """

    directory: Path
    architecture: str
    multimodal: bool
    max_positions: int | None
    dtype: str | None
    revision: str = ""


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
    """Config whole, weight files by name, size, head and tail: a retrained model of equal shape still differs."""
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=8)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as weights:
            digest.update(weights.read(_SAMPLE_BYTES))
            weights.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
