"""Run as a program, in an environment where vLLM can be imported: what vLLM's own scheduler, extended as in a stage,
makes of requests whose features come late. Prints a JSON object: what each scenario saw.

The features lie in a real arena and are found by the real connector; only the model is missing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
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
from epd_serve.engine import compat
from epd_serve.engine.ec.connector import FeatureConnector
from epd_serve.engine.ec.partial_prefill import with_partial_prefill
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena
from tests.epd_serve.engine.ec.stages import make_arena
from tests.waiting import wait_for

BLOCK, LONGEST, IMAGE = 16, 512, 40
Seen = dict[str, Any]


class Stage:
    """A PD scheduler, and what becomes of its steps. `computed`: tokens of each request so far, step by step."""

    def __init__(self, arena: Arena, blocks: int = 3 * LONGEST // BLOCK, **flags: Any) -> None:
        wiring = StageWiring(
            "PD0", Role.PD, "i", arena=str(arena.path), arena_id="here", feature_wait_s=flags.pop("wait_s", 30.0)
        )
        flags = {"max_num_seqs": 8, "max_model_len": LONGEST, "max_num_batched_tokens": 1024, **flags}
        args = AsyncEngineArgs(model=str(builtin_model_dir()), block_size=BLOCK, enforce_eager=True, **flags)
        self.config: VllmConfig = args.create_engine_config()
        self.config.cache_config.num_gpu_blocks = blocks
        layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler: Any = with_partial_prefill(Scheduler)(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
        )
        self.config.ec_transfer_config = SimpleNamespace(
            is_ec_producer=False, is_ec_consumer=True, ec_connector_extra_config={"epd": wiring.to_json()}
        )
        self.scheduler.ec_connector = self.connector = FeatureConnector(self.config, ECConnectorRole.SCHEDULER)
        self.scheduler.allow_early_begins(wiring)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.arena = arena
        self.loads: list[str] = []
        self.encodes: list[str] = []
        self.ended: dict[str, str] = {}
        self.requests: dict[str, Request] = {}

    def add(
        self, name: str, *parts: int | str, word: int = 0, tokens: int = 1, seed: int | None = None, fails: bool = False
    ) -> None:
        """A prompt of so many words, its own unless told otherwise, or the image of that name, one after the other."""
        word = word or 100 + len(self.requests)
        prompt: list[int] = []
        features: list[Any] = []
        for part in parts:
            if isinstance(part, str):
                where = PlaceholderRange(offset=len(prompt), length=IMAGE)
                features.append(MultiModalFeatureSpec(data=None, modality="image", identifier=part, mm_position=where))
            prompt += [word] * (IMAGE if isinstance(part, str) else part)
        xargs = {"extra_args": {"epd_on_missing": "fail"}} if fails else {}
        params = SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **xargs)
        self.requests[name] = request = Request(
            name, prompt, params, None, mm_features=features, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)

    def put(self, *keys: str) -> None:
        for key in keys:
            self.arena.put(key, bytes(64), shape=(64,), dtype="uint8")

    def step(self) -> dict[str, int]:
        """Tokens that were scheduled. Whoever has computed all of his gets a token."""
        output = self.scheduler.schedule()
        self.loads += [slot.key for slot in output.ec_connector_metadata.step.loads]
        for name, indices in output.scheduled_encoder_inputs.items():
            self.encodes += [self.requests[name].mm_features[index].identifier for index in indices]
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [9] for name in names] if names else []
        ran = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
        return dict(output.num_scheduled_tokens)

    def steps_until(self, done: Callable[[dict[str, int]], Any]) -> list[dict[str, int]]:
        """The steps that scheduled something, until one of them satisfies `done`."""
        steps: list[dict[str, int]] = []

        def satisfied() -> bool:
            step = self.step()
            if step:
                steps.append(step)
            return bool(done(step))

        wait_for(satisfied)
        return steps

    def idle(self, steps: int = 20) -> list[dict[str, int]]:
        return [step for step in (self.step() for _ in range(steps)) if step]

    def seen(self, **more: Any) -> Seen:
        used = round(self.scheduler.kv_cache_manager.usage * (self.config.cache_config.num_gpu_blocks - 1))
        return {"loads": self.loads, "encodes": self.encodes, "ended": self.ended, "blocks": used, **more}


@contextmanager
def stage(**flags: Any) -> Iterator[Stage]:
    arena = make_arena()
    made = Stage(arena, **flags)
    try:
        yield made
    finally:
        made.connector.shutdown()
        arena.close()
        Arena.unlink(arena.path)


def late(**flags: Any) -> Seen:
    """Two images, the second of which comes late."""
    with stage(**flags) as made:
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5)
        first = made.steps_until(lambda step: "r" in step)
        between = made.idle()
        held = made.seen()["blocks"]
        made.put("b")
        then = made.steps_until(lambda _: "r" in made.ended)
        return made.seen(first=first, between=between, held=held, then=then)


def seeded() -> Seen:
    with stage() as made:
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5, seed=3)
        between = made.idle()
        made.put("b")
        return made.seen(between=between, then=made.steps_until(lambda _: "r" in made.ended))


def others_go_on() -> Seen:
    """Text behind a request that has begun, behind one that cannot begin, behind one that begins with its image."""
    with stage() as made:
        made.put("a")
        made.add("begun", 20, "a", 10, "b", 5)
        made.steps_until(lambda step: "begun" in step)
        made.add("second", 60, "c", 5)
        made.add("at once", "d", 60)
        made.add("text", 30)
        return made.seen(then=made.steps_until(lambda _: "text" in made.ended))


def known_prefix() -> Seen:
    """All of a prompt but its end is in the prefix cache; the features of its images are not here."""
    with stage() as made:
        made.put("a", "b")
        made.add("before", 20, "a", "b", word=7)
        made.steps_until(lambda _: "before" in made.ended)
        made.scheduler.encoder_cache_manager.reset()
        made.idle(3)
        wait_for(lambda: made.arena.stats().leased == 0)
        for key in ("a", "b"):
            made.arena.remove(key)
        made.add("r", 20, "a", "b", word=7)
        made.add("text", 30)
        meanwhile = made.steps_until(lambda _: "text" in made.ended)
        made.put("b")
        return made.seen(meanwhile=meanwhile, then=made.steps_until(lambda _: "r" in made.ended))


def fails_half_way() -> Seen:
    if not compat.can_fail_requests():
        return {}
    with stage(wait_s=0.3) as made:
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5, fails=True)
        first = made.steps_until(lambda step: "r" in step)
        made.steps_until(lambda _: "r" in made.ended)
        made.idle(3)
        wait_for(lambda: made.arena.stats().leased == 0)
        return made.seen(first=first, left=len(made.scheduler.requests))


def recomputed_half_way() -> Seen:
    with stage(wait_s=0.3) as made:
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5)
        first = made.steps_until(lambda step: "r" in step)
        return made.seen(first=first, then=made.steps_until(lambda _: "r" in made.ended))


def preempted_half_way() -> Seen:
    """A long answer needs the blocks: the request that has begun makes way, and begins anew."""
    with stage(blocks=1 + (LONGEST + 304) // BLOCK) as made:
        made.add("answer", 400, tokens=112)
        made.add("other", 240, tokens=100)
        made.steps_until(lambda step: "other" in step)
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5)
        first = made.steps_until(lambda step: "r" in step)
        made.steps_until(lambda _: made.requests["r"].num_preemptions)
        made.put("b")
        made.steps_until(lambda _: len(made.ended) == 3)
        return made.seen(first=first[-1], preemptions=made.requests["r"].num_preemptions)


def few_blocks() -> Seen:
    """Beside what has begun another request of any length would not fit."""
    with stage(blocks=LONGEST // BLOCK + 4) as made:
        made.put("a")
        made.add("r", 20, "a", 10, "b", 5)
        between = made.idle()
        made.put("b")
        return made.seen(between=between, then=made.steps_until(lambda _: "r" in made.ended))


SCENARIOS: dict[str, Callable[[], Seen]] = {
    "late": late,
    "late, whole images": lambda: late(disable_chunked_mm_input=True),
    "late, small steps": lambda: late(max_num_batched_tokens=48, max_num_seqs=4),
    "seeded": seeded,
    "others go on": others_go_on,
    "known prefix": known_prefix,
    "fails half-way": fails_half_way,
    "recomputed half-way": recomputed_half_way,
    "preempted half-way": preempted_half_way,
    "few blocks": few_blocks,
}

if __name__ == "__main__":
    compat.media_is_absent = lambda vllm_config: lambda features: False  # no item here has data
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(exist_ok=True)
        found: dict[str, Any] = {}
        for name, scenario in SCENARIOS.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                found[name] = scenario()
        print(json.dumps(found))
