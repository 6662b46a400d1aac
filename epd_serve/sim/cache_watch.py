"""What a simulated stage says of its prefix cache: as a real one does, of its scheduler's blocks and its prompts."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Keys

from epd_serve.cache_ledger import HASH_BYTES, CacheLedger
from epd_serve.sim.choice import Choice
from epd_serve.sim.prefix_cache import block_keys
from epd_serve.sim.prompts import Prompt
from epd_serve.sim.request_params import RequestParams
from epd_serve.sim.scheduler import Scheduler
from epd_serve.sim.sequence import Sequence
from epd_serve.wire import PROMPT_XARG, CacheReport
from epd_serve.wiring import StageWiring


class CacheWatch:
    """One per stage, in its event loop."""

    def __init__(self, wiring: StageWiring, scheduler: Scheduler) -> None:
        self._block_tokens = scheduler.capacity.block_tokens
        self._ledger = CacheLedger(wiring.instance, wiring.incarnation, self._block_tokens)
        scheduler.pool.changed = self._ledger.is_now

    def follow(
        self, sequence: Sequence, params: RequestParams, prompt: Prompt, choice: Choice, *, prefills: bool
    ) -> None:
        """Have the blocks of a new sequence found by others, and its prompt known. `prefills`: it is prefilled here."""
        salt = str(params.body.get("cache_salt") or "")
        begun = len(prompt.given)
        of_prompt = block_keys(prompt, self._block_tokens, salt=salt, answer=choice.text(begun))

        def keys(generated: int) -> Keys[int]:
            if generated < self._block_tokens and prompt.tokens % self._block_tokens + generated < self._block_tokens:
                return of_prompt
            return block_keys(prompt, self._block_tokens, salt=salt, answer=choice.text(begun + generated))

        sequence.keys = keys
        nodes = _nodes(params) if len(params.prompts) == 1 else b""
        if not nodes:
            return
        if prefills:
            self._ledger.prompt(nodes, of_prompt)
        told = sequence.on_token

        def token(number: int, last: bool) -> None:
            if last and number > 1:  # of its last token there is no KV
                full = (prompt.tokens + number - 1) // self._block_tokens
                self._ledger.prompt(nodes[-HASH_BYTES:], keys(number)[:full], grown=True)
            told(number, last)

        sequence.on_token = token

    def reports(self, *, asked: bool) -> list[CacheReport]:
        """What there is to tell; `asked`: somebody wants to hear all."""
        if asked:
            self._ledger.tell_whole()
        return self._ledger.take()


def _nodes(params: RequestParams) -> bytes:
    return base64.b64decode(str(params.xargs.get(PROMPT_XARG, "")))
