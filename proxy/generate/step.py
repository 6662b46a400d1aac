"""The prefill and decode step: attempts until one succeeds, repeated before the first byte. After it one follows only
where it can go on after what the client has.

Owns when to try again, where, and how the media is delivered then (`proxy/generate/delivery.py` says what there is to
choose from). One attempt is `proxy/generate/attempt.py`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace

from msgspec import Struct, structs

from epd_serve.errors import EpdError, StageError
from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.trace import Trace
from epd_serve.wire import FeatureMissing
from proxy.config.settings import ProxySettings
from proxy.encode.encoding import Encoding
from proxy.encode.step import EncodeStep
from proxy.errors import KvNotDelivered, StageDied, StageFault, StageRefusal, StageTimeout, StageUnreachable
from proxy.generate.attempt import Attempt
from proxy.generate.delivery import (
    Delivery,
    delivered,
    delivery_after_encoding_again,
    first_delivery,
    goes_as_metadata,
)
from proxy.generate.history import HistoryRoom, TokenHistory
from proxy.generate.migration import MigrationPace, Way, way_on, why_not
from proxy.generate.relay import Client
from proxy.generate.router import Made, Needs, Route, Router
from proxy.metrics import Metrics
from proxy.registry.announcement_dispatcher import AnnouncementDispatcher
from proxy.registry.table import InstanceTable
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_sink import ClientSink
from proxy.stages.circuits import Circuits
from proxy.stages.job import Job
from proxy.stages.poison import Stay
from proxy.stages.retries import RetryBudget, faulty_body
from proxy.stages.sse import DONE_EVENT, Event

logger = logging.getLogger(__name__)
BACKOFF_S = 0.2
REPROBE_S = 1.0


class _Progress(Struct):
    """Where a request stands between two attempts.

    Attributes:
        history: what its client has of a stream.
        encoding: under way; an attempt goes ahead of it.
        made: the next attempt's plan, unless it is out of date by then. because: why a next plan is made.
    """

    job: Job
    delivery: Delivery
    history: TokenHistory
    prompt_tokens: float
    encoding: Encoding | None = None
    made: Made | None = None
    because: str = "it arrived"
    avoid: set[IncarnationId] = set()
    failures: int = 0
    probing_until: float | None = None
    encoded_again: bool = False
    doubted: bool = False  # an attempt failed with nobody saying that a feature was missing

    @property
    def needs(self) -> Needs:
        """What its next plan has to heed."""
        flags = self.history.flags if self.history.begun else None
        return Needs(self.avoid, flags, ahead=self.encoding is not None)

    def went_well(self) -> None:
        """Its last attempt gave the client something: what failed before counts no more."""
        self.failures, self.probing_until, self.doubted = 0, None, False


class GenerateStep:
    """Answers a job through `sink`, or raises what to answer instead."""

    def __init__(
        self,
        settings: ProxySettings,
        table: InstanceTable,
        router: Router,
        encode: EncodeStep,
        attempt: Attempt,
        dispatcher: AnnouncementDispatcher,
        circuits: Circuits,
        metrics: Metrics,
        trace: Trace,
        budget: RetryBudget,
    ) -> None:
        self._settings = settings
        self._table = table
        self._router = router
        self._encode = encode
        self._attempt = attempt
        self._dispatcher = dispatcher
        self._circuits = circuits
        self._metrics = metrics
        self._trace = trace
        self._budget = budget
        self._history_room = HistoryRoom(settings.migration)
        self._pace = MigrationPace(settings.migration)

    async def run(self, job: Job, sink: ClientSink, encoding: Encoding | None = None, made: Made | None = None) -> None:
        """Attempt until one succeeds, the client has its first byte, or the retries are used up.

        Retries are paid for from the budget of the whole proxy, and an instance that was too slow is not asked again.
        Three kinds of failure do not use up a retry. An instance that cannot be reached at all has just died and the
        launcher is about to say so; such probing is bounded by `instance_wait_s`. Instances that die under this and
        other requests are counted by themselves (`proxy/stages/poison.py`). An attempt that a lost feature could fail
        is followed by one that it can fail no more (`_step_down`), at most twice in all.

        Args:
            encoding: of the job's items, where it has begun. The first attempt goes ahead of its end if that is of use
                (`proxy/encode/encoding.py`); what comes of that attempt, the next one follows the end.
            made: the first attempt's plan, where there is one already.
        """
        history = TokenHistory(self._history_room, why_not=why_not(job.request))
        sink.goes_on = lambda: history.goes_on
        progress = _Progress(job, first_delivery(job, self._settings), history, job.tokens, encoding, made)
        try:
            await self._run(progress, sink)
        finally:
            if history.lost_at is not None:
                self._metrics.migrations.labels(self._way(progress).value, "failed").inc()
            history.close()

    async def _run(self, progress: _Progress, sink: ClientSink) -> None:
        job, history, encoding = progress.job, progress.history, progress.encoding
        if encoding is not None and not await self._goes_ahead(progress, encoding):
            await self._encoded(progress)
        begun = time.monotonic()
        await job.passed.to_stages()
        job.record.note("admitted")
        self._trace.stamp(job.id, "admitted", t0=begun)
        failure: StageError | StageRefusal | None = None
        while True:
            await _stay_apart(progress)
            job.watched.check()  # other copies may have been tried meanwhile
            await job.passed.to_stages()  # to wait, to encode after all, or again, is to give the place back
            route = await self._planned(progress)
            # An instance that encodes for itself takes the media, and nothing but the media.
            delivery = progress.delivery if route.path.encode else Delivery.PIXELS
            failure, shared = None, False
            before, began = history.answers, time.monotonic()
            with job.watched.at(*(instance.incarnation_id for instance in _instances_of(route))) as stay:
                try:
                    if self._may_run(progress, route) and await self._answered(progress, delivery, route, sink):
                        return
                except (StageError, StageRefusal) as error:
                    job.record.failed(
                        "failed", error, _stage_of(error, route), s=time.monotonic() - began, delivery=delivery.value
                    )
                    if not sink.repeatable:
                        self._note_cut(progress, error)
                        raise
                    failure = error
                    shared = self._shares_death(stay, failure, route)
                finally:
                    route.release()
            went_ahead = progress.encoding is not None
            if failure is not None and history.answers != before:
                progress.because = _reason(failure, route)
                if await self._moves(progress, failure, route, sink):
                    return
                continue
            if failure is None or went_ahead:
                await self._encoded(progress)
            if failure is None:
                continue
            progress.because = _reason(failure, route)
            job.watched.check()
            if isinstance(failure, StageFault) and delivery is Delivery.PIXELS:  # else it may be about a lost feature
                self._judge(progress, failure, route)
            if _may_step_down(delivery, failure) and await self._step_down(
                progress, delivery, failure, route, went_ahead=went_ahead
            ):
                continue
            if pause_s := self._retry_pause_s(progress, failure, route, shared_death=shared):
                # The same instance again: after the launcher's word about it, or a little later.
                await self._table.changed(pause_s * random.uniform(0.5, 1.0))

    async def _planned(self, progress: _Progress) -> Route:
        """The next attempt's route: by the plan that there is, or by a new one."""
        made, progress.made = progress.made, None
        if made is not None and (route := self._router.take(progress.job, made)) is not None:
            return route
        return await self._router.route(progress.job, progress.because, progress.needs)

    async def _moves(
        self, progress: _Progress, failure: StageError | StageRefusal, route: Route, sink: ClientSink
    ) -> bool:
        """Prepare another attempt to go on with a stream whose stage is gone. True: there is nothing left to be said,
        and the client has its end. Raises `failure` where the stream has moved as often as it may."""
        history, job = progress.history, progress.job
        if not isinstance(failure, StageError) or not failure.retryable:
            raise failure
        history.lost_at = history.last_at
        progress.went_well()
        progress.avoid.add(_incarnation_of(failure, route))
        if history.migrations >= self._settings.migration.per_request:
            job.record.note("stays", reason=f"it has moved {history.migrations} times")
            raise failure
        history.migrations += 1
        way = self._way(progress)
        if way is Way.NONE:
            self._metrics.migrated(way.value, time.monotonic() - history.last_at)
            history.lost_at = None
            job.record.went_on("", way=way.value, tokens=len(history.tokens), gap_s=0.0)
            await sink.finish(Client(sink, history).take([Event(DONE_EVENT)]))
            return True
        if way is Way.FAST:
            progress.job = structs.replace(progress.job, tokens=progress.prompt_tokens + len(history.tokens))
        if progress.encoding is not None:
            await self._encoded(progress)
        logger.warning(
            "request %s: %s; another one goes on after %d tokens", job.id, failure.message, len(history.tokens)
        )
        await self._pace.turn()
        return False

    def _way(self, progress: _Progress) -> Way:
        return way_on(progress.job.request, progress.history, self._settings.go_on)

    def _note_cut(self, progress: _Progress, error: EpdError) -> None:
        """A stream ends with its stage."""
        if progress.job.request.stream and isinstance(error, StageError) and progress.history.why_not:
            self._metrics.migrations.labels(Way.NONE.value, "failed").inc()
            progress.job.record.note("stays", reason=progress.history.why_not)

    async def _goes_ahead(self, progress: _Progress, encoding: Encoding) -> bool:
        """Whether to call P and D now, while encoders work: waits until the metadata of all items is known, or the
        encoding has ended. A suspect takes one step at a time, or nobody could tell of which an instance died."""
        settings, job = self._settings, progress.job
        if settings.overlap == "never" or not goes_as_metadata(job, settings) or job.watched.suspected:
            return False
        known = await encoding.metadata_known()
        if known is None or first_delivery(known, settings) is not Delivery.METADATA or job.watched.suspected:
            return False
        if any(encoder.full for encoder in self._table.live(Role.E)) or not job.passed.goes_ahead():
            return False
        progress.job, progress.delivery = known, Delivery.METADATA
        progress.because = "its items are being encoded"
        return True

    async def _encoded(self, progress: _Progress) -> None:
        """The encoding's end; where none has begun, since whoever would have encoded it itself is gone, all of it."""
        encoding, progress.encoding = progress.encoding, None
        progress.job = await (encoding.finished() if encoding is not None else self._encode.run(progress.job))
        progress.because = "its items are encoded"
        progress.delivery = first_delivery(progress.job, self._settings)

    def _may_run(self, progress: _Progress, route: Route) -> bool:
        """Whether the items are as far as this route wants them. Only who hears encoders can wait for them."""
        if not route.path.encode:
            return progress.encoding is None
        if progress.encoding is not None:
            return all(instance.role.takes_features for instance in _instances_of(route))
        return progress.job.features is not None

    async def _answered(self, progress: _Progress, delivery: Delivery, route: Route, sink: ClientSink) -> bool:
        """Run an attempt. False: it went ahead, and had to be cut."""
        if progress.encoding is None:
            await self._run_attempt(progress.job, delivery, route, sink, progress.history)
            return True
        outcome = "failed"
        try:
            with CancelScope[str]() as scope, progress.encoding.attempted(lambda: _cut(scope, sink)):
                await self._run_attempt(progress.job, delivery, route, sink, progress.history, progress.encoding)
                outcome = "answered"
                return True
            outcome = "cut"
            return False
        finally:
            self._metrics.went_ahead.labels(outcome).inc()
            progress.job.record.note("went_ahead", outcome=outcome)

    async def _run_attempt(
        self,
        job: Job,
        delivery: Delivery,
        route: Route,
        sink: ClientSink,
        history: TokenHistory,
        encoding: Encoding | None = None,
    ) -> None:
        """`encoding`: under way."""
        if job.items and route.path.encode:
            self._metrics.deliveries.labels(delivery.value).inc()
        base = delivered(job, delivery, self._settings) if route.path.encode else job.base
        before_decode = encoding.first_stored if route.decode_waits and encoding is not None else None
        await self._attempt.run(job, base, route, sink, history, before_decode)

    def _shares_death(self, stay: Stay, failure: EpdError, route: Route) -> bool:
        """Where the failure was the end of an instance, hold it against who was there. Returns whether that is news,
        and others were there too."""
        if not isinstance(failure, StageError) or isinstance(failure, StageUnreachable | KvNotDelivered):
            return False
        incarnation_id = _incarnation_of(failure, route)
        if not isinstance(failure, StageDied) and self._table.is_alive(*incarnation_id):
            return False
        return stay.body.died(stay, incarnation_id, ago_s=failure.ago_s if isinstance(failure, StageDied) else 0.0)

    def _judge(self, progress: _Progress, fault: StageFault, route: Route) -> None:
        """Raises FaultyBody where another live instance failed with the same words."""
        incarnation_id = _incarnation_of(fault, route)
        if self._table.is_alive(*incarnation_id) and (alike := progress.job.faults.note(fault, incarnation_id)):
            self._circuits.acquit(alike)
            raise faulty_body(fault)

    def _retry_pause_s(self, progress: _Progress, failure: EpdError, route: Route, *, shared_death: bool) -> float:
        """Count a failure, and plan again; how long to wait where the same instance is to be tried. Raises the failure
        if it was the last."""
        if not isinstance(failure, StageError) or not failure.retryable:
            raise failure
        progress.avoid.add(_incarnation_of(failure, route))
        made = self._router.plan(progress.job, progress.because, progress.needs)
        clear = made is not None and made.plan.clear
        timeouts = self._settings.timeouts
        if isinstance(failure, StageUnreachable):
            now = asyncio.get_running_loop().time()
            progress.probing_until = progress.probing_until or now + timeouts.instance_wait_s
            give_up, pause_s = now >= progress.probing_until, REPROBE_S
        else:
            progress.failures += not shared_death
            give_up = not self._settings.retries or progress.failures > self._settings.retries
            pause_s = BACKOFF_S * max(1, progress.failures)
            if isinstance(failure, StageTimeout) and not clear:
                give_up = True
            if not give_up and not self._budget.withdraw(time.monotonic()):
                self._metrics.retries_refused.inc()
                progress.job.record.note("retry_refused", stage=failure.stage)
                give_up = True
        if give_up:
            raise failure
        logger.warning("request %s: %s; trying again", progress.job.id, failure.message)
        self._metrics.retries.labels(failure.stage).inc()
        progress.job.record.again("retry", stage=failure.stage, failures=progress.failures, of="attempt")
        if not clear:
            return pause_s
        progress.made = made
        return 0.0

    async def _step_down(
        self, progress: _Progress, delivery: Delivery, failure: EpdError, route: Route, *, went_ahead: bool
    ) -> bool:
        """Choose the next delivery after one that a lost feature may have failed. Both stages have been left. What an
        attempt missed that went ahead of the encoders is there now, or known to be missing.

        False: nobody says that a feature was missing, so it may be the stage that is ill. Once, that is believed: a
        stage that dies must not have its features computed again elsewhere.
        """
        job = progress.job
        missing: FeatureMissing | None = None
        if isinstance(failure, StageError):
            missing = await self._dispatcher.missing_for(job.id)
            if missing is None:
                progress.avoid.add(_incarnation_of(failure, route))
                if self._dispatcher.listening and not progress.doubted:
                    progress.doubted = True
                    return False
            elif went_ahead:
                return True
        else:  # with the media, the stage judges what the client wrote
            self._dispatcher.directory.distrust(item.key for item in job.items)
        cause = missing.cause if missing is not None else failure.code or "refused"
        lost = missing.keys if missing is not None else [item.key for item in job.items]
        confirmed = missing is not None or (isinstance(failure, StageError) and not self._dispatcher.listening)
        if confirmed:
            self._dispatcher.directory.lost(lost)
        if confirmed and self._settings.on_missing_feature == "reencode" and not progress.encoded_again:
            progress.encoded_again = True
            progress.job = await self._encode.again(job, lost)
            progress.delivery = delivery_after_encoding_again(delivery, progress.job, self._settings)
        else:
            progress.job = _without_features(job, missing.keys) if missing is not None else job
            progress.delivery = Delivery.PIXELS
        self._metrics.step_downs.labels(delivery.value, progress.delivery.value, cause).inc()
        job.record.again("step_down", cause=cause, before=delivery.value, then=progress.delivery.value)
        logger.warning(
            "request %s: %s (feature missing: %s); trying again with %s",
            job.id,
            failure.message,
            cause,
            progress.delivery.value,
        )
        return True


async def _stay_apart(progress: _Progress) -> None:
    """Wait where those who shared its deaths are not to be met again: without a place, unless its stream has begun."""
    job = progress.job
    if apart_s := job.watched.apart_s:
        if not progress.history.begun:
            job.passed.give_back()
        since = time.monotonic()
        await asyncio.sleep(apart_s)
        job.record.took("apart", since)


def _may_step_down(delivery: Delivery, failure: EpdError) -> bool:
    """Whether the way of delivery can be what failed the attempt."""
    if isinstance(failure, StageRefusal):
        return delivery is Delivery.METADATA
    return delivery is not Delivery.PIXELS and not isinstance(failure, StageUnreachable | StageTimeout)


def _cut(scope: CancelScope[str], sink: ClientSink) -> None:
    if not sink.committed:  # else the features were there
        scope.cancel("its features will not come as expected")


def _instances_of(route: Route) -> list[Instance]:
    return [lease.instance for lease in (route.decode, route.prefill) if lease is not None]


def _stage_of(failure: EpdError, route: Route) -> str:
    return failure.stage if isinstance(failure, StageError) else route.decode.instance.id


def _reason(failure: EpdError, route: Route) -> str:
    """Why there is a next plan, without the words of a stage, which may quote the request."""
    return f"{_stage_of(failure, route)}: {failure.code or type(failure).__name__}"


def _incarnation_of(failure: StageError, route: Route) -> IncarnationId:
    for instance in _instances_of(route):
        if instance.id == failure.stage:
            return instance.incarnation_id
    raise AssertionError(f"{failure.stage} is not on the route") from failure


def _without_features(job: Job, keys: list[str]) -> Job:
    """`job` whose prefilling stage need not wait for these any more."""
    assert job.features is not None, "only requests with features lose one"
    missing = tuple(dict.fromkeys((*job.features.missing, *keys)))
    return structs.replace(job, features=replace(job.features, missing=missing))
