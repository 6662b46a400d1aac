"""P's end of simulated transfers: the real desk and control channel, links without bytes, time by the profile.

A request is admitted when D has reserved for it, as at a real P. Its KV takes the profile's time after the prefill,
then DONE goes to D's workers. What D takes back meanwhile is acknowledged before it is sent no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from epd_serve import wire
from epd_serve.kv.control import PrefillControl
from epd_serve.kv.faults import faults_of
from epd_serve.kv.params import send_params
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from epd_serve.peers import Peers
from epd_serve.sim.link import Link, caller
from epd_serve.sim.prompts import Prompt
from epd_serve.sim.publishing import Publisher, RateLimitedPublisher
from epd_serve.wire import TransferKey
from epd_serve.wiring import StageWiring, worker_endpoints

_LINK_WAIT_S = 2.0
_KV_HEADS = 64  # any number of ranks up to that, in powers of two, can share them


@dataclass(eq=False)
class Outgoing:
    """One transfer.

    Attributes:
        admitted: called once, when its request may run. freed: called once, when P's blocks are not needed any more.
    """

    key: TransferKey
    prompt: Prompt
    admitted: Callable[[], None]
    freed: Callable[[], None]
    sends: bool = False  # D gets its KV
    over: bool = False
    task: asyncio.Task[None] | None = None


class Sender:
    """Runs between `start` and `close`.

    Args:
        ranks: tensor-parallel size, here and in reports. seconds: how long so many bytes take.
    """

    def __init__(
        self,
        wiring: StageWiring,
        *,
        ranks: int,
        block_tokens: int,
        bytes_per_token: int,
        seconds: Callable[[int], float],
    ) -> None:
        self._wiring = wiring
        self._block_tokens, self._bytes_per_token = block_tokens, bytes_per_token
        self._seconds = seconds
        self._desk = PrefillDesk(wiring.incarnation, wiring.kv_ready_wait_s)
        self._control: PrefillControl | None = None
        self._context = zmq.asyncio.Context.shadow(zmq.Context.instance())
        self._peers = Peers(wiring)
        self._links: dict[str, Link] = {}
        self._transfers: dict[TransferKey, Outgoing] = {}
        self._waiting: dict[TransferKey, Outgoing] = {}
        self._open = 0
        self._publishers = [Publisher(one, wiring) for one in worker_endpoints(wiring.kv_publish, ranks)]
        self._reports = RateLimitedPublisher(self._report, change_s=0.05, idle_s=1.0)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        faults = faults_of(self._wiring.kv_faults)
        self._control = PrefillControl(
            self._desk,
            self._wiring.kv_endpoint,
            faults,
            caller(loop, self._look),
            key_file=self._wiring.key_file,
        )
        self._reports.start()

    def close(self) -> None:
        """Threads and tasks end; what was being sent stays unsent."""
        self._reports.close()
        for out in self._transfers.values():
            if out.task is not None:
                out.task.cancel()
        for link in self._links.values():
            link.close()
        if self._control is not None:
            self._control.close()
        for publisher in self._publishers:
            publisher.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def take(
        self,
        raw: Mapping[str, Any] | None,
        request: str,
        prompt: Prompt,
        admitted: Callable[[], None],
        freed: Callable[[], None],
    ) -> Outgoing | None:
        """A request has come. None where it is served here alone; else `admitted` follows, now or later."""
        params = send_params(dict(raw) if raw else None, request)
        if params is None:
            return None
        out = Outgoing(params.key, prompt, admitted, freed)
        self._transfers[out.key] = self._waiting[out.key] = out
        self._admit(out)
        return out

    def prefilled(self, out: Outgoing) -> dict[str, Any]:
        """Its prompt has been computed: send it. What the proxy is told."""
        ready = self._desk_ready(out)
        if not out.sends or ready is None:
            fate = self._fate(out)
            self._end(out)
            return {"ok": False, "reason": fate or "nothing was sent"}
        out.task = asyncio.create_task(self._send(out, ready), name=f"transfer {out.key.transfer_id}")
        return {"ok": True, "reason": ""}

    def left(self, out: Outgoing) -> None:
        """Its request left before it was computed."""
        if out.over:
            return
        assert self._control is not None
        with self._control.lock:
            if self._desk.gone(out.key, "prefill request ended early"):
                self._desk.stopped_unsent(out.key)
        self._control.flush()
        self._end(out)

    # --- with the desk ----------------------------------------------------------------------------------------------

    def _admit(self, out: Outgoing) -> None:
        assert self._control is not None
        with self._control.lock:
            prompt = PromptShape(out.prompt.tokens, out.prompt.digest, self._block_tokens, _KV_HEADS)
            admission = self._desk.admit(out.key, prompt, time.monotonic())
        self._control.flush()
        if admission is not Admission.WAIT:
            del self._waiting[out.key]
            out.sends = admission is Admission.SEND
            self._opened(out.sends)
            out.admitted()

    def _look(self) -> None:
        """The desk may have changed: what D took back, and who may run now."""
        if self._control is None:
            return
        with self._control.lock:
            stops, self._control.stops = self._control.stops, []
            for key in stops:
                out = self._transfers.get(key)
                if out is None or out.task is None:  # nothing is on its way
                    self._desk.stopped_unsent(key)
        if stops:
            self._control.flush()
        for out in list(self._waiting.values()):
            self._admit(out)

    def _desk_ready(self, out: Outgoing) -> wire.Ready | None:
        assert self._control is not None
        with self._control.lock:
            return self._desk.ready(out.key)

    def _fate(self, out: Outgoing) -> str | None:
        assert self._control is not None
        with self._control.lock:
            return self._desk.fate(out.key)

    # --- sending ----------------------------------------------------------------------------------------------------

    async def _send(self, out: Outgoing, ready: wire.Ready) -> None:
        nbytes = (ready.prompt_tokens - ready.start_token) * self._bytes_per_token
        began = time.monotonic()
        await asyncio.sleep(self._seconds(nbytes))
        took_s = time.monotonic() - began
        stopped = self._desk_ready(out) is None
        done = wire.Done(out.key, ok=not stopped, reason="cancelled" if stopped else "")
        links = [self._link(endpoint, rank) for rank, endpoint in enumerate(ready.endpoints)]
        for link in links:
            link.carrying += 1
        for reason, link in zip(
            await asyncio.gather(*(link.done(done, ready.source, _LINK_WAIT_S) for link in links)), links, strict=True
        ):
            link.carrying -= 1
            link.cancelled += stopped
            link.failed += bool(reason)
            if not stopped and not reason:
                link.transfers += 1
                link.bytes += nbytes // len(links)
                link.busy_s += took_s
        assert self._control is not None
        with self._control.lock:
            self._desk.closed(out.key)
        self._control.flush()
        self._reports.changed()
        self._end(out)

    def _opened(self, more: int) -> None:
        """So many transfers have begun, or ended."""
        self._open += more
        if more:
            self._reports.changed()

    def _end(self, out: Outgoing) -> None:
        out.over = True
        self._opened(-out.sends)
        self._transfers.pop(out.key, None)
        self._waiting.pop(out.key, None)
        out.freed()

    def _link(self, endpoint: str, rank: int) -> Link:
        if endpoint not in self._links:
            link = self._links[endpoint] = Link(endpoint, rank, self._wiring, self._peers, self._reports.changed)
            link.start(self._context)
        return self._links[endpoint]

    def _follow_peers(self) -> None:
        """Open links to those that this instance sends KV to now; close those to whoever has left."""
        if self._peers.changed():
            for endpoints in self._peers.takers_of_kv():
                for rank, endpoint in enumerate(endpoints):
                    self._link(endpoint, rank)
        for endpoint, link in list(self._links.items()):
            if not link.carrying and not self._peers.may_be_at(endpoint):
                self._links.pop(endpoint).close()

    def _report(self) -> None:
        self._follow_peers()
        wiring = self._wiring
        links: Sequence[wire.KvLink] = [link.report() for link in self._links.values()]
        for rank, publisher in enumerate(self._publishers):
            publisher.send(
                wire.KvReport(wiring.instance, wiring.incarnation, rank, "sim", 0.0, list(links), open=self._open)
            )
