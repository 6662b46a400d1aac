"""Asks models' own processors how many tokens pictures have. A script, since what it imports takes many seconds.

Reads `[[kind, config, image, overrides], …]` and sizes from stdin, writes a list of counts for each. Stages import
torchvision under a repair (`epd_serve/engine/site`), so this runs under it, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Count = Callable[[int, int], int]


def qwen(config: dict[str, Any], image: dict[str, Any], overrides: dict[str, Any]) -> Count:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(**image)
    return lambda width, height: int(processor.get_number_of_image_patches(height, width, overrides)) // 4


def internvl(config: dict[str, Any], image: dict[str, Any], overrides: dict[str, Any]) -> Count:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor

    processor = GotOcr2ImageProcessor(**image)
    each = config["image_seq_length"]
    return lambda width, height: each * int(processor.get_number_of_image_patches(height, width, overrides))


def internvl_chat(config: dict[str, Any], image: dict[str, Any], overrides: dict[str, Any]) -> Count:
    from vllm.transformers_utils.processors import internvl

    said = {**config, **overrides}
    bounds = {name: said[name] for name in ("min_dynamic_patch", "max_dynamic_patch", "dynamic_image_size")}
    side, patch = config["force_image_size"], config["vision_config"]["patch_size"]
    each = int((side // patch) ** 2 * config["downsample_ratio"] ** 2)
    ratios = internvl.get_internvl_target_ratios(*internvl.resolve_internvl_min_max_num(**bounds, use_thumbnail=False))

    def count(width: int, height: int) -> int:
        size = {"orig_width": width, "orig_height": height, "image_size": side}
        tiles, _, _ = internvl.calculate_internvl_targets(
            **size, target_ratios=ratios, use_thumbnail=said["use_thumbnail"]
        )
        return each * int(tiles)

    return count


def llava(config: dict[str, Any], image: dict[str, Any], overrides: dict[str, Any]) -> Count:
    from vllm.model_executor.models import clip, llava_next, llava_onevision, siglip
    from vllm.model_executor.models import llava as llava_one_size

    of_kind: dict[str, Any] = {
        "llava": llava_one_size.LlavaProcessingInfo,
        "llava_next": llava_next.LlavaNextProcessingInfo,
        "llava_onevision": llava_onevision.LlavaOnevisionProcessingInfo,
    }
    vision = config["vision_config"]
    tower: Any = {"clip_vision_model": clip.CLIPEncoderInfo, "siglip_vision_model": siglip.SiglipEncoderInfo}
    encoder = tower[vision["model_type"]].__new__(tower[vision["model_type"]])
    encoder.vision_config = SimpleNamespace(**vision)
    info = of_kind[config["model_type"]].__new__(of_kind[config["model_type"]])
    info.get_hf_config = lambda: SimpleNamespace(**config)
    info.get_vision_encoder_info = lambda: encoder
    return lambda width, height: int(info.get_num_image_tokens(image_width=width, image_height=height))


def main() -> None:
    cases, sizes = json.load(sys.stdin)
    kinds = {"qwen": qwen, "internvl": internvl, "internvl_chat": internvl_chat, "llava": llava}
    counts = []
    for kind, config, image, overrides in cases:
        count = kinds[kind](config, image, overrides)
        counts.append([count(width, height) for width, height in sizes])
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
