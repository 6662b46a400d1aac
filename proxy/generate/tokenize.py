"""`/tokenize` and `/detokenize`: answered by any stage with a language model, since all have the same tokenizer.

No lease is taken, and nobody waits in the admission queues: no engine is asked, only the stage's API server, by
`MAX_CONCURRENT` requests at most. Media are loaded like everybody's, and go to the stage without a key: vLLM counts the
images of a tokenized prompt, and caches none of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from epd_serve.errors import DeadlineError, NoInstanceError, OverloadedError, StageError
from epd_serve.instances import IncarnationId
from epd_serve.roles import Role
from proxy.errors import StageFault
from proxy.media.loader import LoadedItem
from proxy.registry.table import InstanceTable
from proxy.request.client_sink import ClientSink
from proxy.request.parse import ParsedRequest
from proxy.request.payload import encoded
from proxy.routing.policy import preferred
from proxy.stages.bodies import inlined_body
from proxy.stages.client import StageClient
from proxy.stages.retries import Faults, faulty_body

TIMEOUT_S = 15.0
"""How long one stage may take: the longest prompt takes its tokenizer a second or two, and another stage has one too.
"""

MAX_CONCURRENT = 64
"""Requests over all stages. Whoever comes then waits as long as for a stage."""


class TokenizeStep:
    """Asks one stage, and after a failure others."""

    def __init__(self, table: InstanceTable, stages: StageClient, *, retries: int) -> None:
        self._table = table
        self._stages = stages
        self._retries = retries
        self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self, request_id: str, request: ParsedRequest, items: Sequence[LoadedItem], sink: ClientSink) -> None:
        """Answer `request` through `sink`.

        Raises:
            OverloadedError: too many wait. NoInstanceError. Or what the last stage that was asked did.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._places.acquire()
        except TimeoutError:
            raise OverloadedError(f"{MAX_CONCURRENT} requests to tokenizers are in progress; try again later") from None
        try:
            answer = await self._ask(request_id, request, inlined_body(request, items))
        finally:
            self._places.release()
        await sink.respond_json(200, answer)

    async def _ask(self, request_id: str, request: ParsedRequest, body: Mapping[str, Any]) -> Mapping[str, Any]:
        payload, headers = encoded(body), {"x-request-id": request_id}
        tried: set[IncarnationId] = set()
        failure: StageError | DeadlineError | None = None
        faults = Faults()
        while len(tried) <= self._retries:
            live = [one for role in Role if role.has_language_model for one in self._table.live(role)]
            untried = [one for one in live if one.incarnation_id not in tried]
            if not untried:
                if not self._table.pause.left_s:
                    break
                await self._table.changed(self._table.pause.left_s)
                continue
            instance = self._table.instance(random.choice(preferred(untried)).id)
            tried.add(instance.incarnation_id)
            try:
                return await self._stages.post(instance, request.endpoint, payload, headers, timeout_s=TIMEOUT_S)
            except (StageError, DeadlineError) as error:
                failure = error
                if isinstance(error, StageFault) and faults.note(error, instance.incarnation_id):
                    raise faulty_body(error) from None
        raise failure or NoInstanceError("no live instance has a tokenizer; try again later")
