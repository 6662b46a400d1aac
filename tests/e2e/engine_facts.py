"""What the vLLM that is installed can do and an older one cannot, as far as a test's expectations depend on it.

Known from its files, without importing it. What our connectors go by is `epd_serve.engine.compat`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _has(path: str) -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / path).exists()


METADATA_TRAVELS = _has("distributed/ec_transfer/ec_connector/utils.py")
"""Encoders tell an item's metadata, so that P and D need no media. 0.23 sends the media to both."""
