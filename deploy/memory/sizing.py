"""What each instance of a launch must have, from its model's files, its flags and its devices, with any flags tried.

Owns the reading: configs, checkpoint headers (once), device memory. What is needed is worked out by
`epd_serve.stage_memory`; the plan is `deploy/memory/plan.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from epd_serve.engine.argv import CPU_ARGS, CPU_KV_BYTES, ENCODER_ARGS
from epd_serve.errors import ConfigError
from epd_serve.largest_items import ProcessorConfigs
from epd_serve.memory_shares import Division, Grant, Need, divide
from epd_serve.model_facts import ModelFacts, modalities
from epd_serve.model_sizes import model_sizes
from epd_serve.model_weights import ModelWeights, read_model_weights
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from epd_serve.stage_flags import StageFlags, read_stage_flags
from epd_serve.stage_memory import Model, Place, stage_need
from epd_serve.wiring import StageWiring
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceProperties

WordsOf = Callable[[InstancePlan], Sequence[str]]


@dataclass(frozen=True)
class Sizing:
    """One launch, ready to be worked out with any flags.

    Attributes:
        words_of: the operator's vLLM flags of an instance.
        host_bytes: shared memory of the launch (arena and KV staging), which is host memory.
        slab_bytes: of the slab for features of each worker that prefills; 0: the usual size, None: none is taken.
    """

    facts: ModelFacts
    inventory: DeviceInventory
    properties: Sequence[DeviceProperties]
    words_of: WordsOf
    host_bytes: int = 0
    slab_bytes: int | None = 0

    @cached_property
    def _configs(self) -> ProcessorConfigs:
        return processor_configs(self.facts.directory)

    def memory_of(self, device: int) -> tuple[int, int] | None:
        """Total and free bytes of a device, or of the host."""
        for found in self.properties:
            if (found.index == device or self.inventory.kind == "cpu") and found.total_bytes is not None:
                return found.total_bytes, found.total_bytes if found.free_bytes is None else found.free_bytes
        return None

    def need(self, plan: InstancePlan, total: int, more: Sequence[str] = ()) -> Need | None:
        """Of one instance, with `more` flags than it has. None where something is unknown."""
        kind = self.inventory.kind
        words = self._words(plan, more)
        flags = self.flags(plan, total, more)
        sizes = model_sizes(self._configs.config)
        if sizes is None:
            return None
        weights = self._weights(element_bytes=flags.element_bytes, quantised=sizes.quantised, tied=sizes.tied)
        if weights is None:
            return None
        place = Place(
            kind,
            plan.tp,
            StageWiring.feature_queue_bytes,
            CPU_KV_BYTES if kind == "cpu" else 0,
            slab_bytes=self.slab_bytes if plan.role.takes_features and (plan.role.prefills or plan.both) else None,
        )
        model = Model(weights, sizes, replace(self._configs, overrides=flags.processor_kwargs))
        role = Role.D if plan.both else plan.role  # with room for what it may have to decode
        taken = self.facts.towers if flags.language_only else modalities(self.facts, words, kind)
        return stage_need(plan.id, role, model, flags, place, taken)

    def flags(self, plan: InstancePlan, total: int, more: Sequence[str] = ()) -> StageFlags:
        return read_stage_flags(self._words(plan, more), self.inventory.kind, total, plan.tp)

    def takes(self, plan: InstancePlan) -> frozenset[str] | None:
        """Modalities that the instance takes; None: unknown."""
        return modalities(self.facts, self._words(plan, ()), self.inventory.kind)

    def processors(self) -> ProcessorConfigs:
        return self._configs

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the model takes; 0 where it does not say."""
        sizes = model_sizes(self._configs.config)
        return sizes.language.max_positions if sizes is not None else 0

    def _words(self, plan: InstancePlan, more: Sequence[str]) -> tuple[str, ...]:
        ours = (*CPU_ARGS,) if self.inventory.kind == "cpu" else ()
        return (*ours, *(ENCODER_ARGS if plan.role is Role.E else ()), *self.words_of(plan), *more)

    def divided(self, plans: Sequence[InstancePlan], more: Sequence[str] = ()) -> Division | None:
        """One set of devices among its instances; all ranks' devices count as the smallest of them."""
        memories = [memory for device in plans[0].devices if (memory := self.memory_of(device))]
        if len(memories) < len(plans[0].devices):
            return None
        total, free = map(min, zip(*memories, strict=True))
        needs = [need for plan in plans if (need := self.need(plan, total, more))]
        if len(needs) < len(plans):
            return None
        if self.inventory.kind != "cpu":
            return divide(total, needs, free)
        # Host memory is not divided: every worker takes the KV cache that it is told.
        grants = tuple(Grant(need, None, need.fixed_kv or 0, None) for need in needs)
        taken = sum(grant.taken for grant in grants) + self.host_bytes
        return Division(total, free, grants, max(0, taken - total))

    @cached_property
    def _weights(self) -> Callable[..., ModelWeights | None]:
        """`read_model_weights` of the model, which reads the headers of its checkpoint once."""
        return cache(partial(read_model_weights, self.facts.directory))


def processor_configs(folder: Path) -> ProcessorConfigs:
    """What a model's folder says of its processors. Raises ConfigError where a file is no JSON."""
    names = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    config, image, video = (_object(folder / name) for name in names)
    inner = _object(folder / "processor_config.json")  # Transformers 5 writes all processors into this one
    return ProcessorConfigs(config, image or _part(inner, "image"), video or _part(inner, "video"), {})


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="MODEL") from error
    return content if isinstance(content, dict) else {}


def _part(processor: dict[str, Any], kind: str) -> dict[str, Any]:
    part = processor.get(f"{kind}_processor")
    return part if isinstance(part, dict) else {}
