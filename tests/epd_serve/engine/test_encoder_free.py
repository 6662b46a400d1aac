"""Qwen3-VL without its tower: the one name of vLLM's that says otherwise."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.compat import media_is_absent
from epd_serve.engine.encoder_free import NeverMissing, split_deepstack_rows, without_encoder
from epd_serve.errors import ConfigError
from tests.e2e.engine_facts import METADATA_TRAVELS

MODULES = {
    "Qwen3VLForConditionalGeneration": "vllm.model_executor.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "vllm.model_executor.models.qwen3_vl_moe",
}
on_this_vllm = pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no item as metadata alone")


def config(architecture: str, *, alone: bool = True) -> Any:
    multimodal = SimpleNamespace(language_model_only=alone)
    return SimpleNamespace(model_config=SimpleNamespace(architectures=[architecture], multimodal_config=multimodal))


class Missing:
    """Stands for vLLM's StageMissingLayer."""


@pytest.fixture(params=MODULES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """An architecture, and what stands for its module: the real one imports half of transformers."""
    module: Any = ModuleType(MODULES[request.param])
    module.StageMissingLayer = Missing
    monkeypatch.setitem(sys.modules, MODULES[request.param], module)
    return request.param, module


def test_its_class_believes_that_its_tower_is_there(model: tuple[str, Any]) -> None:
    architecture, module = model
    split_deepstack_rows(config(architecture, alone=False))
    assert module.StageMissingLayer is Missing
    split_deepstack_rows(config(architecture))
    assert module.StageMissingLayer is NeverMissing and not isinstance(Missing(), NeverMissing)


@on_this_vllm
@pytest.mark.parametrize("architecture", MODULES)
def test_nothing_else_in_its_module_asks_for_that_name(architecture: str) -> None:
    """What would be told wrong, too: uses of it beside the one of `use_deepstack`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parents[1] / f"{MODULES[architecture].replace('.', '/')}.py").read_text())
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "StageMissingLayer"]
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.use_deepstack"
    ]
    assert len(uses) == 1 and any(use in ast.walk(one) for one in asked for use in uses)


def test_a_vllm_that_asks_in_another_way_is_refused(model: tuple[str, Any]) -> None:
    architecture, module = model
    del module.StageMissingLayer
    with pytest.raises(ConfigError, match="--encoder-free"):
        split_deepstack_rows(config(architecture))


def test_other_families_need_nothing() -> None:
    split_deepstack_rows(config("Qwen2_5_VLForConditionalGeneration"))


@on_this_vllm
def test_without_an_encoder_nothing_is_recomputed() -> None:
    absent = media_is_absent(config("Qwen2_5_VLForConditionalGeneration"))
    assert absent([SimpleNamespace(data=None)]) and not absent([])  # type: ignore[list-item]
    assert not without_encoder(config("x", alone=False))
    assert not without_encoder(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None)))  # type: ignore[arg-type]
