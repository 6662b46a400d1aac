"""A consumer without its encoder (`--language-model-only`): what vLLM 0.32 leaves undone for it.

vLLM builds no tower then, and takes items as metadata alone; their features come through our connector. Families whose
features are one row of the language model's width per token need no more. Qwen3-VL's rows hold those of DeepStack, too,
one level after the other, and its class splits them only where it sees that its tower is there (`use_deepstack`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DEEPSTACK = {
    "Qwen3VLForConditionalGeneration": "vllm.model_executor.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm.model_executor.models.qwen3_vl_moe",
}
"""Architecture → the module whose class asks in its `__init__`, and nowhere else, whether its tower is missing."""
_MISSING = "StageMissingLayer"


class NeverMissing:
    """Nothing is one."""


def without_encoder(vllm_config: VllmConfig) -> bool:
    """Whether this stage has a model of which it loads the language model alone."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and bool(multimodal.language_model_only)


def split_deepstack_rows(vllm_config: VllmConfig) -> None:
    """Have a Qwen3-VL without its tower read features as one that has it. In a worker, before its model is made.

    Its `use_deepstack` is `not isinstance(self.visual, StageMissingLayer)`: in its module that name means a class of
    which nothing is an instance from now on. What vLLM itself knows of missing layers stays as it is.

    Raises:
        ConfigError: this vLLM's module asks in another way.
    """
    architectures = vllm_config.model_config.architectures if without_encoder(vllm_config) else ()
    name = next((_DEEPSTACK[one] for one in architectures if one in _DEEPSTACK), "")
    if not name:
        return
    module = importlib.import_module(name)
    if not hasattr(module, _MISSING):
        raise ConfigError(
            f"{name} of this vLLM does not name {_MISSING}: DeepStack's rows would be lost without the encoder; "
            "remove --language-model-only (--encoder-free)"
        )
    setattr(module, _MISSING, NeverMissing)
