"""What one stage must have of each of its devices: weights, activations, runtime, the least KV cache. Pure.

Puts together what the files say (`model_weights`, `model_sizes`, `largest_items`), what the flags say (`stage_flags`)
and what vLLM makes of them: which parts a role loads, and which passes it runs. Every instance with a language model
loads the encoders too, P and D behind an encode-only instance as well: they are what a lost feature is recomputed with.
Only `--language-model-only` (`--encoder-free`), or limits of zero for all that an encoder takes, leave them out. An
encoder-free stage gets features all the same, and vLLM's cache for them holds the largest item of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from epd_serve.activation_peak import feature_cache, feature_slab, language_peak, tower_peak
from epd_serve.kv.slices import LARGEST_PROBE_BYTES, SLICE_BYTES
from epd_serve.largest_items import LargestItem, ProcessorConfigs, largest_items
from epd_serve.memory_shares import Need
from epd_serve.model_sizes import ModelSizes
from epd_serve.model_weights import ModelWeights
from epd_serve.roles import Role
from epd_serve.stage_flags import StageFlags

MIB = 1 << 20

CONTEXT_BYTES = {"npu": 1024 * MIB, "cuda": 768 * MIB}
"""Of a process that has opened a device: context, kernels, workspaces. An assumption, not measured here: `npu-smi info`
or `nvidia-smi` beside an idle stage show the true one."""

GRAPH_BYTES = 512 * MIB
"""Captured graphs of an instance that is not eager. An assumption; vLLM's log says "Graph capturing finished"."""

COMMUNICATOR_BYTES = 2 * 200 * MIB
"""2 x HCCL_BUFFSIZE, whose default is 200 MB (hiascend.com, CANN 8.0, environment variables); NCCL takes no more."""
COMMUNICATORS = 2  # of a tensor-parallel instance: the world's and the group's

TRANSFER_BYTES = SLICE_BYTES + LARGEST_PROBE_BYTES + 2 * (2 * MIB)
"""What KV passes through in a worker that sends or takes it, and what probes write to, however many links there are;
each starts at a multiple of 2 MiB. A layer whose blocks are larger than a slice takes the difference on top, unplanned:
none of the models that we know has one."""

HOST_SERVER_BYTES = 1000 * MIB
HOST_WORKER_BYTES = 560 * MIB
"""vLLM 0.32 on CPU, proportional set sizes of a served demo stage (0.47 GB API server, 0.47 GB EngineCore, 1.6 GB
worker with 1.07 GB of KV cache in it), rounded up."""


@dataclass(frozen=True)
class Model:
    """What is known of the model's memory."""

    weights: ModelWeights
    sizes: ModelSizes
    processors: ProcessorConfigs


@dataclass(frozen=True)
class Place:
    """Where the instance runs.

    Attributes:
        device: `npu`, `cuda` or `cpu`. tp: ranks.
        queue_bytes: of device memory that an encoder's features may keep on their way into the store.
        cpu_kv_bytes: KV cache of a rank on CPU where no flag says how much.
        slab_bytes: of the slab for features that each rank takes; 0: the usual size, None: none is taken.
    """

    device: str
    tp: int
    queue_bytes: int = 0
    cpu_kv_bytes: int = 0
    slab_bytes: int | None = None


def stage_need(
    name: str, role: Role, model: Model, flags: StageFlags, place: Place, modalities: Collection[str] | None
) -> Need | None:
    """Bytes per device (on CPU: of all ranks together); None where the configs do not tell the encoder's peak.

    Args:
        modalities: that the stage takes, or whose features it does; None where that is unknown.
    """
    language = model.sizes.language
    length = flags.max_model_len or language.max_positions or flags.max_num_batched_tokens
    sees = not flags.language_only and modalities != frozenset()
    fed = role.takes_features and modalities != frozenset()
    known = largest_items(model.sizes, model.processors, modalities, length) if sees or fed else ()
    if known is None and sees:
        return None
    items = known or ()
    split = place.tp if flags.split_towers else 1
    weights = model.weights.tower // split if sees or role is Role.E else 0
    activations, cached = _encoding(model.sizes, items, flags, split)
    slab = 0 if place.slab_bytes is None else place.slab_bytes or feature_slab(cached)
    if not sees:
        activations = 0
    kv_token = kv_least = longest = 0
    if role is Role.E:
        # Nobody profiles it: room for the longest clip is wished for, room for the largest picture is a must.
        short = tuple(item for item in items if item.modality != "video") or items
        least, least_cached = _encoding(model.sizes, short, flags, split)
        # Beyond vLLM's cache: features of one step are taken into an empty queue however large they are.
        queued, least_queued = (max(place.queue_bytes, features) for features in (cached, least_cached))
        longest = activations + cached + queued - least - least_cached - least_queued
        activations, cached = least + least_queued, least_cached
    if role.has_language_model:
        weights += model.weights.language // place.tp
        decoding = language_peak(
            language,
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            tp=place.tp,
            element_bytes=flags.element_bytes,
        )
        activations = max(activations, decoding)
        kv_token = language.kv_token_bytes(place.tp, flags.kv_element_bytes)
        kv_least = 0 if flags.fitted_len else kv_token * length
    ranks = place.tp if place.device == "cpu" else 1
    return Need(
        name,
        role,
        weights=weights * ranks,
        activations=(activations + cached + slab) * ranks,
        runtime=_runtime(role, flags, place),
        longest=longest * ranks,
        kv_token=kv_token * ranks,
        kv_least=kv_least * ranks,
        fixed_share=flags.utilization,
        fixed_kv=_fixed_kv(role, flags, place),
    )


def _encoding(sizes: ModelSizes, items: tuple[LargestItem, ...], flags: StageFlags, split: int) -> tuple[int, int]:
    """The peak of the encoders, and their features in vLLM's cache.

    A step encodes what `--max-num-batched-tokens` has room for, and one item however large it is
    (`compute_mm_encoder_budget`); the cache is as large as that.
    """
    peak = cached = 0
    for item in items:
        tower = sizes.towers[item.tower]
        count = max(1, flags.max_num_batched_tokens // max(1, item.tokens))
        tokens = max(flags.max_num_batched_tokens, item.tokens)
        elements = flags.element_bytes
        peak = max(peak, tower_peak(tower, count * item.patches, tp=split, element_bytes=elements))
        cached = max(cached, feature_cache(tower, tokens, element_bytes=elements))
    return peak, cached


def _runtime(role: Role, flags: StageFlags, place: Place) -> int:
    if place.device == "cpu":
        return HOST_SERVER_BYTES + HOST_WORKER_BYTES * place.tp
    graphs = 0 if flags.eager or role is Role.E else GRAPH_BYTES
    communicators = COMMUNICATORS * COMMUNICATOR_BYTES if place.tp > 1 else 0
    transfers = TRANSFER_BYTES if role.sends_kv or role.takes_kv else 0
    return CONTEXT_BYTES[place.device] + graphs + communicators + transfers


def _fixed_kv(role: Role, flags: StageFlags, place: Place) -> int | None:
    if not role.has_language_model:
        return None
    if place.device == "cpu":
        return (place.cpu_kv_bytes if flags.kv_bytes is None else flags.kv_bytes) * place.tp
    return flags.kv_bytes
