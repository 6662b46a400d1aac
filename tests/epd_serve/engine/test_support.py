"""The table of vLLM's features: what is refused is refused by name, what is called supported has a test."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.support import FEATURES, Meets, check_stage, document, refusals
from epd_serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
KV_GROUPS = (
    "--kv-transfer-config"  # known when vLLM has laid out its cache: tests/epd_serve/engine/kv/test_connector.py
)


TRANSFERS, KV, SENT_KV, FED = {"E", "P", "D", "PD"}, {"P", "D"}, {"P"}, {"P", "D", "PD"}


def config(role: str, **changes: Any) -> Any:
    """A VllmConfig of a stage, as far as the table reads it. `changes`: `part__name=value`."""
    parts: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(
            kv_connector="GroupedKVConnector", is_kv_producer=role == "P", kv_connector_extra_config={"epd": {}}
        )
        if role in KV
        else None,
        "ec_transfer_config": SimpleNamespace(is_ec_consumer=role != "E") if role in TRANSFERS else None,
        "lora_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(tensor_parallel_size=2, use_ubatching=False),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "model_config": SimpleNamespace(enable_sleep_mode=False, architectures=["InternVLForConditionalGeneration"]),
        "compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
    }
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(parts[part], name, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def drafting(method: str) -> Any:
    return SimpleNamespace(method=method)


PRUNED = SimpleNamespace(video_pruning_rate=0.5)
ALONE = SimpleNamespace(language_model_only=True, allow_missing_mm_embeddings=True, video_pruning_rate=None)
OLD_ALONE = SimpleNamespace(language_model_only=True, video_pruning_rate=None)
QWEN = ["Qwen2_5_VLForConditionalGeneration"]
ASKED: list[tuple[str, dict[str, Any], str, set[str]]] = [
    ("--compilation-config", {"compilation_config__cudagraph_mode": SimpleNamespace(name="FULL")}, "FULL", SENT_KV),
    ("--speculative-config", {"speculative_config": drafting("eagle3")}, "method eagle3", KV),
    ("--speculative-config", {"speculative_config": drafting("mtp")}, "method mtp", KV),
    ("--speculative-config", {"speculative_config": drafting("draft_model")}, "method draft_model", KV),
    ("--enable-lora", {"lora_config": SimpleNamespace()}, "LoRA", TRANSFERS),
    ("--calculate-kv-scales", {"cache_config__calculate_kv_scales": True}, "scales of its own", KV),
    ("--kv-cache-dtype", {"cache_config__cache_dtype": "int8_per_token_head"}, "int8_per_token_head", KV),
    ("--kv-cache-dtype", {"cache_config__cache_dtype": "nvfp4"}, "nvfp4", KV),
    ("--video-pruning-rate", {"model_config__multimodal_config": PRUNED}, "rate 0.5", TRANSFERS),
    ("--language-model-only", {"model_config__multimodal_config": ALONE}, "embedding_fields", FED),
    (
        "--language-model-only",
        {"model_config__multimodal_config": OLD_ALONE, "model_config__architectures": QWEN},
        "without its pixels",
        FED,
    ),
    ("--enable-dbo", {"parallel_config__use_ubatching": True}, "once per micro-batch", KV),
    ("--pipeline-parallel-size", {"parallel_config__pipeline_parallel_size": 2}, "size 2", TRANSFERS),
    ("--data-parallel-size", {"parallel_config__data_parallel_size": 4}, "size 4", TRANSFERS),
    ("--decode-context-parallel-size", {"parallel_config__decode_context_parallel_size": 2}, "size 2", TRANSFERS),
    ("--prefill-context-parallel-size", {"parallel_config__prefill_context_parallel_size": 2}, "size 2", TRANSFERS),
    ("--enable-sleep-mode", {"model_config__enable_sleep_mode": True}, "stays registered", TRANSFERS),
    ("--kv-offloading-size", {"kv_transfer_config__kv_connector": "OffloadingConnector"}, "in the place of ours", KV),
]


@pytest.mark.parametrize(("flag", "changes", "said", "by"), ASKED, ids=[f"{flag} {said}" for flag, _, said, _ in ASKED])
def test_a_stage_that_meets_what_we_do_not_support_ends_with_the_flag(
    flag: str, changes: dict[str, Any], said: str, by: set[str]
) -> None:
    for role in ("E", "P", "D", "PD", "monolith"):
        if role not in KV and any(path.startswith("kv_transfer") for path in changes):
            continue
        asked = config(role, **changes)
        if role not in by:
            check_stage(asked)
            continue
        with pytest.raises(ConfigError) as refused:
            check_stage(asked)
        line = str(refused.value)
        assert refused.value.param == flag and line.startswith(flag)
        assert said in line and ": refused where a stage " in line and "\n" not in line


def test_every_refusal_of_the_table_is_among_them() -> None:
    assert {refusal.flag for _, refusal in refusals()} == {flag for flag, *_ in ASKED} | {KV_GROUPS}


@pytest.mark.parametrize("role", ["E", "P", "D", "PD", "monolith"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculative_config": drafting("ngram")},
        {"cache_config__cache_dtype": "fp8"},
        {"parallel_config__enable_expert_parallel": True},
        {"compilation_config__cudagraph_mode": SimpleNamespace(name="FULL_DECODE_ONLY")},
        {"compilation_config__cudagraph_mode": None},
        {"model_config__multimodal_config": ALONE, "model_config__architectures": QWEN},
    ],
)
def test_what_is_supported_starts(role: str, changes: dict[str, Any]) -> None:
    check_stage(config(role, **changes))


@pytest.mark.parametrize("role", ["PD", "monolith"])
@pytest.mark.parametrize("changes", [{}, *(changes for _, changes, _, by in ASKED if by <= KV)])
def test_who_hands_over_no_kv_may_offload_it_as_vllm_does(role: str, changes: dict[str, Any]) -> None:
    # VllmConfig._post_init_kv_transfer_config makes this for --kv-offloading-size, where the stage was given none
    offloads = SimpleNamespace(
        kv_connector="OffloadingConnector",
        is_kv_producer=True,
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30},
    )
    check_stage(config(role, kv_transfer_config=offloads, **changes))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_has_tests_that_exist_or_is_refused_or_says_why_it_is_taken_untested(feature: Any) -> None:
    assert feature.tests or feature.refusals or feature.notes
    for named in feature.tests:
        path, _, name = named.partition("::")
        found = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in found, named


def test_the_document_is_the_table() -> None:
    assert (ROOT / "docs/reference/support.md").read_text(encoding="utf-8") == document(), (
        "make it anew: python -m epd_serve.engine.support > docs/reference/support.md"
    )


def test_who_only_prefills_and_decodes_meets_nothing() -> None:
    assert not any(meets.touches(config("monolith")) for meets in Meets)
