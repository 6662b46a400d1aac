"""A request's life in order (`Pipeline.run`): parse, admit, load media, plan, encode, and prefill and decode as early
as that is of use.

The steps decide how; this file puts them together and says when. One per process; owns what they share. An item's key
is salted with the tenant unless features are shared; vLLM's prefix cache always is, since prompts are never shared.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import httpx
from msgspec import structs

from epd_serve.errors import OverloadedError, RequestError
from epd_serve.trace import PROXY, Trace
from epd_serve.traffic import Item
from epd_serve.wire import PROMPT_XARG
from proxy.admission.gate import Drain, Gate, Pass, kind_of, priority_of, sequences_of
from proxy.background import Background
from proxy.config.settings import ProxySettings
from proxy.context import RequestContext, Services
from proxy.encode.step import EncodeStep, HostArena
from proxy.generate.router import Router
from proxy.generate.step import GenerateStep
from proxy.generate.tokenize import TokenizeStep
from proxy.media.fetch import Resolver, UrlFetcher, resolve
from proxy.media.loader import MediaLoader, source_bytes
from proxy.metrics import Metrics
from proxy.records.lines import AccessLog, LinesFile, Recording
from proxy.records.records import Records
from proxy.records.report import stamps
from proxy.registry.announcements import AnnouncementDispatcher
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.registry.table import InstanceTable
from proxy.request.parse import parse
from proxy.routing.credits import Need
from proxy.stages.bodies import base_body, with_xargs
from proxy.stages.circuits import Circuits, RetryBudget, StallWatchdog
from proxy.stages.client import StageClient
from proxy.stages.poison import Poison
from proxy.stages.prompt import prompt_nodes, prompt_tokens
from proxy.strict_json import weighed
from proxy.tenants import DEFAULT_TENANT, Caller, Callers, FairShare, KeyGate

if TYPE_CHECKING:
    from proxy.traces import SpanExport


class Pipeline:
    """All parts of the proxy, put together. Transports and the resolver are the seams for tests."""

    def __init__(
        self,
        settings: ProxySettings,
        table: InstanceTable,
        *,
        media_transport: httpx.AsyncBaseTransport | None = None,
        resolver: Resolver = resolve,
        background: Background | None = None,
    ) -> None:
        """`background`: of the process, where it runs more than this pipeline's tasks."""
        timeouts = settings.timeouts
        self.settings = settings
        self.table = table
        self.drain = Drain()
        self.metrics = Metrics()
        self.background = background or Background()
        self.metrics.registry.register(self.background.registry)
        self.callers = Callers(settings)
        self.key_gate = KeyGate()
        apart = settings.tells_tenants_apart
        self.memory = FairShare(settings.memory.process_bytes, apart=apart, what="bytes", code="memory_full")
        most_bodies = max(1, settings.max_in_flight // 2)
        self.arriving = FairShare(most_bodies, apart=apart, what="bodies that arrive", code="bodies_full")
        register_stage_metrics(self.metrics.registry, table)
        failed = partial(self.background.skipped, "Record")
        self.records = Records(settings.records, failed, settings.slo, settings.planned)
        self.metrics.registry.register(self.records.counts)
        self._files: list[LinesFile] = []
        if settings.access_log:
            self._files.append(LinesFile(settings.access_log, "access_log", self.metrics.access_log_dropped.inc))
            self.records.ended.append(AccessLog(self._files[-1]).ended)
        self._recording: Recording | None = None
        if settings.recording:
            bound = settings.recording_bytes
            self._files.append(LinesFile(settings.recording, "recording", self.metrics.recording_dropped.inc, bound))
            self._recording = Recording(self._files[-1])
            self.records.ended.append(self._recording.ended)
        self._spans: SpanExport | None = None
        if settings.otlp_traces_endpoint:
            from proxy.traces import SpanExport

            self._spans = SpanExport(settings.otlp_traces_endpoint, dropped=self.metrics.traces_dropped.inc)
            self.records.ended.append(self._spans.ended)
        self._trace = Trace(settings.trace_path, PROXY)
        self.circuits = Circuits(table, self.metrics)
        self.gate = Gate(settings, table, self.metrics)
        table.reported = self.gate.pump
        self.slo_s, self._model_slos_s = settings.slo.limits_s, settings.slos_of_models()
        budget = self._budget = RetryBudget(settings.retry, now=time.monotonic())
        self.metrics.retry_budget.set_function(lambda: budget.left(time.monotonic()))
        self.metrics.in_flight.set_function(lambda: self.drain.running)
        self.records.lines = self.gate.queue.look
        self.metrics.draining.set_function(lambda: self.drain.began)
        self.metrics.memory_held.set_function(lambda: self.memory.held)
        self._poison = Poison(settings.poison, self.metrics)
        self._stages = StageClient(timeouts, key=settings.bearer_of_stages())
        fetcher = UrlFetcher(settings.media, apart=apart, transport=media_transport, resolver=resolver)
        self._media = MediaLoader(settings, fetcher)
        self._arena = HostArena(settings.arena)
        self.directory = FeatureDirectory(settings.max_known_features, holds=self._arena.holds)
        self.dispatcher = AnnouncementDispatcher(
            table, self.directory, self.metrics, self.background, settings.key_file
        )
        watchdog = StallWatchdog(table, timeouts.stage_silence_s, self.background)
        services = Services(
            settings, self.metrics, table, self._stages, self.circuits, budget, watchdog, self.dispatcher
        )
        self._encode = EncodeStep(services)
        self._router = Router(services)
        self._generate = GenerateStep(services, self._router, self._encode)
        self._tokenize = TokenizeStep(services)

    async def start(self) -> None:
        """Listen to the stages, in the running event loop, which is the status table's too. Before any request."""
        self.dispatcher.start()

    async def aclose(self) -> None:
        await self.dispatcher.stop()
        self._arena.close()
        await self._media.aclose()
        await self._stages.aclose()
        self._trace.close()
        for file in self._files:
            file.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def admitted(self, caller: Caller) -> AbstractContextManager[None]:
        """Hold one request, an exchange that `drain` counts, from before its body is read.

        Raises:
            OverloadedError: as many are held as may. KeyLimitError, on entering: as many of its account.
        """
        limit = self.settings.max_in_flight
        if self.drain.running > limit:
            raise OverloadedError(f"{limit} requests are in progress, which is the limit; try again later")
        return self.key_gate.admitted(caller.account, caller.limits)

    async def run(self, ctx: RequestContext, raw: bytearray) -> None:
        """Serve one admitted request through its sink. Raises an EpdError where there is something to answer instead.

        Args:
            ctx: has what is known at arrival. raw: its body, which is empty afterwards.
        """
        try:
            self._parse(ctx, raw)
            if not ctx.request.endpoint.generates:  # takes no place with the stages, so it waits for none
                await self._load_media(ctx)
                return await self._tokenize.run(ctx)
            with self._pass(ctx):
                self._budget.deposit()
                await self._load(ctx)
                if not self._router.encodes_apart(ctx):
                    return await self._generate.run(ctx)
                async with self._encode.begin(ctx):
                    await self._generate.run(ctx)
        except RecursionError:  # what can just be decoded may be too deep to be measured, or written again
            raise RequestError("The request body is nested too deeply.", code="invalid_json") from None

    def ended(self, ctx: RequestContext) -> None:
        """The exchange is over: its record is complete but for what the last bytes of the answer say."""
        self.records.end(ctx.record, ctx.sink.last)
        if self._trace.is_written:
            for event, t, more in stamps(ctx.record, [item.key for item in ctx.items]):
                self._trace.stamp(ctx.id, event, t=t, **more)

    def _parse(self, ctx: RequestContext, raw: bytearray) -> None:
        """Decoding takes memory before anybody has seen what is in the body."""
        watched, weight, held = self._poison.watched(raw), weighed(raw), ctx.held
        held.take(weight.decoding_bytes)
        try:
            ctx.request = request = parse(ctx.endpoint, raw, self.settings)
            raw.clear()
        finally:
            held.give_back(weight.decoding_bytes)
        held.take(weight.decoded_bytes(source_bytes(request.media)) - weight.size_bytes)  # in place of the body
        ctx.watched, ctx.history = watched, self._generate.history(request)
        record = ctx.record  # what is wanted, without any of its content
        record.model, record.stream = request.model, request.stream
        record.answers = request.body.get("n") or 1
        for item in request.media:
            record.media[item.modality.value] = record.media.get(item.modality.value, 0) + 1
        for name in request.dropped:
            self.metrics.fields_dropped.labels(ctx.endpoint.value, name).inc()

    def _pass(self, ctx: RequestContext) -> Pass:
        """What lets it in, unless its body is refused."""
        ctx.watched.check()
        kind = kind_of(ctx.request)
        self.records.arrived(ctx.record, kind.value)
        ctx.holds_to(self.slo_s, self._model_slos_s.get(ctx.request.model))
        queue, caller = self.gate.queue, ctx.caller
        ctx.passed = Pass(
            queue,
            kind,
            caller.account,
            caller.limits.weight,
            queue.now(),
            ctx.slo_s[0],
            queue.sooner_s(priority_of(ctx.request, caller.limits)),
            gate=self.gate,
            record=ctx.record,
            until=ctx.until,
        )
        return ctx.passed

    async def _load(self, ctx: RequestContext) -> None:
        """Load the media, and make the body of which those of the stages are made."""
        settings, request = self.settings, ctx.request
        await self._load_media(ctx)
        salt = ctx.caller.tenant if settings.tells_tenants_apart else None
        base = base_body(request, ctx.items, salt, request_id=ctx.id)
        # Stages without vLLM's priority policy refuse any priority, so the client's own never reaches them.
        base.pop("priority", None)
        if settings.prefix_routing:
            ctx.prompt = prompt_nodes(base, {item.key: item.tokens for item in ctx.items})
        if ctx.prompt.nodes:
            base = with_xargs(base, **{PROMPT_XARG: ctx.prompt.word})
        ctx.base, ctx.tokens = base, prompt_tokens(request, ctx.items)
        items = tuple([item.tokens for item in ctx.items])
        most = 1 if request.processor_options else settings.image_parts
        tiles = tuple([min(item.tiles, most) for item in ctx.items])
        self.key_gate.take_tokens(ctx.caller.account, ctx.caller.limits, ctx.tokens)
        sequences = sequences_of(request, settings.max_sequences)
        ctx.passed.sized(Need(max(1.0, ctx.tokens), items, tiles, sequences, request.needs_fused is not None))
        self.records.prompt_known(ctx.record, len(ctx.items), sum(item.tokens for item in ctx.items), ctx.tokens)
        if self._recording is not None:
            own = [Item(round(one.tokens), *one.size, one.ref.modality.value, one.key, one.tiles) for one in ctx.items]
            self._recording.noted(ctx.id, ctx.tokens, own, ctx.prompt.nodes)
        if ctx.items:  # the media as the client wrote them go
            ctx.held.give_back(source_bytes(request.media))
            ctx.request = structs.replace(request, body=base, media=tuple(item.ref for item in ctx.items))

    async def _load_media(self, ctx: RequestContext) -> None:
        if not ctx.request.media:
            return
        begun, record = time.monotonic(), ctx.record
        owner = DEFAULT_TENANT if self.settings.shared_features else ctx.caller.tenant
        fetched = partial(record.took, "downloaded", begun)
        ctx.items = await self._media.load(ctx.request, tenant=owner, held=ctx.held, on_fetched=fetched)
        record.took("media", begun, items=len(ctx.items))
