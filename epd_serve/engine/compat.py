"""What differs between vLLM versions and platforms, looked up in one place. Nothing else here checks a version."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from epd_serve.engine.encoder_free import without_encoder
from epd_serve.errors import ConfigError
from epd_serve.model_sizes import model_sizes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

ItemMetadata = dict[str, dict[str, Any]]

logger = logging.getLogger(__name__)


_STAGE_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
)
_WORKER_MODULES = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def stage_modules() -> tuple[str, ...]:
    """What API server, EngineCore and worker of a stage import, in the order in which they do."""
    worker = _WORKER_MODULES.get(device_kind())
    return (*_STAGE_MODULES, worker) if worker else _STAGE_MODULES


def import_routers() -> None:
    """Import what the API server imports when it makes its application: a router of each part, as far as it can."""
    package = "vllm.entrypoints"
    folders = [str(_package_folder(package))]
    for module in pkgutil.walk_packages(folders, f"{package}.", onerror=lambda name: None):
        if module.name.endswith(".api_router"):
            with contextlib.suppress(ImportError):  # of a package that is not there
                importlib.import_module(module.name)


def import_model(model: str) -> None:
    """Import the model's class, and what its configuration, tokenizer and processor need.

    vLLM loads its plugins on the way. It is made to forget that: they have to be loaded in each process of a stage.
    """
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.processor import cached_processor_from_config

    try:
        config = EngineArgs(model=model).create_model_config()
        ModelRegistry.resolve_model_cls(config.architectures, config)
        get_quantization_config("fp8")  # whichever is asked for, all are imported
        if config.is_multimodal_model:
            cached_processor_from_config(config)
    finally:
        vllm.plugins.plugins_loaded = False


def initialised_device() -> str:
    """Which accelerator this process has initialised, "" for none."""
    import torch

    npu = getattr(torch, "npu", None)
    if torch.cuda.is_initialized():
        return "CUDA"
    return "an NPU" if npu is not None and npu.is_initialized() else ""


def worker_libraries(env: Mapping[str, str]) -> dict[str, str]:
    """What vLLM's CPU platform adds to the environment between import and start of a worker, as far as it is read by
    then where that worker is forked (`CpuPlatform.check_and_update_config`). Imports neither vLLM nor torch."""
    preload = env.get("LD_PRELOAD", "")
    torch_folder, vllm_folder = (_package_folder(name) for name in ("torch", "vllm"))
    if not any(name in preload for name in ("libomp", "libgomp", "libiomp")):
        openmp = _first_file((torch_folder.parent / "torch.libs", torch_folder / "lib"), ("libgomp*.so*",))
        preload = ":".join(filter(None, (preload, openmp)))
    if "libtcmalloc" not in preload:
        malloc = _first_file((vllm_folder / "libs",), ("libtcmalloc_minimal*.so*", "libtcmalloc.so*"))
        preload = ":".join(filter(None, (malloc, preload)))
    return {"LD_PRELOAD": preload, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}


def _package_folder(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"{name} is not installed"
    return Path(spec.submodule_search_locations[0])


def _first_file(folders: Iterable[Path], patterns: Iterable[str]) -> str:
    found = (str(path) for folder in folders for pattern in patterns for path in folder.glob(pattern))
    return next(found, "")


def spawn_in(context: BaseContext) -> None:
    """Have vLLM make its processes in this multiprocessing context, whatever it would choose; they are no children of
    the API server, so what it lets its children have is given to all: many open files.

    vLLM's modules import `get_mp_context` by name, so all that are imported by now get another one. The original is
    called all the same: it sets variables that processes inherit.
    """
    from vllm.utils import system_utils

    system_utils.set_ulimit()
    theirs = system_utils.get_mp_context

    def get_mp_context() -> BaseContext:
        theirs()
        return context

    for module in list(sys.modules.values()):
        if getattr(module, "get_mp_context", None) is theirs:
            setattr(module, "get_mp_context", get_mp_context)  # noqa: B010 - of a module that mypy does not know


def worker_in_engine(vllm_config: VllmConfig) -> bool:
    """Whether the stage's only worker runs in EngineCore's process."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return issubclass(Executor.get_class(vllm_config), UniProcExecutor)


def tp_rank() -> int:
    """Tensor-parallel rank of this worker."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def total_kv_heads(vllm_config: VllmConfig) -> int:
    """KV heads of the model, over all ranks; 0 for a cache without heads (MLA)."""
    model = vllm_config.model_config
    return 0 if model.use_mla else int(model.get_total_num_kv_heads())


def kv_cache_layout(vllm_config: VllmConfig) -> str:
    """vLLM's name for the order of axes in the KV cache (`LBHNC`), or "" where it has none for this very cache.

    0.23 has one for CUDA's backends, and says it of all others, too.
    """
    return getattr(vllm_config.cache_config, "kv_cache_layout", None) or ""


def kv_dtype(vllm_config: VllmConfig, stored: torch.dtype) -> str:
    """What a number in the KV cache is: `torch.bfloat16`, or `torch.uint8 as fp8_e5m2`, which the bytes do not tell."""
    if stored.itemsize > 1:
        return str(stored)
    meant = str(vllm_config.cache_config.cache_dtype)
    return f"{stored} as {'fp8_e4m3' if meant == 'fp8' else meant}"  # two names of one


def device_kind() -> str:
    """`npu`, `cuda` or `cpu`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def platform_fingerprint() -> str:
    """What decides how KV bytes are laid out beyond shapes: vLLM's version, the device type, the CPU's ISA."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = current_platform.device_type
    isa = torch.backends.cpu.get_cpu_capability() if device == "cpu" else current_platform.get_device_name()
    return f"vllm {vllm.__version__}, {device}, {isa}"


@dataclass(frozen=True)
class Release:
    """What a release of vLLM does that none of its interfaces says, as it was read in its wheel.

    Attributes:
        keeps_blocks_in_flight: blocks of a finished request are given to nobody while a step that may still write to
            them runs (`Scheduler.defer_block_free`).
        tells_finished_requests: the scheduler calls the EC connector's `request_finished`; 0.23 defines it and never
            calls it.
        names_items_by_request: with neither processed items nor prefixes cached, items are named by request, whatever
            name they came with.
        takes_items_as_metadata: an item may come without its pixels (`collect_ec_item_metadata`).
    """

    keeps_blocks_in_flight: bool
    tells_finished_requests: bool
    names_items_by_request: bool
    takes_items_as_metadata: bool


RELEASES = {
    (0, 23): Release(False, False, True, False),
    (0, 26): Release(True, True, True, False),
    (0, 28): Release(True, True, True, False),
    (0, 32): Release(True, True, False, True),
}
"""The wheels that `tests/contract` reads, too. KV in blocks of others and lost features depend on what stands here."""


@functools.cache
def release() -> Release:
    """Returns what the installed vLLM does. The scheduler's code is asked, too, through all its base classes, since
    vllm-ascend puts classes of its own in front of vLLM's.

    A release that was not read counts as the last one read before it, and as doing only what its code confirms.

    Raises:
        ConfigError: the code of a release that was read says otherwise: it was patched, or is not that release.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    facts = RELEASES[max((one for one in RELEASES if one <= version), default=min(RELEASES))]
    seen = {
        "keeps_blocks_in_flight": _has_method_naming(Scheduler, "defer_block_free"),
        "tells_finished_requests": _has_method_naming(Scheduler, "ec_connector", "request_finished"),
        "takes_items_as_metadata": _item_collector() is not None,
    }
    if version not in RELEASES:
        facts = replace(facts, **{name: getattr(facts, name) and is_so for name, is_so in seen.items()})
        logger.warning("vLLM %s was not read; what is assumed of it: %s", vllm.__version__, facts)
    elif odd := sorted(name for name, is_so in seen.items() if getattr(facts, name) is not is_so):
        raise ConfigError(
            f"vLLM {vllm.__version__} is not as it was released ({', '.join(odd)}): KV or features could be "
            "lost without a word; install the release, or one of another version"
        )
    return facts


def _has_method_naming(cls: type, *names: str) -> bool:
    """Whether one method of the class, or of a base class, uses all these names; comments do not count."""
    methods = (inspect.unwrap(one) for base in cls.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return any(set(names) <= _names_in(method.__code__) for method in methods)


def _names_in(code: CodeType) -> set[str]:
    """With those of functions and comprehensions inside."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def steps_in_flight_at_reuse(vllm_config: VllmConfig) -> int:
    """How many steps may still write to KV blocks when a consumer's scheduler gives them to the next request.

    With batches in flight (async scheduling, pipeline parallelism) a step that is running writes the KV of requests
    that have just finished. Their blocks' next owner computes after it on the same stream; P's packets know no stream.
    """
    return 0 if release().keeps_blocks_in_flight else int(vllm_config.max_concurrent_batches) - 1


def schedule_as_vllm_does(scheduler: Any) -> None:
    """See to it that vLLM's own `schedule` runs where vllm-ascend 0.23 has put a copy of it in front.

    `patch_balance_schedule.BalanceScheduler` takes the place of `Scheduler`, and its copy runs for every instance that
    sends KV (`_disable_preemption`) or with balance scheduling on. It never asks `ensure_cache_available`: P would not
    wait for its features, and a request that came as metadata alone would fail. Preemption of P is provided for here.

    Raises:
        ConfigError: balance scheduling is on.
    """
    if getattr(scheduler, "_balance_enabled", False):
        raise ConfigError(
            "vllm-ascend's balance scheduling is on: features would not be waited for; unset "
            "VLLM_ASCEND_BALANCE_SCHEDULING, and remove enable_balance_scheduling from --additional-config"
        )
    if getattr(scheduler, "_disable_preemption", False):
        scheduler._disable_preemption = False
        logger.info("vLLM's own schedule() runs, not vllm-ascend's copy of it, which does not wait for features")


def cuts_before_items() -> bool:
    """Whether vLLM's scheduler asks one method, whose first arguments are these, how many tokens of a request it can
    compute in a step before an item that has to wait, and asks the EC connector before it lets a request in."""
    from vllm.v1.core.sched.scheduler import Scheduler

    method = getattr(Scheduler, "_try_schedule_encoder_inputs", None)
    expected = ["self", "request", "num_computed_tokens", "num_new_tokens"]
    if method is None or list(inspect.signature(method).parameters)[: len(expected)] != expected:
        return False
    return _has_method_naming(Scheduler, "_try_schedule_encoder_inputs", "ensure_cache_available")


def media_connectors() -> tuple[Any, type]:
    """vLLM's registry of what loads media, and the class that it takes by default."""
    from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    return MEDIA_CONNECTOR_REGISTRY, MediaConnector


def encoder_cache_bytes(worker: Any) -> int:
    """Device memory of the features that vLLM keeps at one time on this worker, whose model is loaded."""
    config = worker.vllm_config
    budget = getattr(worker.model_runner, "mm_budget", None)  # which the second model runner keeps elsewhere
    tokens = max(config.scheduler_config.encoder_cache_size, getattr(budget, "encoder_cache_size", 0))
    sizes = model_sizes(config.model_config.hf_config.to_dict())
    widths = [tower.feature_width for tower in sizes.towers.values()] if sizes is not None else []
    return tokens * max(widths, default=config.model_config.get_hidden_size()) * config.model_config.dtype.itemsize


def counts_as_loaded(worker: Any, nbytes: int) -> None:
    """Have vLLM leave so much less for KV: 0.23 subtracts what loading the model took, later ones all that is taken. On
    CPU the cache is as large as it is told."""
    if hasattr(worker.model_runner, "model_memory_usage"):
        worker.model_runner.model_memory_usage += nbytes


def can_fail_requests() -> bool:
    """Whether vLLM asks the EC connector which requests it has to fail (else a lost feature is recomputed)."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    return hasattr(ECConnectorBase, "take_unavailable_requests")


def hands_over_encoder_cache() -> bool:
    """Whether vLLM gives a producer its encoder cache at every step (else it is known from the first item on)."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    return hasattr(ECConnectorBase, "start_save_caches")


def check_item_names(vllm_config: VllmConfig) -> None:
    """Refuse a setting under which older releases rename items by request, so that no feature would ever be found.

    Raises:
        ConfigError: neither processed items nor prefixes are cached.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or multimodal.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching:
        return
    if release().names_items_by_request:
        flag = "--mm-processor-cache-gb"
        raise ConfigError(
            f"{flag} is 0, and prefix caching is off: this vLLM names items by request then, and features are not "
            f"found; remove {flag}",
            param=flag,
        )


def name_blocks_alike() -> None:
    """Have all stages name equal KV blocks equally. vLLM 0.23 draws what its block hashes begin with for each process;
    later ones do only for hashes that are not cryptographic. In EngineCore, where its scheduler is made."""
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
        os.environ.setdefault("PYTHONHASHSEED", "0")  # this process has begun: only block hashes read it now


def tells_finished_requests() -> bool:
    """Whether the scheduler calls the EC connector's `request_finished`."""
    return release().tells_finished_requests


def metadata_travels() -> bool:
    """Whether an item may come to P as metadata alone, its feature being stored."""
    return release().takes_items_as_metadata


def item_metadata(vllm_config: VllmConfig) -> Callable[[list[MultiModalFeatureSpec]], ItemMetadata]:
    """What a consumer needs in place of each item's media: key → `{"item_indices": […], "metadata": {…}}`.

    The metadata is empty for a modality that this vLLM or model cannot take without its media.
    """
    if not metadata_travels():
        return no_item_metadata
    collect, resolver = _item_collector(), _metadata_resolver(vllm_config)
    assert collect is not None
    return lambda features: dict(collect(features, resolver))


def _item_collector() -> Callable[..., Any] | None:
    try:
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
    except ImportError:
        return None  # older than 0.32; `release` refuses a 0.32 that has none
    collect: Callable[..., Any] = collect_ec_item_metadata
    return collect


def media_is_absent(vllm_config: VllmConfig) -> Callable[[list[MultiModalFeatureSpec]], bool]:
    """Whether some item came as metadata only, or no encoder is here: encoding it would end the engine, whatever the
    proxy asked for."""
    if without_encoder(vllm_config):
        return bool  # of any item
    if not metadata_travels():
        return lambda features: False
    resolver = _metadata_resolver(vllm_config)

    def absent(features: list[MultiModalFeatureSpec]) -> bool:
        return any(
            feature.data is not None and set(feature.data.get_data()) <= resolver.fields_for(feature.modality)
            for feature in features
        )

    return absent


def _metadata_resolver(vllm_config: VllmConfig) -> Any:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    resolver = PlaceholderMetadataResolver(vllm_config.model_config)
    resolver.fields_for("image")  # makes the processor now, not at the first request
    return resolver


def no_item_metadata(features: list[MultiModalFeatureSpec]) -> ItemMetadata:
    """Where metadata could not reach anybody."""
    return {}


def was_cut(request: Request) -> bool:
    """Whether a finished request ended because it had as many tokens as it may."""
    return bool(request.status.name == "FINISHED_LENGTH_CAPPED")


def was_aborted(request: Request) -> bool:
    """Whether a finished request was given up by its client, not served."""
    return bool(request.status.name == "FINISHED_ABORTED")


def spare_output_ids(vllm_config: VllmConfig) -> None:
    """Keep vLLM's first model runner from waiting in every step for the tokens of the last one, on our account alone.

    Under asynchronous scheduling it does for any logits processor from outside, as it may read them
    (`InputBatch.logitsprocs_need_output_token_ids`). Ours looks at whether there are any, which placeholders tell. To
    be called before the batch is made, as processors are.
    """
    named = vllm_config.model_config.logits_processors or ()
    if not vllm_config.scheduler_config.async_scheduling or len(named) != 1:
        return
    for name in ("vllm.v1.worker.gpu_input_batch", "vllm_ascend.worker.npu_input_batch"):
        for batch in (getattr(sys.modules.get(name), kind, None) for kind in ("InputBatch", "NPUInputBatch")):
            if batch is None:
                continue
            if "logitsprocs_need_output_token_ids" not in batch.__init__.__code__.co_names:
                logger.warning("this vLLM waits for tokens of the last step in another way; decoding may be slower")
            batch.logitsprocs_need_output_token_ids = property(lambda _: False, lambda _, __: None)


def second_logits_processor() -> type:
    """Base of logits processors for vLLM's second model runner, where this vLLM has such an interface (0.32)."""
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
    except ImportError:
        return object
    base: type = LogitsProcessor
    return base


FINISH_S = 5
"""How long a stage that is told to end goes on with what it has: less than its launcher waits for it."""


def finish_requests_at_end(arguments: Any) -> None:
    """Have a stage finish its requests at SIGTERM, unless the operator says otherwise. vLLM 0.23 aborts them.

    Args:
        arguments: vLLM's `EngineArgs`.
    """
    if getattr(arguments, "shutdown_timeout", None) == 0:
        arguments.shutdown_timeout = FINISH_S
