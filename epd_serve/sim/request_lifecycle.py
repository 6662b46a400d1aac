"""The lifecycle of a request in a simulated stage, by the stage's role: features, KV, engine, answer.

A child of a request runs when its features are here and the other side of its transfer is ready, as with real stages;
whatever ends it lets go of its pins and tells the other side. A stage that is wired to nobody does without either: its
features are always there, and KV comes and goes in the profile's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from epd_serve.kv.params import receive_params
from epd_serve.roles import Role
from epd_serve.sim.answers import Answer
from epd_serve.sim.cache_watch import CacheWatch
from epd_serve.sim.consumer import Consumer, Wait
from epd_serve.sim.encoder import Encoder
from epd_serve.sim.engine import Engine
from epd_serve.sim.faults import SimFaults
from epd_serve.sim.http import Exchange
from epd_serve.sim.items import Item, parted
from epd_serve.sim.load import stage_report
from epd_serve.sim.prompts import Prompt
from epd_serve.sim.publishing import Publisher, RateLimitedPublisher
from epd_serve.sim.receiver import Receiver
from epd_serve.sim.request_params import RequestParams
from epd_serve.sim.response_answer import ResponseAnswer
from epd_serve.sim.sender import Sender
from epd_serve.sim.sequence import Sequence
from epd_serve.wire import ENCODE_AGAIN_XARG, MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG, PARTS_XARG, WHOLE_TOPIC
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.keys import parts_by_whole


@dataclass(eq=False)
class _Child:
    """One sequence and what is tied to it. `gates`: what it still waits for. `ends`: called when it ends, once."""

    sequence: Sequence
    gates: int = 0
    ends: list[Callable[[], None]] = field(default_factory=list)
    over: bool = False


class RequestLifecycle:
    """Runs requests between `start` and `close`.

    Args:
        ranks: tensor-parallel size that the stage pretends to have.
        caching: KV of earlier prompts is used again (vLLM's `--enable-prefix-caching`, its default).
    """

    def __init__(
        self, wiring: StageWiring, engine: Engine, faults: SimFaults, *, ranks: int = 1, caching: bool = True
    ) -> None:
        self._wiring, self._engine, self._faults = wiring, engine, faults
        profile, role = engine.profile, wiring.role
        self._seq = 0
        self._cache = CacheWatch(wiring, engine.scheduler) if caching and role.has_language_model else None
        self._load_publisher = Publisher(wiring.load_publish, wiring)
        self._load = RateLimitedPublisher(self._report_load, change_s=0.05, idle_s=0.5)
        self._publisher = Publisher(wiring.publish, wiring)
        self._store: Arena | None = _open_store(wiring)
        per_token = profile.feature_bytes_per_token
        self._encoder: Encoder | None = None
        if role is Role.E:
            drops = lambda: faults.hits(faults.state.drop_features)  # noqa: E731 - a closure over the state
            self._encoder = Encoder(wiring, self._store, self._publisher, per_token, drops=drops)
        self._consumer: Consumer | None = None
        if role.takes_features and wiring.prefills and self._store is not None:
            self._consumer = Consumer(wiring, self._store, self._publisher, per_token)
        block_tokens = profile.capacity.block_tokens
        self._sender: Sender | None = None
        if wiring.sends_kv and wiring.kv_endpoint:
            self._sender = Sender(
                wiring,
                ranks=ranks,
                block_tokens=block_tokens,
                bytes_per_token=profile.kv_bytes_per_token,
                seconds=lambda nbytes: profile.kv.seconds(nbytes) * engine.slowness,
            )
        self._receiver: Receiver | None = None
        if wiring.takes_kv and wiring.kv_worker_endpoint:
            self._receiver = Receiver(wiring, ranks=ranks, block_tokens=block_tokens)

    def start(self) -> None:
        for part in (self._encoder, self._consumer, self._sender, self._receiver):
            if part is not None:
                part.start()
        if self._wiring.load_publish:
            self._load.start()
        self._engine.changed = self._load.changed

    def close(self) -> None:
        self._load.close()
        for part in (self._encoder, self._consumer, self._sender, self._receiver):
            if part is not None:
                part.close()
        for publisher in (self._publisher, self._load_publisher):
            publisher.close()
        if self._store is not None:
            self._store.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def run(self, params: RequestParams, exchange: Exchange) -> None:
        """Answer a request, in the engine's time."""
        answer = ResponseAnswer(params, exchange) if params.responses else Answer(params, exchange)
        children: list[_Child] = []
        breaks = self._faults.hits(self._faults.state.break_rate)
        if breaks and not params.stream:
            exchange.abort()
            return

        def fail(reason: str) -> None:
            self._leave(children)
            exchange.refuse(500, reason)

        exchange.on_gone = lambda: self._leave(children)
        answer.begin()
        for index in range(len(answer.choices)):
            children.append(self._child(params, answer, index, fail))
            if breaks:
                children[-1].sequence.on_token = _breaking(children[-1].sequence.on_token, exchange)
        for child in children:
            if not child.over:
                self._engine.submit(child.sequence, held=bool(child.gates))

    def _child(
        self, params: RequestParams, answer: Answer | ResponseAnswer, index: int, fail: Callable[[str], None]
    ) -> _Child:
        prompt = replace(params.prompts[index // params.n], given=params.prefilled)
        begun = len(prompt.given)
        limit = answer.choices[index].tokens - begun
        sequence = Sequence(prompt_tokens=prompt.tokens, limit=limit, priority=params.priority, on_token=_nothing)
        child = _Child(sequence)

        def token(number: int, last: bool) -> None:
            if last:
                self._end(child)
            answer.token(index, begun + number, last)

        sequence.on_token = token
        role, request = self._part(params), _child_id(params, index)
        if self._cache is not None:
            self._cache.follow(sequence, params, prompt, answer.choices[index], prefills=role.prefills)
        if role is Role.E:
            self._to_encode(child, params, prompt, answer)
        elif role.encodes:
            sequence.items = tuple(item.tokens for item in prompt.items)
            sequence.item_ends = prompt.item_ends
        elif role.prefills and prompt.items and self._consumer is not None:
            self._await_features(child, params, prompt, request, fail)
        if role.sends_kv:
            self._send_kv(child, params, prompt, request, answer)
        elif role.takes_kv:
            self._take_kv(child, params, prompt, request, fail)
        return child

    def _part(self, params: RequestParams) -> Role:
        """What a request asks of this stage. With both halves that depends on whether its KV comes from elsewhere."""
        if not self._wiring.both:
            return self._wiring.role
        return Role.D if receive_params(dict(params.kv or {}), params.id) is not None else Role.P

    # --- by role --------------------------------------------------------------------------------------------------

    def _to_encode(self, child: _Child, params: RequestParams, prompt: Prompt, answer: Answer | ResponseAnswer) -> None:
        """An encoder's request has no prompt: it is over when its items are encoded."""
        assert self._encoder is not None
        encoder = self._encoder
        again = str(params.xargs.get(ENCODE_AGAIN_XARG, "")).split(",")
        distinct = {item.key: item for item in prompt.items}
        wanted = [item for item in distinct.values() if encoder.wants(item, again=item.key in again)]
        left = dict(enumerate(wanted))

        def encoded(index: int) -> None:
            encoder.encoded(left.pop(index))

        def leave() -> None:
            for item in left.values():
                encoder.dropped(item)

        sequence = child.sequence
        sequence.prompt_tokens, sequence.limit = 0, 1
        sequence.items, sequence.on_encoded = tuple(item.tokens for item in wanted), encoded
        sequence.on_admitted = lambda: encoder.begins(wanted)
        child.ends.append(leave)
        entries = answer.extras.setdefault("ec_transfer_params", {})
        for at, item in enumerate(prompt.items):
            entry = entries.setdefault(item.key, {"item_indices": [], "metadata": dict(item.metadata)})
            entry["item_indices"].append(at)

    def _await_features(
        self, child: _Child, params: RequestParams, prompt: Prompt, request: str, fail: Callable[[str], None]
    ) -> None:
        assert self._consumer is not None
        consumer = self._consumer
        parts = parts_by_whole(str(params.xargs.get(PARTS_XARG, "")).split(","))
        distinct = {key: parted(item, key) for item in prompt.items for key in parts.get(item.key, [item.key])}

        def ready(to_encode: list[Item]) -> None:
            child.sequence.items = tuple(item.tokens for item in to_encode)
            child.sequence.encoding = list(range(len(to_encode)))
            self._open(child)

        must_not = params.xargs.get(ON_MISSING_XARG) == ON_MISSING_FAIL
        wait = Wait(request, list(distinct.values()), must_not, ready, fail)
        child.gates += 1
        child.ends.append(lambda: consumer.done(wait))
        given_up = [key for key in str(params.xargs.get(MISSING_XARG, "")).split(",") if key]
        asyncio.get_running_loop().call_soon(consumer.need, wait, given_up)

    def _send_kv(
        self, child: _Child, params: RequestParams, prompt: Prompt, request: str, answer: Answer | ResponseAnswer
    ) -> None:
        sequence = child.sequence
        if self._sender is None or params.kv is None:
            if params.kv is not None:
                answer.extras["kv_transfer_params"] = {"ok": True, "reason": ""}
            return
        sender = self._sender
        sequence.keeps_kv = True
        child.gates += 1
        out = sender.take(
            params.kv,
            request,
            prompt,
            admitted=lambda: self._soon(self._open, child),
            freed=lambda: self._engine.free(sequence),
        )
        if out is None:
            sequence.keeps_kv = False
            child.gates -= 1
            return

        def end() -> None:
            if sequence.generated >= sequence.limit:
                transfer = sender.prefilled(out)
                if answer.extras.get("kv_transfer_params", {"ok": True})["ok"]:
                    answer.extras["kv_transfer_params"] = transfer
            else:
                sender.left(out)

        child.ends.append(end)

    def _take_kv(
        self, child: _Child, params: RequestParams, prompt: Prompt, request: str, fail: Callable[[str], None]
    ) -> None:
        sequence = child.sequence
        if params.kv is None:
            return
        if self._receiver is None:
            profile = self._engine.profile

            def load() -> None:
                seconds = profile.kv.seconds((prompt.tokens - sequence.computed) * profile.kv_bytes_per_token)
                self._soon_after(seconds, self._engine.loaded, sequence)

            sequence.on_reserved = load
            return
        receiver = self._receiver
        one = receiver.take(
            params.kv,
            request,
            prompt,
            loaded=lambda: self._engine.loaded(sequence),
            failed=lambda reason: fail(f"KV load failure: {reason}"),
            freed=lambda: self._engine.free(sequence),
        )
        if one is None:
            return
        sequence.on_reserved = lambda: receiver.reserve(one, sequence.computed)

        def end() -> None:
            if receiver.left(one):  # P may still write to its blocks
                sequence.keeps_kv = True

        child.ends.append(end)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _open(self, child: _Child) -> None:
        child.gates -= 1
        if not child.gates and not child.over:
            self._engine.release(child.sequence)

    def _end(self, child: _Child) -> None:
        if not child.over:
            child.over = True
            for end in child.ends:
                end()

    def _leave(self, children: list[_Child]) -> None:
        for child in children:
            if not child.over:
                self._end(child)
                self._engine.remove(child.sequence)

    def _soon(self, call: Callable[[_Child], None], child: _Child) -> None:
        asyncio.get_running_loop().call_soon(call, child)

    def _soon_after(self, seconds: float, call: Callable[[Sequence], None], sequence: Sequence) -> None:
        asyncio.get_running_loop().call_later(seconds, call, sequence)

    def _report_load(self) -> None:
        self._seq += 1
        self._load_publisher.send(stage_report(self._wiring, self._engine, self._seq))
        topics = self._load_publisher.subscribed()
        if self._cache is not None:
            for report in self._cache.reports(asked=bool(topics & {b"", WHOLE_TOPIC + self._wiring.instance.encode()})):
                self._load_publisher.send(report)


def _open_store(wiring: StageWiring) -> Arena | None:
    if not wiring.arena or not (wiring.role is Role.E or (wiring.role.takes_features and wiring.prefills)):
        return None
    from store.arena import Arena  # brings numpy, which a stage without features does without

    return Arena.attach(Path(wiring.arena), prefault=False)


def _child_id(params: RequestParams, index: int) -> str:
    """As vLLM names it: the same on both ends of a transfer."""
    prompt, at = divmod(index, params.n)
    name = params.id if params.chat or params.responses else f"{params.id}-{prompt}"
    return f"{at}_{name}" if params.n > 1 else name


def _nothing(number: int, last: bool) -> None:
    """Until the answer listens."""


def _breaking(on_token: Callable[[int, bool], None], exchange: Exchange) -> Callable[[int, bool], None]:
    def token(number: int, last: bool) -> None:
        if not last:
            on_token(number, last)
        exchange.abort()

    return token
