"""What a stage must have, from configs of real families: sizes, largest items, peaks, parts by role."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_serve.activation_peak import language_peak, tower_peak
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.largest_items import ProcessorConfigs, largest_items
from epd_serve.memory_shares import Need
from epd_serve.model_sizes import ModelSizes, model_sizes
from epd_serve.model_weights import ModelWeights
from epd_serve.roles import Role
from epd_serve.stage_flags import read_stage_flags
from epd_serve.stage_memory import COMMUNICATOR_BYTES, TRANSFER_BYTES, Model, Place, stage_need
from tests.checkpoints import QWEN25_VL_7B

GIB = 1 << 30
MIB = 1 << 20

QWEN25: dict[str, Any] = dict(QWEN25_VL_7B)
QWEN2: dict[str, Any] = QWEN25 | {
    "model_type": "qwen2_vl",
    "vision_config": {
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "vocab_size": 151936,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
INTERNVL: dict[str, Any] = {
    "model_type": "internvl_chat",
    "llm_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "vocab_size": 151674,
    },
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 448, "patch_size": 14},
    "downsample_ratio": 0.5,
    "max_dynamic_patch": 12,
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
    },
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 336, "patch_size": 14},
}


def sizes_of(config: dict[str, Any]) -> ModelSizes:
    found = model_sizes(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "kv_token"),
    [(QWEN25, 57344), (QWEN3, 147456), (INTERNVL, 147456), (LLAVA, 524288)],
    ids=["Qwen2.5-VL-7B", "Qwen3-VL-8B", "InternVL3.5-8B", "LLaVA-1.5-7B"],
)
def test_kv_cache_of_a_token_is_that_of_the_published_sizes(config: dict[str, Any], kv_token: int) -> None:
    assert sizes_of(config).language.kv_token_bytes(1, 2) == kv_token


def test_ranks_divide_heads_but_never_one_head() -> None:
    language = sizes_of(QWEN25).language
    assert [language.kv_token_bytes(tp, 2) for tp in (1, 2, 4, 8)] == [57344, 28672, 14336, 14336]


def test_latent_attention_caches_one_row_whole_on_every_rank() -> None:
    text = {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512}
    language = sizes_of(text | {"qk_rope_head_dim": 64, "vocab_size": 1000}).language
    assert language.kv_token_bytes(1, 2) == language.kv_token_bytes(8, 2) == 27 * 576 * 2


def test_layers_with_linear_attention_do_not_grow() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9
    text = QWEN3["text_config"] | {"layer_types": kinds}
    assert sizes_of(QWEN3 | {"text_config": text}).language.kv_token_bytes(1, 2) == 147456 // 4


@pytest.mark.parametrize(
    ("config", "processor", "patches", "tokens"),
    [
        (QWEN25, {"max_pixels": 12845056}, 65536, 16384),
        (QWEN2, {"size": {"longest_edge": 12845056, "shortest_edge": 3136}}, 65536, 16384),
        (QWEN3, {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}, 65536, 16384),
        (INTERNVL, {}, 13 * 1025, 13 * 1025 // 4),
        (LLAVA, {"size": {"shortest_edge": 336}}, 577, 577),
    ],
    ids=["Qwen2.5-VL", "Qwen2-VL", "Qwen3-VL", "InternVL", "LLaVA"],
)
def test_the_largest_picture(config: dict[str, Any], processor: dict[str, Any], patches: int, tokens: int) -> None:
    items = largest_items(sizes_of(config), ProcessorConfigs(config, processor, {}, {}), {"image"}, 128000)
    assert items is not None
    assert [(item.patches, item.tokens) for item in items] == [(patches, tokens)]


def test_a_flag_bounds_the_picture() -> None:
    configs = ProcessorConfigs(QWEN25, {"max_pixels": 12845056}, {}, {"max_pixels": 1048576})
    (item,) = largest_items(sizes_of(QWEN25), configs, {"image"}, 128000) or ()
    assert item.patches == 1048576 // 196


def test_a_clip_is_as_long_as_vllm_profiles_it() -> None:
    qwen25 = ProcessorConfigs(QWEN25, {"max_pixels": 12845056}, {}, {})
    lengths = {length: largest_items(sizes_of(QWEN25), qwen25, {"video"}, length) for length in (128000, 65536, 4096)}
    assert {length: items[0].tokens for length, items in lengths.items() if items} == {
        128000: 7 * 16384,
        65536: 4 * 16384,
        4096: 16384,
    }
    qwen3 = ProcessorConfigs(QWEN3, {"size": {"longest_edge": 16777216}}, {"size": {"longest_edge": 25165824}}, {})
    (clip,) = largest_items(sizes_of(QWEN3), qwen3, {"video"}, 262144) or ()
    assert clip.tokens == 12288


def test_an_encoder_that_tells_no_size_is_unknown() -> None:
    config = {**LLAVA, "vision_config": {"hidden_size": 1024}}
    assert largest_items(sizes_of(config), ProcessorConfigs(config, {}, {}, {}), {"image"}, 4096) is None
    assert model_sizes({"model_type": "mystery"}) is None


def test_peaks_are_linear_in_patches_and_tokens_and_fall_with_width() -> None:
    tower, language = sizes_of(QWEN25).towers["vision"], sizes_of(QWEN25).language
    one, four = (tower_peak(tower, patches, tp=1, element_bytes=2) for patches in (4096, 16384))
    assert four == pytest.approx(4 * one, rel=0.001)
    assert tower_peak(tower, 4096, tp=2, element_bytes=2) < one
    short, long = (language_peak(language, tokens, 0, tp=1, element_bytes=2) for tokens in (2048, 8192))
    assert long == pytest.approx(4 * short, rel=0.001)


def need(
    role: Role,
    *words: str,
    tp: int = 1,
    device: str = "npu",
    modalities: set[str] | None = None,
    queue_bytes: int = 0,
) -> Need:
    model = Model(
        ModelWeights(tower=1 * GIB, language=14 * GIB),
        sizes_of(QWEN25),
        ProcessorConfigs(QWEN25, {"max_pixels": 12845056}, {}, {}),
    )
    flags = read_stage_flags(words, device, 64 * GIB, tp)
    found = stage_need(
        f"{role}0",
        role,
        model,
        flags,
        Place(device, tp, queue_bytes=queue_bytes),
        frozenset({"image"} if modalities is None else modalities),
    )
    assert found is not None
    return found


def test_an_encoder_has_room_for_features_that_wait_to_be_stored_and_nobody_else_has() -> None:
    none, two, four = (need(Role.E, queue_bytes=size * GIB) for size in (0, 2, 4))
    assert four.least - two.least == 2 * GIB
    assert 0 < two.least - none.least < 2 * GIB, "one step's features are taken whatever the bound"
    assert need(Role.PD, queue_bytes=4 * GIB) == need(Role.PD)


def test_an_encoder_loads_the_tower_and_everybody_else_both() -> None:
    assert need(Role.E).weights == 1 * GIB
    assert {need(role).weights for role in (Role.P, Role.D, Role.PD, Role.EP, Role.EPD)} == {15 * GIB}
    assert need(Role.P, "--language-model-only").weights == 14 * GIB


def test_without_its_encoder_a_stage_has_room_for_features_that_come() -> None:
    decoding = need(Role.P, "--language-model-only", modalities=set()).least
    fed = need(Role.P, "--language-model-only")
    assert fed.weights == 14 * GIB and fed.least > decoding
    assert fed.least < need(Role.P).least - 1 * GIB // 2


def test_ranks_divide_weights_unless_they_divide_pictures() -> None:
    assert need(Role.P, tp=2).weights == 15 * GIB // 2
    assert need(Role.P, "--mm-encoder-tp-mode", "data", tp=2).weights == 8 * GIB
    assert need(Role.P, tp=2).runtime - need(Role.P).runtime == 2 * COMMUNICATOR_BYTES


def test_memory_that_kv_passes_through_is_planned_with_where_kv_is_sent_or_taken() -> None:
    sends, takes, neither = (need(role).runtime for role in (Role.P, Role.D, Role.PD))
    assert sends - neither == takes - neither == TRANSFER_BYTES == 16 << 20


def test_the_least_cache_is_one_request_of_the_longest_length() -> None:
    assert need(Role.D).kv_least == 128000 * 57344
    assert need(Role.D, "--max-model-len", "32768").kv_least == 32768 * 57344
    assert need(Role.D, "--max-model-len", "auto").kv_least == 0
    assert need(Role.E).kv_least == need(Role.E).kv_token == 0


def test_only_an_encoder_may_go_without_room_for_the_longest_clip() -> None:
    both = {"image", "video"}
    assert need(Role.E, modalities=both).longest > 0
    assert need(Role.E, modalities=both).activations == need(Role.E).activations
    assert need(Role.P, modalities=both).longest == 0
    assert need(Role.P, modalities=both).activations > need(Role.P).activations


def test_larger_steps_take_more() -> None:
    assert need(Role.D, "--max-num-batched-tokens", "32768").activations > need(Role.D).activations
    assert need(Role.D, "--enforce-eager").runtime < need(Role.D).runtime


MEASURE = """
import json, sys, torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
vision = AutoConfig.from_pretrained(sys.argv[1]).vision_config
for key, value in json.loads(sys.argv[2]).items():
    setattr(vision, key, value)
vision._attn_implementation = "sdpa"
tower = Qwen3VLVisionModel(vision).to(torch.bfloat16).eval()
side = 32
pixels = torch.zeros(side * side, 3 * vision.temporal_patch_size * vision.patch_size**2, dtype=torch.bfloat16)
with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
    tower(pixels, grid_thw=torch.tensor([[1, side, side]]))
events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
held = peak = 0
for one in sorted(events, key=lambda one: one.start_ns()):
    held += one.nbytes()
    peak = max(peak, held)
print(json.dumps({"peak": peak + pixels.nbytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 256, "intermediate_size": 1024, "out_hidden_size": 512}], ids=["demo", "bench"]
)
def test_the_peak_of_a_tower_is_what_a_forward_pass_takes(changes: dict[str, Any]) -> None:
    """Of Transformers' tower, which rotates in float32 and so takes more than vLLM's, by up to a half."""
    pytest.importorskip("transformers")
    site = Path(__file__).parents[2] / "epd_serve" / "engine" / "site"
    command = [sys.executable, "-c", MEASURE, str(builtin_model_dir()), json.dumps(changes)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])["peak"]
    config = json.loads((builtin_model_dir() / "config.json").read_text())
    config["vision_config"] |= changes
    estimate = tower_peak(sizes_of(config).towers["vision"], 1024, tp=1, element_bytes=2)
    assert 0.5 * measured < estimate < 1.5 * measured
