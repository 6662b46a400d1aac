"""Which vLLM flags shape an answer: P's first token can be the first of D's answer where both have the same. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

OF_SPEED = frozenset({
    "--additional-config", "--async-scheduling", "--block-size", "--compilation-config", "--cudagraph-capture-sizes",
    "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log", "--enable-chunked-prefill",
    "--enable-expert-parallel", "--enable-log-requests", "--enable-prefix-caching", "--enforce-eager",
    "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--limit-mm-per-prompt", "--long-prefill-token-threshold",
    "--max-cudagraph-capture-size", "--max-long-partial-prefills", "--max-num-batched-tokens",
    "--max-num-partial-prefills", "--max-num-seqs", "--mm-encoder-tp-mode", "--mm-processor-cache-gb",
    "--mm-processor-cache-type", "--no-async-scheduling", "--no-enable-chunked-prefill", "--no-enable-prefix-caching",
    "--no-enforce-eager", "--num-gpu-blocks-override", "--optimization-level", "--prefix-caching-hash-algo",
    "--scheduling-policy", "--skip-mm-profiling", "--uvicorn-log-level",
})  # fmt: skip
"""Flags in which P and D may differ: how fast, how much at once, what is logged. Any other may change what a client
reads, as far as anybody here knows."""

_EXCLUDED = frozenset({"--speculative-config", "--logits-processors", "--return-sampling-mask"})
"""Flags with which vLLM takes no logits processor of ours, or another instead. With a drafter a step has more tokens
than one."""

_PARSERS = ("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice")
_SHORT = {"-q": "--quantization", "-O": "--optimization-level", "-cc": "--compilation-config"}
_FLAG = re.compile(r"--?[A-Za-z]")


def answer_flags(words: Sequence[str]) -> tuple[str, ...] | None:
    """The flags of a stage that may shape its answers, as sorted text, the same for the same meaning.

    None where the stage can have no part in an answer of two instances, whatever the other one's are.
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            flag, dot, part = name.partition(".")  # --override-generation-config.temperature 0
            values = found[_SHORT.get(flag, flag.replace("_", "-")) + dot + part] = [value] if equals else []
        else:
            values.append(word)
    bare = {name.partition(".")[0] for name in found}
    if bare & _EXCLUDED:
        return None
    return tuple(
        " ".join((name, *map(_canonical, found[name])))
        for name in sorted(found)
        if name.partition(".")[0] not in OF_SPEED
    )


def parses_chat(flags: Sequence[str]) -> bool:
    """Whether answers to chats pass through a parser, which at the end of an answer says what it has held back: P's
    answer ends at its first token, and D's does not."""
    return any(flag.startswith(_PARSERS) for flag in flags)


def _canonical(value: str) -> str:
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except ValueError:
        return value
