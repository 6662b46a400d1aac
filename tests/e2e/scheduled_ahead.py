"""A vLLM plugin for tests: CPU stages schedule a step while the one before it runs, as stages on accelerators do.

vLLM's CPU platform switches asynchronous scheduling off, so nothing of it would run before the first card: its
scheduler, the batches that EngineCore has in flight, tokens that are placeholders until their step has ended. Its model
runner has all of it; streams and events are stood in for, as a CPU has nothing to wait for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.vllm_plugin import plugin

SAID = "steps are scheduled ahead: {} batches in flight"


@contextlib.contextmanager
def scheduled_ahead(folder: Path) -> Iterator[None]:
    """Stages that are started meanwhile load the plugin; plain vLLM (`tests.e2e.serving.plain_vllm`) does not."""
    with plugin(folder, __name__):
        yield


class _Event:
    """A place in a stream that is reached when it is made."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...


def register() -> None:
    """vLLM calls it in every process."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner

    real = CpuPlatform.check_and_update_config
    if hasattr(real, "epd_test"):
        return

    def check_and_update_config(vllm_config: Any) -> None:
        real(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        print(SAID.format(vllm_config.max_concurrent_batches), file=sys.stderr, flush=True)

    check_and_update_config.epd_test = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[method-assign, assignment]
    # The runner is made with stand-ins of its own, of which 0.23's stream cannot wait for another: ours stay instead.
    cpu_model_runner._torch_cuda_wrapper = contextlib.nullcontext
    torch.Event = torch.cuda.Event = _Event  # type: ignore[misc, assignment]
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
