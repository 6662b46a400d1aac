"""`--stage-args 'P:--max-num-seqs 8'`: the operator's vLLM flags, by role, by instance id, or for all."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.options.ascend_schedulers import schedulers_in
from epd_serve.answer_flags import answer_flags
from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan
from epd_serve.suggestions import unknown

OURS = (
    *("--host", "--port", "--model", "--ec-transfer-config", "--kv-transfer-config"),
    "--scheduler-cls",
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
)
"""Flags the launcher decides: another value would cut the stage off from the rest, or want devices it does not get."""


def flag_of(word: str) -> str:
    """The flag that vLLM takes this word for: underscores are dashes to it, `--flag.key` sets a part of `--flag`."""
    name = word.split("=")[0]
    return name.split(".")[0].replace("_", "-") if name.startswith("--") else name


def refuse_other_schedulers(words: Sequence[str], where: str) -> None:
    """Refuse flags that put a scheduler of vllm-ascend in the place of ours. Raises ConfigError, with `where` first."""
    for key, what in schedulers_in(words):
        raise ConfigError(
            f"{where}: {key} starts vllm-ascend's {what} in place of ours, which reports the load and waits for "
            f"features; remove {key} from --additional-config",
            param="--stage-args",
        )


@dataclass(frozen=True)
class StageArgs:
    """Parsed entries: (target, flags) in the order given."""

    entries: tuple[tuple[str, tuple[str, ...]], ...]

    def of(self, plan: InstancePlan) -> tuple[str, ...]:
        """Flags of one instance: for all first, then its role's, then its own; the last one wins in vLLM."""
        targets = ("all", plan.role.value, plan.id)
        return tuple(flag for target in targets for name, flags in self.entries if name == target for flag in flags)


def parse_stage_args(raw: Iterable[str], plans: Iterable[InstancePlan]) -> StageArgs:
    """Parse entries of the form `TARGET:FLAGS`.

    Raises:
        ConfigError: no target, a target that is not in the layout, unbalanced quotes, or a flag of ours.
    """
    plans = tuple(plans)
    targets = {"all", *(plan.role.value for plan in plans), *(plan.id for plan in plans)}
    return StageArgs(tuple(_entry(text, targets) for text in raw))


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
    refuse_other_schedulers(words, f"stage_args {text!r}")
    return target, words
