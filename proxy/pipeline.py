"""A request's life in order: parse, load media, encode, and prefill and decode as early as that is of use, each when
the gate says.

The steps decide how; this file only says when. One per process; owns what they share. An item's key is salted with the
tenant unless features are shared; vLLM's prefix cache always is, since prompts are never shared.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import httpx
from msgspec import structs

from epd_serve.errors import OverloadedError, RequestError
from epd_serve.trace import PROXY, Trace
from epd_serve.traffic import Item
from epd_serve.wire import PROMPT_XARG
from proxy.admission.capacity import CapacityTracker
from proxy.admission.drain import Drain
from proxy.admission.gate import Gate, Pass
from proxy.admission.ticket import kind_of, priority_of, sequences_of
from proxy.background import Background
from proxy.config.settings import ProxySettings
from proxy.encode.encoders import Encoders
from proxy.encode.host_arena import HostArena
from proxy.encode.step import EncodeStep
from proxy.generate.attempt import Attempt
from proxy.generate.router import Router
from proxy.generate.step import GenerateStep
from proxy.generate.tokenize import TokenizeStep
from proxy.media.fetch import Resolver, UrlFetcher, resolve
from proxy.media.loader import LoadedItem, MediaLoader, source_bytes
from proxy.metrics import Metrics
from proxy.records.access_log import AccessLog
from proxy.records.lines_file import LinesFile
from proxy.records.record import Record
from proxy.records.recording import Recording
from proxy.records.records import Records
from proxy.records.request_metrics import RequestMetrics
from proxy.registry.announcement_dispatcher import AnnouncementDispatcher
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.registry.table import InstanceTable
from proxy.request.body_memory import weighed
from proxy.request.client_sink import ClientSink
from proxy.request.parse import Endpoint, ParsedRequest, parse
from proxy.stages.bodies import base_body, with_xargs
from proxy.stages.circuits import Circuits
from proxy.stages.client import StageClient
from proxy.stages.job import Job
from proxy.stages.poison import Poison, WatchedBody
from proxy.stages.prompt import NO_NODES, prompt_nodes, prompt_tokens
from proxy.stages.retries import RetryBudget
from proxy.tenants.auth import DEFAULT_TENANT, Caller, Callers
from proxy.tenants.fair_share import FairShare
from proxy.tenants.key_limits import KeyGate
from proxy.tenants.memory_budget import MemoryBudget, MemoryReservation
from proxy.traces.exporter import SpanExport


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
        timeouts, retries = settings.timeouts, settings.retries
        self.settings = settings
        self.table = table
        self.drain = Drain()
        self.metrics = Metrics()
        self.background = background or Background()
        self.metrics.registry.register(self.background.registry)
        self.callers = Callers(settings)
        self.key_gate = KeyGate()
        apart = settings.tells_tenants_apart
        self.memory = MemoryBudget(settings.memory.process_bytes, apart=apart)
        self.arriving = FairShare(max(1, settings.max_in_flight // 2), apart=apart)
        register_stage_metrics(self.metrics.registry, table)
        failed = partial(self.background.skipped, "Record")
        self.records = Records(settings.records, failed, settings.slo, settings.planned)
        requests = RequestMetrics(settings.slo)
        self.metrics.registry.register(requests)
        self.records.ended.append(requests.ended)
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
            self._spans = SpanExport(settings.otlp_traces_endpoint, dropped=self.metrics.traces_dropped.inc)
            self.records.ended.append(self._spans.ended)
        self.trace = Trace(settings.trace_path, PROXY)
        self.circuits = Circuits(table, self.metrics)
        self.gate = Gate(settings.admission, CapacityTracker(table, settings), self.metrics, table.pause)
        self._budget = RetryBudget(settings.retry, now=time.monotonic())
        self.metrics.retry_budget.set_function(lambda: self._budget.left(time.monotonic()))
        self.metrics.in_flight.set_function(lambda: self.drain.running)
        self.metrics.draining.set_function(lambda: self.drain.began)
        self._poison = Poison(settings.poison, self.metrics)
        self.metrics.memory_held.set_function(lambda: self.memory.held_bytes)
        self._stages = StageClient(timeouts, key=settings.bearer_of_stages())
        fetcher = UrlFetcher(settings.media, apart=apart, transport=media_transport, resolver=resolver)
        self._media = MediaLoader(settings, fetcher)
        self._router = Router(
            table,
            self.metrics,
            instance_wait_s=timeouts.instance_wait_s,
            policy=settings.policy,
            overlap=settings.overlap,
        )
        self._arena = HostArena(settings.arena)
        self.directory = FeatureDirectory(settings.max_known_features, holds=self._arena.holds)
        self.dispatcher = AnnouncementDispatcher(
            table, self.directory, self.metrics, self.background, settings.key_file
        )
        self._encode = EncodeStep(
            Encoders(
                table,
                self._stages,
                self.metrics,
                timeouts,
                retries=retries,
                trace=self.trace,
                circuits=self.circuits,
                budget=self._budget,
            ),
            self.directory,
            self.metrics,
            self.trace,
            follow_s=timeouts.encode_s * (retries + 1),
        )
        self._generate = GenerateStep(
            settings,
            table,
            self._router,
            self._encode,
            Attempt(
                table,
                self._stages,
                self.circuits,
                timeouts,
                self.metrics,
                self.trace,
                self.background,
                first_token=settings.first_token,
                go_on=settings.go_on,
            ),
            self.dispatcher,
            self.circuits,
            self.metrics,
            self.trace,
            self._budget,
        )
        self._tokenize = TokenizeStep(table, self._stages, retries=retries)

    async def start(self) -> None:
        """Listen to the stages, in the running event loop, which is the status table's too. Before any request."""
        self.dispatcher.start()

    async def aclose(self) -> None:
        await self.dispatcher.stop()
        self._arena.close()
        await self._media.aclose()
        await self._stages.aclose()
        self.trace.close()
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

    async def run(
        self,
        record: Record,
        endpoint: Endpoint,
        raw: bytearray,
        caller: Caller,
        held: MemoryReservation,
        sink: ClientSink,
        *,
        until: float | None = None,
    ) -> None:
        """Serve one admitted request through `sink`. Raises an EpdError where there is something to answer instead.

        Args:
            record: where to note what becomes of it. raw: its body, which is empty afterwards.
            held: has the bytes of it, and of all that is made of it.
            until: loop time at which the client wants the whole answer; whoever calls cancels then.
        """
        try:
            watched = self._poison.watched(raw)
            request = self._parsed(endpoint, raw, held)
            _note(record, request)
            for name in request.dropped:
                self.metrics.fields_dropped.labels(endpoint.value, name).inc()
            if not endpoint.generates:  # takes no place with the stages, so it waits for none
                items = await self._load(record, request, caller.tenant, held)
                return await self._tokenize.run(record.id, request, items, sink)
            watched.check()
            kind = kind_of(request)
            self.records.arrived(record, kind.value)
            gate = self.gate.admitted(
                kind,
                priority=priority_of(request, caller.limits),
                sequences=sequences_of(request, self.settings.max_sequences),
                until=until,
                record=record,
            )
            with gate as passed:
                self._budget.deposit()
                job = await self._job(record, request, caller.tenant, held, passed, watched)
                del request  # and with it the media as the client wrote them
                await self._run(job, sink)
        except RecursionError:  # what can just be decoded may be too deep to be measured, or written again
            raise RequestError("The request body is nested too deeply.", code="invalid_json") from None

    def _parsed(self, endpoint: Endpoint, raw: bytearray, held: MemoryReservation) -> ParsedRequest:
        """The checked request. Decoding takes memory before anybody has seen what is in the body."""
        weight = weighed(raw)
        held.take(weight.decoding_bytes)
        try:
            request = parse(endpoint, raw, self.settings)
            raw.clear()
        finally:
            held.give_back(weight.decoding_bytes)
        held.take(weight.decoded_bytes(source_bytes(request.media)) - weight.size_bytes)  # in place of the body
        return request

    async def _job(
        self,
        record: Record,
        request: ParsedRequest,
        tenant: str,
        held: MemoryReservation,
        passed: Pass,
        watched: WatchedBody,
    ) -> Job:
        items = await self._load(record, request, tenant, held) if request.media else ()
        salt = tenant if self.settings.tells_tenants_apart else None
        base = base_body(request, items, salt, request_id=record.id)
        self._prioritise(base, passed)
        prompt = NO_NODES
        if self.settings.prefix_routing:
            prompt = prompt_nodes(base, {item.key: item.tokens for item in items})
        if prompt.nodes:
            base = with_xargs(base, **{PROMPT_XARG: prompt.word})
        tokens = prompt_tokens(request, items)
        passed.weighs(tokens)
        self.records.prompt_known(record, len(items), sum(item.tokens for item in items), tokens)
        if self._recording is not None:
            own = [Item(round(one.tokens), *one.size, one.ref.modality.value, one.key) for one in items]
            self._recording.noted(record.id, tokens, own, prompt.nodes)
        if items:
            held.give_back(source_bytes(request.media))
            request = structs.replace(request, body=base, media=tuple(item.ref for item in items))
        return Job(record.id, request, base, items, tokens, passed, watched, record, prompt)

    async def _run(self, job: Job, sink: ClientSink) -> None:
        apart, made = self._router.before_encoding(job)
        if not apart:
            return await self._generate.run(job, sink, made=made)
        async with self._encode.begin(job) as encoding:
            await self._generate.run(job, sink, encoding)

    async def _load(
        self, record: Record, request: ParsedRequest, tenant: str, held: MemoryReservation
    ) -> tuple[LoadedItem, ...]:
        begun = time.monotonic()
        owner = DEFAULT_TENANT if self.settings.shared_features else tenant

        def fetched() -> None:
            self.trace.stamp(record.id, "downloaded", t0=begun)
            record.took("downloaded", begun)

        items = await self._media.load(request, tenant=owner, held=held, on_fetched=fetched)
        if items:
            self.trace.stamp(record.id, "media", keys=[item.key for item in items])
            record.took("media", begun, items=len(items))
        return items

    def _prioritise(self, body: dict[str, Any], passed: Pass) -> None:
        """Stages without vLLM's priority policy refuse any priority, so the client's own never reaches them."""
        body.pop("priority", None)
        if self.settings.stage_priorities and not self.settings.admission.single_queue:
            body["priority"] = passed.stage_priority


def _note(record: Record, request: ParsedRequest) -> None:
    """What is wanted, without any of its content."""
    record.model, record.stream = request.model, request.stream
    record.answers = request.body.get("n") or 1
    for item in request.media:
        record.media[item.modality.value] = record.media.get(item.modality.value, 0) + 1
