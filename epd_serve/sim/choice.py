"""The text of one answer, known before it is generated: what each token says and how it ends. Pure."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from epd_serve.sim.tokens import word, word_id


class Choice:
    """Answer `index` to the prompt with `seed`.

    Args:
        limit: tokens it would have. bounded: it is cut there by the client's limit. stops: texts that end it before.

    Attributes:
        tokens: that it has in fact. finish, stop: vLLM's `finish_reason` and `stop_reason`.
    """

    def __init__(self, seed: int, index: int, *, limit: int, bounded: bool, stops: Sequence[str] = ()) -> None:
        self.index = index
        self.tokens = limit
        self.finish = "length" if bounded else "stop"
        self.stop: str | None = None
        self._seed = seed + 5 * index
        self._pieces: list[str] | None = None
        if stops:
            self._cut(stops)

    def piece(self, number: int) -> str:
        """The text that token `number`, from 0 on, adds."""
        return word(self._seed, number) if self._pieces is None else self._pieces[number]

    def token_id(self, number: int) -> int:
        return word_id(self._seed, number)

    def begins_with(self, tokens: Sequence[int], *, whole: bool) -> bool:
        """Whether these are its first tokens; `whole`: they may be all."""
        fit = len(tokens) <= self.tokens - (not whole)
        return fit and all(map(operator.eq, tokens, map(self.token_id, itertools.count())))

    def text(self, tokens: int) -> str:
        """Of its first `tokens` tokens."""
        return "".join(self.piece(number) for number in range(tokens))

    def chat_logprobs(self, first: int, last: int, alternatives: int) -> dict[str, Any]:
        """For the tokens from `first` to before `last`, in the shape of the chat endpoint."""
        entries = []
        for number in range(first, last):
            entry = _chat_token(self.piece(number), -0.1)
            others = [_chat_token(word(self._seed, number + k), -0.1 - k) for k in range(alternatives)]
            entries.append({**entry, "top_logprobs": others})
        return {"content": entries}

    def completion_logprobs(self, first: int, last: int, alternatives: int) -> dict[str, Any]:
        """The same in the shape of the completions endpoint."""
        pieces = [self.piece(number) for number in range(first, last)]
        lengths = [len(piece) for piece in pieces]
        start = len(self.text(first))
        numbers = range(first, last)
        return {
            "text_offset": list(itertools.accumulate(lengths[:-1], initial=start)) if pieces else [],
            "token_logprobs": [-0.1] * len(pieces),
            "tokens": pieces,
            "top_logprobs": [
                {word(self._seed, number + k): -0.1 - k for k in range(max(1, alternatives))} for number in numbers
            ],
        }

    def _cut(self, stops: Sequence[str]) -> None:
        """End where the first stop text is complete, without it."""
        words = [word(self._seed, number) for number in range(self.tokens)]
        ends = list(itertools.accumulate(len(one) for one in words))
        text = "".join(words)
        matches = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
        if not matches:
            return
        complete, kept, stop = min(matches)
        self.tokens = next(count for count, end in enumerate(ends, 1) if end >= complete)
        self.finish, self.stop = "stop", stop
        starts = [0, *ends]
        self._pieces = [text[min(starts[at], kept) : min(starts[at + 1], kept)] for at in range(self.tokens)]


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
