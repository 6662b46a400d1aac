"""Run as a program, in an environment where vLLM can be imported: what vLLM's own scheduler, extended as in a stage,
schedules under an SLO. Prints a JSON object: what each scenario saw. Only the model is missing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from epd_serve.demo.presets import builtin_model_dir
from epd_serve.engine.step_budgets import share_steps, shared_tokens, with_budgets
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

BLOCK, LONGEST, IMAGE, BLOCKS = 16, 1024, 100, 2048
Seen = dict[str, Any]


class Stage:
    """A scheduler, and what becomes of its steps; `slow` teaches it that a token of a prompt takes a millisecond, an
    item's as well, and a decode 10 ms."""

    def __init__(self, slo: bool, **flags: Any) -> None:
        flags = {"max_num_seqs": 64, "max_model_len": LONGEST, "max_num_batched_tokens": 2048, **flags}
        args = AsyncEngineArgs(model=str(builtin_model_dir()), block_size=BLOCK, enforce_eager=True, **flags)
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler: Any = with_budgets(Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        named = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.1} if slo else {}
        self.scheduler.hold_to_slo(StageWiring("EPD0", Role.EPD, "i", **named))
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.count = 0
        self.ended: list[str] = []
        for number in range(30 * slo):
            tokens, items = (0, 50, 90)[number % 3], (0, 80)[number % 2]
            self.scheduler.budgets.measured(
                0.01 + 0.001 * (tokens + items), decodes=1, prompt_tokens=tokens, item_tokens=items
            )

    @property
    def limits(self) -> list[int]:
        return [self.scheduler.max_num_scheduled_tokens, self.scheduler.max_num_encoder_input_tokens]

    def add(self, name: str, text: int, images: int = 0, tokens: int = 1, image: int = IMAGE) -> None:
        """A prompt of so many words, then images that nobody else has."""
        self.count += 1
        prompt, features = [100 + self.count] * text, []
        for number in range(images):
            where = PlaceholderRange(offset=len(prompt), length=image)
            key = f"{name}/{number}"
            features.append(MultiModalFeatureSpec(data=None, modality="image", identifier=key, mm_position=where))
            prompt += [100 + self.count] * image
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None, mm_features=features, block_hasher=self._hasher))

    def step(self) -> Seen:
        """(tokens by request, items encoded)."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [9] for name in names] if names else []
        ran = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(output, ran).values():
            self.ended += [one.request_id for one in outputs.outputs if one.finish_reason is not None]
        items = sum(len(indices) for indices in output.scheduled_encoder_inputs.values())
        return {"tokens": dict(output.num_scheduled_tokens), "items": items}

    def steps_until(self, names: set[str]) -> list[Seen]:
        steps = []
        while not names <= set(self.ended):
            steps.append(self.step())
            assert len(steps) < 500, "something waits for ever"
        return steps


def burst(*, slo: bool) -> Seen:
    """Four texts decode, then come six requests with two images each."""
    stage = Stage(slo)
    own = stage.limits
    for number in range(4):
        stage.add(f"t{number}", 20, tokens=400)
    stage.step()
    for number in range(6):
        stage.add(f"i{number}", 10, images=2)
    steps = stage.steps_until({f"i{number}" for number in range(6)})
    held = stage.scheduler.budgets.held if slo else 0
    return {"own": own, "steps": steps, "limits": stage.limits, "held": held}


def oversize() -> Seen:
    """An image that alone takes three times TBT, and texts that keep coming."""
    stage = Stage(slo=True)
    stage.add("t", 20, tokens=400)
    stage.step()
    stage.add("i", 10, images=1, image=300)
    steps = []
    while "i" not in stage.ended:
        stage.add(f"more{len(steps)}", 200)
        steps.append(stage.step())
        assert len(steps) < 300, "the image waits for ever"
    return {"steps": steps}


def ended_before() -> Seen:
    """A request ends before its image was encoded, past `finish_requests`, as one whose KV is lost does."""
    stage = Stage(slo=True)
    stage.add("i", 10, images=1)
    del stage.scheduler.requests["i"]
    return {"next": stage.scheduler._next_item(), "known": list(stage.scheduler._to_encode)}


def without_chunks() -> Seen:
    """A limit of tokens would keep a long prompt from ever being computed."""
    stage = Stage(slo=True, enable_chunked_prefill=False, max_num_batched_tokens=LONGEST)
    stage.add("t", 20, tokens=400)
    stage.step()
    stage.add("long", 600)
    return {"steps": stage.steps_until({"long"})}


def whole_items() -> Seen:
    """Nor an image that must not be cut."""
    stage = Stage(slo=True, disable_chunked_mm_input=True)
    stage.add("t", 20, tokens=400)
    stage.step()
    stage.add("i", 10, images=1, image=300)
    return {"steps": stage.steps_until({"i"})}


SHARED_STEP = 800
SHARED_PROMPTS = (("a", 1000), ("b", 900), ("c", 60), ("d", 1000))


def shared(**flags: Any) -> Seen:
    """A long prompt alone, and others that come after its first step, where a stage only prefills."""
    stage = Stage(slo=False, **{"max_num_batched_tokens": SHARED_STEP, **flags})
    knows = hasattr(stage.scheduler, "adaptive_long_prefill_threshold")
    share_steps(stage.scheduler)
    names = [name for name, _ in SHARED_PROMPTS]
    stage.add(*SHARED_PROMPTS[0])
    steps = [stage.step()]
    for prompt in SHARED_PROMPTS[1:]:
        stage.add(*prompt)
    steps += stage.steps_until(set(names))
    threshold = stage.scheduler.scheduler_config.long_prefill_token_threshold
    return {"steps": steps, "knows": knows, "reported": shared_tokens(stage.scheduler), "threshold": threshold}


def cost() -> Seen:
    """Microseconds of setting the limits, with 60 requests that decode and one that is prefilled."""
    stage = Stage(slo=True)
    for number in range(60):
        stage.add(f"t{number}", 1, tokens=400)
    while len(stage.scheduler.running) < 60:
        stage.step()
    stage.add("i", 10, images=2)
    stage.step()
    begun = time.perf_counter()
    for _ in range(1000):
        stage.scheduler._set_limits(stage.scheduler.budgets)
    return {"us": (time.perf_counter() - begun) * 1e3}


SCENARIOS: dict[str, Callable[[], Seen]] = {
    "burst": lambda: burst(slo=True),
    "burst, no slo": lambda: burst(slo=False),
    "oversize": oversize,
    "ended before": ended_before,
    "without chunks": without_chunks,
    "whole items": whole_items,
    "shared": shared,
    "shared, by the operator": lambda: shared(long_prefill_token_threshold=200),
    "shared, without chunks": lambda: shared(enable_chunked_prefill=False, max_num_batched_tokens=LONGEST),
    "cost": cost,
}

if __name__ == "__main__":
    print(json.dumps({name: scenario() for name, scenario in SCENARIOS.items() if name in (sys.argv[1:] or SCENARIOS)}))
