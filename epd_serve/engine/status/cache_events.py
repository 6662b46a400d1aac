"""What vLLM says of its prefix cache, taken down in the ledger: its own KV-cache events, and the prompts it is given.

Stands where vLLM's publisher of such events stands (`Scheduler.kv_event_publisher`), in the scheduler's thread. Events
are taken as names of blocks to look at, not as what has become of them: vLLM announces the end of every copy of a block
while another may remain, and 0.32 announces a block again when it is used again. The pool knows.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterable
from typing import Any

from epd_serve.cache_ledger import HASH_BYTES, CacheLedger, short
from epd_serve.engine.compat import name_blocks_alike
from epd_serve.wire import PROMPT_XARG

logger = logging.getLogger(__name__)


class CacheEvents:
    """Events and prompts of one scheduler. A defect here must not end the engine: it says so once, and is silent.

    Args:
        scheduler: vLLM's, after its `__init__`; with its events switched on.
        ledger: of the same block size.

    Attributes:
        changed: called when the ledger has something new.
    """

    def __init__(self, scheduler: Any, ledger: CacheLedger) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._ledger = ledger
        self._others = scheduler.kv_event_publisher
        self._growing: dict[str, Any] = {}  # requests whose answers' blocks will be told, by id
        self._broken = False
        self.changed: Callable[[], None] = lambda: None

    # --- as vLLM's EventPublisher -----------------------------------------------------------------------------------

    def publish(self, batch: Any) -> None:
        """A step's events."""
        self._others.publish(batch)
        self._guarded(lambda: self._look_at(batch.events))

    def shutdown(self) -> None:
        self._others.shutdown()

    def get_publisher_config(self) -> Any:
        return self._others.get_publisher_config()

    # --- requests ---------------------------------------------------------------------------------------------------

    def added(self, request: Any, *, tell: bool) -> None:
        """A request has come. `tell`: which blocks its prompt is made of; else only how its answer goes on."""
        self._guarded(lambda: self._add(request, tell=tell))

    def finished(self, request_ids: Iterable[str]) -> None:
        """These have left the scheduler."""
        self._guarded(lambda: self._end(request_ids))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add(self, request: Any, *, tell: bool) -> None:
        if nodes := _nodes_of(request):
            if tell:
                self._tell(nodes, request, request.num_prompt_tokens, grown=False)
            self._growing[request.request_id] = request

    def _end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._growing.pop(request_id, None)
            if request is not None and request.num_output_tokens > 1:  # of its last token there is no KV
                self._tell(_nodes_of(request)[-HASH_BYTES:], request, request.num_tokens - 1, grown=True)

    def _tell(self, nodes: bytes, request: Any, tokens: int, *, grown: bool) -> None:
        full = tokens // self._ledger.block_tokens
        hashes = request.block_hashes[:full]
        if full and len(hashes) == full:  # else this cache has other blocks than hashes (hybrid models), or none
            self._ledger.prompt(nodes, [short(one) for one in hashes], grown=grown)
            self.changed()

    def _look_at(self, events: Iterable[Any]) -> None:
        for event in events:
            hashes = getattr(event, "block_hashes", None)
            if hashes is None:  # AllBlocksCleared
                self._ledger.cleared()
                continue
            if getattr(event, "group_idx", None) not in (None, 0):
                continue
            for one in hashes:
                if isinstance(one, bytes):
                    self._ledger.is_now(short(one), self._pool.get_cached_block(one, [0]) is not None)
                else:  # the operator wants events with numbers: too short to ask the pool with
                    self._ledger.is_now(one >> 4, hasattr(event, "parent_block_hash"))
        self.changed()

    def _guarded(self, look: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            look()
        except Exception:
            logger.exception("this engine's prefix cache cannot be told of; prompts are routed without it from here on")
            self._broken = True
            self._growing.clear()
            self._ledger.cleared()


def _nodes_of(request: Any) -> bytes:
    """What `PROMPT_XARG` says, 8 bytes a node; b"" where nothing sensible."""
    params = getattr(request, "sampling_params", None)
    raw = ((getattr(params, "extra_args", None) or {}).get(PROMPT_XARG)) or ""
    try:
        nodes = base64.b64decode(raw, validate=True) if isinstance(raw, str) else b""
    except binascii.Error:
        return b""
    return nodes if len(nodes) % HASH_BYTES == 0 else b""


def events_of(scheduler: Any, instance: str, incarnation: str) -> tuple[CacheEvents, CacheLedger] | None:
    """Takes the place of the scheduler's publisher of events; None where it has none to publish."""
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    if not getattr(pool, "enable_kv_cache_events", False):
        return None
    name_blocks_alike()
    ledger = CacheLedger(instance, incarnation, int(scheduler.block_size))
    events = scheduler.kv_event_publisher = CacheEvents(scheduler, ledger)
    return events, ledger
