"""A vLLM plugin for tests: each stage notes when it decodes an image and when it transforms one for its model."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from epd_serve.engine.argv import WIRING_ENV

NOTES_ENV = "EPD_TEST_COUNTED_MEDIA"


def counted(notes: Path, since: int = 0) -> Counter[str]:
    """How often what was done, by the stage that did: `E0 decode`, `E0 transform`. `since`: bytes that do not count."""
    return Counter(notes.read_text()[since:].splitlines()) if notes.exists() else Counter()


def register() -> None:
    """vLLM calls it in every process."""
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.processing.context import InputProcessingContext

    if hasattr(ImageMediaIO, "epd_test"):
        return
    ImageMediaIO.epd_test = True  # type: ignore[attr-defined]
    decode: Callable[..., Any] = ImageMediaIO.load_bytes
    transform: Callable[..., Any] = InputProcessingContext.call_hf_processor

    def load_bytes(self: Any, data: bytes) -> Any:
        _note("decode", 1)
        return decode(self, data)

    def call_hf_processor(self: Any, hf_processor: Any, data: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        _note("transform", len(data.get("images") or ()))
        return transform(self, hf_processor, data, *args, **more)

    ImageMediaIO.load_bytes = load_bytes  # type: ignore[method-assign]
    InputProcessingContext.call_hf_processor = call_hf_processor  # type: ignore[method-assign, assignment]


def _note(what: str, times: int) -> None:
    line = f"{json.loads(os.environ[WIRING_ENV])['instance']} {what}\n"
    with open(os.environ[NOTES_ENV], "a") as notes:
        notes.write(line * times)
