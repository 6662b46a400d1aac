"""`--stage-args 'P:--max-num-seqs 8'`: the operator's vLLM flags, by role, by instance id, or for all.

Refused among them are vllm-ascend's own schedulers. Each takes the place of the one that we name with
`--scheduler-cls`, or of the `schedule` that it extends: nobody reports the load, and none of them asks the EC connector
whether a request's features are there. Source: vllm-ascend 0.23, `ascend_config.py` (the keys), `platform.py` (who
wins), `core/` and `patch/platform/patch_balance_schedule.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.answer_flags import answer_flags
from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan
from epd_serve.stage_flags import WITHOUT_ENCODER
from epd_serve.suggestions import unknown

OURS = (
    *("--host", "--port", "--model", "--ec-transfer-config", "--kv-transfer-config"),
    "--scheduler-cls",
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
)
"""Flags the launcher decides: another value would cut the stage off from the rest, or want devices it does not get."""

SCHEDULERS = {
    "recompute_scheduler_enable": "recompute scheduler",
    "SLO_limits_for_dynamic_batch": "dynamic batch scheduler",
    "profiling_chunk_config.enabled": "profiling chunk scheduler",
    "enable_balance_scheduling": "balance scheduler",
}
"""Key of `--additional-config` → what it starts. A dot leads into a mapping."""

SCHEDULER_VARIABLES = {"VLLM_ASCEND_BALANCE_SCHEDULING": "balance scheduler"}
"""Environment variables that do the same."""

_OFF = ("", "0", "false", "none", "null", "-1")


def flag_of(word: str) -> str:
    """The flag that vLLM takes this word for: underscores are dashes to it, `--flag.key` sets a part of `--flag`."""
    name = word.split("=")[0]
    return name.split(".")[0].replace("_", "-") if name.startswith("--") else name


def schedulers_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, scheduler) of all that these vLLM flags switch on. JSON that cannot be read is left to vLLM to refuse."""
    for word, following in itertools.pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if flag_of(name) == "--additional-config":
            config = _nested(name, value if equals or following.startswith("--") else following)
            yield from ((key, what) for key, what in SCHEDULERS.items() if _is_on(config, key))


def schedulers_of(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, scheduler) of all that this environment switches on."""
    return (one for one in SCHEDULER_VARIABLES.items() if _is_on(environment, one[0]))


def _nested(flag: str, text: str) -> Any:
    """`--flag.a.b` and `1` as {a: {b: 1}}, what they mean to vLLM. A flag without a value is on."""
    made: Any = text or "true"
    with contextlib.suppress(ValueError):  # else a plain string
        made = json.loads(made)
    for key in reversed(flag.split(".")[1:]):
        made = {key: made}
    return made


def _is_on(config: Any, key: str) -> bool:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return str(config).strip().lower() not in _OFF


@dataclass(frozen=True)
class StageArgs:
    """Parsed entries: (target, flags) in the order given. `encoder_free`: who takes features loads no encoder."""

    entries: tuple[tuple[str, tuple[str, ...]], ...]
    encoder_free: bool = False

    def of(self, plan: InstancePlan) -> tuple[str, ...]:
        """Flags of one instance: for all first, then its role's, then its own; the last one wins in vLLM."""
        targets = ("all", plan.role.value, plan.id)
        ours = (WITHOUT_ENCODER,) if self.encoder_free and plan.role.takes_features else ()
        own = tuple(flag for target in targets for name, flags in self.entries if name == target for flag in flags)
        return (*ours, *own)


def parse_stage_args(raw: Iterable[str], plans: Iterable[InstancePlan], *, encoder_free: bool = False) -> StageArgs:
    """Parse entries of the form `TARGET:FLAGS`.

    Raises:
        ConfigError: no target, a target that is not in the layout, unbalanced quotes, or a flag of ours.
    """
    plans = tuple(plans)
    targets = {"all", *(plan.role.value for plan in plans), *(plan.id for plan in plans)}
    return StageArgs(tuple(_entry(text, targets) for text in raw), encoder_free)


def check_alike(plans: Sequence[InstancePlan], stage_args: StageArgs) -> None:
    """Raises ConfigError where instances that take each other's part have flags of their own."""
    for plan in plans[1:]:
        if stage_args.of(plan) != stage_args.of(plans[0]):
            raise ConfigError(
                f"--switchable: {plans[0].id} and {plan.id} are to take each other's part and have different flags; "
                "give P and D the same --stage-args",
                param="stage_args",
            )


def waits_for_decode(plans: Sequence[InstancePlan], stage_args: StageArgs) -> str:
    """Why no stream can begin with a prefill instance's token, or ""."""
    senders = [answer_flags(stage_args.of(plan)) for plan in plans if plan.sends_kv]
    takers = [answer_flags(stage_args.of(plan)) for plan in plans if plan.takes_kv]
    if not senders or any(flags is not None and flags in takers for flags in senders):
        return ""
    return (
        "streams wait for decode's first token: prefill and decode instances differ in flags that may shape an answer, "
        "or have --speculative-config or --logits-processors"
    )


def _entry(text: str, targets: set[str]) -> tuple[str, tuple[str, ...]]:
    target, colon, flags = text.partition(":")
    target = target.strip()
    if not colon or target.startswith("-"):
        raise ConfigError(f"stage_args {text!r} has no target; write 'P:{text}' or 'all:{text}'", param="--stage-args")
    if target not in targets:
        raise ConfigError(f"stage_args {text!r}: {unknown('role or instance', target, targets)}", param="--stage-args")
    try:
        words = tuple(shlex.split(flags))
    except ValueError as error:
        raise ConfigError(f"stage_args {text!r}: {error}", param="--stage-args") from error
    for word in words:
        if flag_of(word) in OURS:
            raise ConfigError(f"stage_args {text!r}: {word} is set by the launcher; remove it", param="--stage-args")
    for key, what in schedulers_in(words):
        raise ConfigError(
            f"stage_args {text!r}: {key} starts vllm-ascend's {what} in place of ours, which reports the load and "
            f"waits for features; remove {key} from --additional-config",
            param="--stage-args",
        )
    return target, words
