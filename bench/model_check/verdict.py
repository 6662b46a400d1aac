"""Two servers' answers to one question, and what they say of each other. Pure.

Greedy answers of two servers that compute the same differ where rounding decides: batches of other shapes round
otherwise in bfloat16. So a difference at a token whose two best are nearly equal at plain vLLM says nothing, and one at
a clear token says that something was computed from other features, other KV or another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

NEAR = 0.5
"""Of the logarithms of two probabilities: less is rounding's to decide. bfloat16 has three digits of a logit of 30."""
REFUSED = range(400, 500)


class Verdict(StrEnum):
    """EQUAL: token for token. NEAR_TIE: until a token that rounding decides. NOT_TAKEN: refused by both, so no modality
    of this model. DIFFERENT, FAILED, REFUSED (by ours alone): to be explained. NOT_ASKED: see the reason."""

    EQUAL = "equal"
    NEAR_TIE = "equal until a near tie"
    NOT_TAKEN = "refused by both"
    REFUSED = "refused by EPD-Serve alone"
    DIFFERENT = "different"
    FAILED = "failed"
    NOT_ASKED = "not asked"

    @property
    def good(self) -> bool:
        return self in (Verdict.EQUAL, Verdict.NEAR_TIE, Verdict.NOT_TAKEN, Verdict.NOT_ASKED)


class Answer(NamedTuple):
    """What a server said to a question.

    Attributes:
        status: of HTTP; 0 where none came. error: what it said instead of an answer, else "".
        tokens: ids, as the server gives them, or the pieces of text. text: of the whole answer.
        margins: per token, by how much the logarithm of its probability is above the second's; empty where unknown.
        prompt_tokens: as the server counts them.
    """

    status: int
    error: str = ""
    tokens: Sequence[int] = ()
    text: str = ""
    margins: Sequence[float] = ()
    prompt_tokens: int = 0


def read_answer(status: int, content: Mapping[str, Any]) -> Answer:
    """The answer in a whole response of /v1/chat/completions, asked with `logprobs` and `return_token_ids`."""
    if status != 200:
        error = content.get("error")
        return Answer(status, str(error.get("message") if isinstance(error, Mapping) else error or content)[:500])
    choice = content["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    tops = [sorted((one["logprob"] for one in entry["top_logprobs"]), reverse=True) for entry in entries]
    return Answer(
        status,
        tokens=tuple(choice.get("token_ids") or ()),
        text=str(choice["message"].get("content") or ""),
        margins=tuple(round(top[0] - top[1], 3) if len(top) > 1 else 0.0 for top in tops),
        prompt_tokens=int((content.get("usage") or {}).get("prompt_tokens") or 0),
    )


def judge(ours: Answer, plain: Answer) -> tuple[Verdict, str]:
    """A verdict and its reason, "" where none is needed."""
    if ours.status in REFUSED and plain.status in REFUSED:
        return Verdict.NOT_TAKEN, plain.error
    if plain.status != 200:
        return Verdict.FAILED, f"plain vLLM: {plain.status or ''} {plain.error}"
    if ours.status in REFUSED:
        return Verdict.REFUSED, ours.error
    if ours.status != 200:
        return Verdict.FAILED, f"EPD-Serve: {ours.status or ''} {ours.error}"
    if ours.prompt_tokens != plain.prompt_tokens:
        return Verdict.DIFFERENT, f"prompts of {ours.prompt_tokens} and {plain.prompt_tokens} tokens"
    if not (ours.tokens and plain.tokens):
        return (Verdict.EQUAL, "texts alone: no token ids") if ours.text == plain.text else (Verdict.DIFFERENT, "texts")
    if [*ours.tokens] == [*plain.tokens]:  # a file gives lists
        return Verdict.EQUAL, ""
    pairs = zip(ours.tokens, plain.tokens, strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(ours.tokens), len(plain.tokens)))
    margin = plain.margins[at] if at < len(plain.margins) else None
    if margin is None:
        return Verdict.DIFFERENT, f"from token {at} on"
    near = margin < NEAR
    why = f"token {at}: plain vLLM's best is {margin:.2f} above its second"
    return (Verdict.NEAR_TIE if near else Verdict.DIFFERENT), why
