"""What follows a failed attempt at prefill and decode, as one table from the failure and what came before. Pure.

Rows are read from above; the first that fits says what is next. Retries are counted between two answers of a request,
and paid for from the budget of the whole proxy. Uncounted are:

- an instance that cannot be reached: it has just died and the launcher is about to say so (`instance_wait_s`);
- instances that die under this and other requests, which are counted by themselves (`proxy/stages/poison.py`);
- an attempt that a lost feature could fail: it is followed by one that it can fail no more, at most twice in all.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from epd_serve.errors import StageError
from epd_serve.wire import FeatureMissing
from proxy.config.settings import ProxySettings
from proxy.context import Delivery, RequestContext
from proxy.errors import StageRefusal, StageTimeout, StageUnreachable
from proxy.generate.migration import Way, way_on


class Next(StrEnum):
    """What follows. All but the first three are another attempt."""

    GIVE_UP = "give up"
    """The failure is the answer."""
    BLAME = "blame the body"
    """Two live instances have said the same of it."""
    END = "end"
    """The client has everything but the end of its stream."""
    GO_ON = "go on"
    """The stream goes on at another stage, after what the client has."""
    REPEAT = "repeat"
    """Features were not there yet: they are now, or are known to be missing."""
    ENCODE_AGAIN = "encode again"
    """Lost features are made again."""
    SEND_PIXELS = "send pixels"
    """The stage gets the media, and needs no feature."""
    PROBE = "probe"
    """Until the launcher has said that the instance is down."""
    ELSEWHERE = "elsewhere"
    """A counted retry, if there is another instance: this one was merely too slow."""
    RETRY = "retry"
    """A counted retry, elsewhere if there is an elsewhere."""


class Failure(Struct, frozen=True):
    """What is known of one attempt that failed.

    Attributes:
        error: of a stage. delivery: how the media went.
        repeatable: another attempt may be made (`ClientSink.repeatable`). told: the client has part of its answer.
        shared_death: an instance died, under others too. alike: another live instance has failed with the same words.
        missing: the features that the stage says it lacked. listening: it would have been heard saying so.
        went_ahead: of the encoders. at: loop time.
    """

    error: StageError | StageRefusal
    delivery: Delivery
    at: float
    repeatable: bool = True
    told: bool = False
    shared_death: bool = False
    alike: bool = False
    missing: FeatureMissing | None = None
    listening: bool = True
    went_ahead: bool = False

    @property
    def refused(self) -> bool:
        """By a stage that judged what the client wrote; it would be elsewhere, too."""
        return isinstance(self.error, StageRefusal)

    @property
    def may_lack_features(self) -> bool:
        """The way of delivery can be what failed the attempt."""
        if self.refused:
            return self.delivery is Delivery.METADATA
        return self.delivery is not Delivery.PIXELS and not isinstance(self.error, StageUnreachable | StageTimeout)


def next_step(failed: Failure, ctx: RequestContext, settings: ProxySettings) -> Next:
    """What follows `failed`, the last attempt of `ctx`, which it leaves as it is."""
    if not failed.repeatable:
        return Next.GIVE_UP
    if failed.told:
        if failed.refused or ctx.history.migrations >= settings.migration.per_request:
            return Next.GIVE_UP
        return Next.END if way_on(ctx.request, ctx.history, settings.go_on) is Way.NONE else Next.GO_ON
    if failed.alike:
        return Next.BLAME
    # Nobody says that a feature was missing, so it may be the stage that is ill. Once, that is believed: a stage that
    # dies must not have its features computed again elsewhere.
    ill = not failed.refused and failed.missing is None and failed.listening and not ctx.doubted
    if failed.may_lack_features and not ill:
        return _step_down(failed, ctx, settings)
    if failed.refused:
        return Next.GIVE_UP
    if isinstance(failed.error, StageUnreachable):
        until = ctx.probing_until or failed.at + settings.timeouts.instance_wait_s
        return Next.PROBE if failed.at < until else Next.GIVE_UP
    if ctx.failures + (not failed.shared_death) > settings.retries or not settings.retries:
        return Next.GIVE_UP
    return Next.ELSEWHERE if isinstance(failed.error, StageTimeout) else Next.RETRY


def _step_down(failed: Failure, ctx: RequestContext, settings: ProxySettings) -> Next:
    """METADATA | FEATURES -> [encoded again: METADATA | FEATURES] -> PIXELS."""
    if failed.missing is not None and failed.went_ahead:
        return Next.REPEAT
    confirmed = failed.missing is not None or not (failed.refused or failed.listening)
    again = settings.on_missing_feature == "reencode" and not ctx.encoded_again
    return Next.ENCODE_AGAIN if confirmed and again else Next.SEND_PIXELS
