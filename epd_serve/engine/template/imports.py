"""What the processes of a stage import, and the proof that importing it has left nothing that a fork would lose."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from pathlib import Path

from PIL import Image

from epd_serve.engine import compat
from epd_serve.engine.stage_main import SERVER
from epd_serve.engine.template.context import RootContext

logger = logging.getLogger(__name__)

_LATE = (
    *("uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto", "uvicorn.lifespan.on", "uvicorn.loops.auto"),
    *("zmq.utils.garbage", "multiprocessing.resource_tracker"),
)
_OURS = (
    "epd_serve.engine.stage_main",
    "epd_serve.engine.stage_guard",
    "epd_serve.engine.plugin",
    "epd_serve.engine.status.scheduler",
    "epd_serve.engine.ec.connector",
    "epd_serve.engine.kv.connector",
)


class NotATemplateError(RuntimeError):
    """Processes that are forked from this one might not work."""


def import_stage(model: str) -> None:
    """Import API server, EngineCore, worker, our connectors, the model's class and its processor, and have vLLM make
    its processes by way of the stage's root.

    Raises:
        NotATemplateError: a thread runs, or a device has been touched.
    """
    gc.disable()  # what is imported stays
    for name in (*compat.stage_modules(), *_OURS, *_LATE):
        importlib.import_module(name)
    compat.import_routers()
    try:
        compat.import_model(model)
    except Exception as error:  # noqa: BLE001 - it may need flags that only its stages have (--trust-remote-code)
        logger.warning("each stage imports its model's code itself: %s", error)
    Image.init()  # the formats
    compat.spawn_in(RootContext())
    check_forkable()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, what all share
    gc.enable()
    sys.modules.pop(SERVER)  # the API server runs it as its program


def check_forkable() -> None:
    """Hold this process against what does not survive a fork.

    Raises:
        NotATemplateError: a thread runs, or a device has been touched.
    """
    tasks = Path("/proc/self/task")
    if len(names := [(tasks / one / "comm").read_text().strip() for one in os.listdir(tasks)]) > 1:
        raise NotATemplateError(f"importing has started threads, which a fork would lose: {', '.join(names)}")
    if device := compat.initialised_device():
        raise NotATemplateError(f"importing has initialised {device}, which a fork cannot use")
