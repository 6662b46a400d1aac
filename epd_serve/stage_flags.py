"""The flags of a stage that its memory depends on, read as vLLM reads them: the last one wins. Pure.

Owns their names and defaults, for the device kinds and versions that are supported. A value that vLLM would refuse is
passed over: it says so itself, in its own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30

WITHOUT_ENCODER = "--language-model-only"
"""What starts P, D and PD of an encoder-free deployment."""

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
_ONE_BYTE_CACHES = ("fp8", "int8", "uint8")


@dataclass(frozen=True)
class StageFlags:
    """What one stage's vLLM will run with.

    Attributes:
        max_model_len: tokens of a request; None: the model's own. fitted_len: vLLM fits it to the memory.
        max_num_batched_tokens, max_num_seqs: of a step.
        element_bytes: of weights and activations. kv_element_bytes: of the KV cache.
        utilization, kv_bytes: as the operator set them, or None.
        eager: no graphs are captured. split_towers: ranks divide an encoder's weights instead of its items.
        language_only: no encoder is loaded.
        processor_kwargs: of `--mm-processor-kwargs`.
    """

    max_model_len: int | None
    fitted_len: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    element_bytes: int
    kv_element_bytes: int
    utilization: float | None
    kv_bytes: int | None
    eager: bool
    split_towers: bool
    language_only: bool
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_stage_flags(argv: Sequence[str], device: str, total_bytes: int, tp: int = 1) -> StageFlags:
    """Reads the command line of a stage, our flags and the operator's.

    Args:
        total_bytes: of the device: vLLM takes larger steps on larger ones (`EngineArgs.get_batch_defaults`).
    """
    length = _last(argv, "--max-model-len")
    elements = 4 if _last(argv, "--dtype") in ("float32", "float") else 2
    cache = _last(argv, "--kv-cache-dtype") or "auto"
    batched, sequences = _batch_defaults(device, total_bytes, tp)
    batched = _size(_last(argv, "--max-num-batched-tokens")) or batched
    utilization = _last(argv, "--gpu-memory-utilization") or _last(argv, "--device-memory-utilization")
    return StageFlags(
        max_model_len=_size(length),
        fitted_len=length in ("auto", "-1"),
        max_num_batched_tokens=batched,
        max_num_seqs=min(_size(_last(argv, "--max-num-seqs")) or sequences, batched),
        element_bytes=elements,
        kv_element_bytes=1 if cache.startswith(_ONE_BYTE_CACHES) else elements,
        utilization=_fraction(utilization),
        kv_bytes=_size(_last(argv, "--kv-cache-memory-bytes")),
        eager=_has(argv, "--enforce-eager"),
        split_towers=_last(argv, "--mm-encoder-tp-mode") != "data",
        language_only=_has(argv, WITHOUT_ENCODER),
        processor_kwargs=_processor_kwargs(argv),
    )


def _batch_defaults(device: str, total_bytes: int, tp: int) -> tuple[int, int]:
    """Tokens and sequences of a step where no flag says them, of an OpenAI server."""
    if device == "cpu":
        return 2048 * tp, 128 * tp
    if total_bytes >= 160 * GIB:
        return 16384, 1024
    return (8192, 1024) if total_bytes >= 70 * GIB else (2048, 256)


def _values(argv: Sequence[str], flag: str) -> list[str]:
    """Values of a flag in order, `--flag value` and `--flag=value`; underscores are dashes to vLLM."""
    values = []
    for at, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            values.append(value if equals else argv[at + 1] if at + 1 < len(argv) else "")
    return values


def _last(argv: Sequence[str], flag: str) -> str | None:
    values = _values(argv, flag)
    return values[-1] if values else None


def _has(argv: Sequence[str], flag: str) -> bool:
    on, off = (
        [at for at, argument in enumerate(argv) if argument.replace("_", "-") == name]
        for name in (flag, f"--no-{flag[2:]}")
    )
    return bool(on) and (not off or on[-1] > off[-1])


def _size(text: str | None) -> int | None:
    """`32768`, `32k` (decimal), `32K` (binary), `1.5G`, as vLLM's `human_readable_int`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])?", text or "")
    if match is None:
        return None
    return int(float(match[1]) * _SUFFIXES[match[2]]) if match[2] else int(float(match[1]))


def _fraction(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def _processor_kwargs(argv: Sequence[str]) -> Mapping[str, Any]:
    kwargs: dict[str, Any] = {}
    for at, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        name, dot, key = name.partition(".")
        if name.replace("_", "-") != "--mm-processor-kwargs":
            continue
        value = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
        try:
            parsed = json.loads(value)
        except ValueError:
            continue
        if dot:
            kwargs = {**kwargs, key: parsed}
        elif isinstance(parsed, dict):
            kwargs = parsed
    return kwargs
