"""`/tokenize` and `/detokenize`: answered by any stage with a language model, since all have the same tokenizer; with
media by one that takes them.

No lease is taken, and nobody waits in the admission queues: no engine is asked, only the stage's API server, by
`MAX_CONCURRENT` requests at most. Media are loaded like everybody's, and go to the stage without a key: vLLM counts the
images of a tokenized prompt, and caches none of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from epd_serve.errors import DeadlineError, NoInstanceError, OverloadedError, StageError
from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.context import RequestContext, Services
from proxy.errors import StageFault
from proxy.routing.policy import preferred
from proxy.stages.bodies import inlined_body
from proxy.stages.poison import faulty_body
from proxy.strict_json import encoded

TIMEOUT_S = 15.0
"""How long one stage may take: the longest prompt takes its tokenizer a second or two, and another stage has one too.
"""

MAX_CONCURRENT = 64
"""Requests over all stages. Whoever comes then waits as long as for a stage."""


class TokenizeStep:
    """Asks one stage, and after a failure others."""

    def __init__(self, services: Services) -> None:
        self._table = services.table
        self._services = services
        self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self, ctx: RequestContext) -> None:
        """Answer the request through its sink.

        Raises:
            OverloadedError: too many wait. NoInstanceError. Or what the last stage that was asked did.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._places.acquire()
        except TimeoutError:
            raise OverloadedError(f"{MAX_CONCURRENT} requests to tokenizers are in progress; try again later") from None
        try:
            answer = await self._ask(ctx, inlined_body(ctx.request, ctx.items))
        finally:
            self._places.release()
        await ctx.sink.respond_json(200, answer)

    async def _ask(self, ctx: RequestContext, body: Mapping[str, Any]) -> Mapping[str, Any]:
        payload, headers = encoded(body), {"x-request-id": ctx.id}
        tried: set[IncarnationId] = set()
        failure: StageError | DeadlineError | None = None
        while len(tried) <= self._services.settings.retries:
            encodes = bool(ctx.items) and not self._services.settings.stages_encode
            roles = [role for role in Role if (role.encodes if encodes else role.has_language_model)]
            live = [one for role in roles for one in self._table.live(role)]
            untried = [one for one in live if one.incarnation_id not in tried]
            if not untried:
                if not self._table.pause.left_s:
                    break
                await self._table.changed(self._table.pause.left_s)
                continue
            instance = self._table.instance(random.choice(preferred(untried)).id)
            tried.add(instance.incarnation_id)
            try:
                return await self._services.stages.post(
                    instance, ctx.request.endpoint, payload, headers, timeout_s=TIMEOUT_S
                )
            except (StageError, DeadlineError) as error:
                failure = error
                if isinstance(error, StageFault) and ctx.faults.note(error, instance.incarnation_id):
                    raise faulty_body(error) from None
        raise failure or NoInstanceError("no live instance has a tokenizer; try again later")
