"""What a feature of this deployment depends on besides the media: model files and vLLM flags. Part of every key.

Equal on every host that serves the same model with the same flags, so nothing of paths, dates or instance names enters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.plan.blueprint import Blueprint
    from proxy.config.settings import ModelIdentity

PROCESSING_FLAGS = frozenset(
    {
        "--mm-processor-kwargs",
        "--media-io-kwargs",
        "--video-pruning-rate",
        "--dtype",
        "--quantization",
        "--hf-overrides",
        "--hf-config-path",
        "--model-impl",
        "--revision",
        "--code-revision",
        "--tokenizer",
        "--tokenizer-revision",
    }
)
"""vLLM flags that change what an encoder takes in or puts out."""

_SHORT = {"-q": "--quantization"}


def model_identity(blueprint: Blueprint) -> ModelIdentity:
    """The identity that enters the keys of this deployment's features."""
    from proxy.config.settings import ModelIdentity

    facts = blueprint.facts
    flags = processing_digest(blueprint.stage_args.of(plan) for plan in blueprint.plans)
    revision = facts.revision if facts else ""
    return ModelIdentity(
        model=blueprint.served_model_name,
        revision=f"{revision}+{flags}" if flags else revision,
        dtype=(facts.dtype or "") if facts else "",
    )


def processing_digest(instances: Iterable[Sequence[str]]) -> str:
    """Names the processing flags of all instances together, whatever their number; "" where none has any."""
    different = sorted({json.dumps(processing_flags(words)) for words in instances})
    if different in ([], ["[]"]):
        return ""
    return hashlib.blake2b("\n".join(different).encode(), digest_size=6).hexdigest()


def processing_flags(words: Sequence[str]) -> list[list[str]]:
    """The processing flags among vLLM flags, as sorted [flag, value]; of a flag given twice the last one counts.

    `--a=1`, `--a 1` and `--a_b`, `--a-b` mean the same to vLLM, and so does the order of keys in a JSON value.
    """
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        name, dot, part = name.partition(".")  # --mm-processor-kwargs.max_pixels 5
        flag = _SHORT.get(name, name.replace("_", "-"))
        if flag not in PROCESSING_FLAGS:
            continue
        if not equals:
            value = words[at + 1] if at + 1 < len(words) else ""
        found[f"{flag}{dot}{part}"] = _canonical(value)
    return [[flag, found[flag]] for flag in sorted(found)]


def _canonical(value: str) -> str:
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except ValueError:
        return value
