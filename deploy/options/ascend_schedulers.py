"""vllm-ascend's own schedulers, and what switches them on. Pure.

Each takes the place of the scheduler that we name with `--scheduler-cls`, or of the `schedule` that it extends: nobody
reports the load, and none of them asks the EC connector whether a request's features are there. Source: vllm-ascend
0.23, `ascend_config.py` (the keys), `platform.py` (who wins), `core/` and `patch/platform/patch_balance_schedule.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FLAG = "--additional-config"
_OFF = ("", "0", "false", "none", "null", "-1")

SCHEDULERS = {
    "recompute_scheduler_enable": "recompute scheduler",
    "SLO_limits_for_dynamic_batch": "dynamic batch scheduler",
    "profiling_chunk_config.enabled": "profiling chunk scheduler",
    "enable_balance_scheduling": "balance scheduler",
}
"""Key of `--additional-config` → what it starts. A dot leads into a mapping."""

VARIABLES = {"VLLM_ASCEND_BALANCE_SCHEDULING": "balance scheduler"}
"""Environment variables that do the same."""


def schedulers_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, scheduler) of all that these vLLM flags switch on. JSON that cannot be read is left to vLLM to refuse."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        if name.replace("_", "-") != _FLAG:
            continue
        if not equals:
            following = words[at + 1] if at + 1 < len(words) else ""
            value = "" if following.startswith("--") else following
        config = _nested(path, value) if dot else _mapping(value)
        yield from ((key, what) for key, what in SCHEDULERS.items() if _is_on(config, key))


def schedulers_of(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, scheduler) of all that this environment switches on."""
    for name, what in VARIABLES.items():
        if environment.get(name, "").strip().lower() not in _OFF:
            yield name, what


def _mapping(text: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}


def _nested(path: str, text: str) -> dict[str, Any]:
    """`a.b` and `1` as {a: {b: 1}}: what `--additional-config.a.b 1` means to vLLM. A flag without a value is on."""
    made: Any = text or "true"
    with contextlib.suppress(ValueError):  # else a plain string
        made = json.loads(made)
    for key in reversed(path.split(".")):
        made = {key: made}
    return dict(made)


def _is_on(config: Mapping[str, Any], key: str) -> bool:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return str(value).strip().lower() not in _OFF
