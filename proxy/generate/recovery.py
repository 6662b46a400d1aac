"""What the next attempt at prefill and decode is: what follows a failure, how stages are given the media, and whether
and how another stage can go on with an answer. Pure, but for the wait of `MigrationPace`.

**What follows a failure** (`next_step`) is one table from the failure and what came before. Rows are read from above;
the first that fits says what is next. Retries are counted between two answers of a request, and paid for from the
budget of the whole proxy. Uncounted are:

- an instance that cannot be reached: it has just died and the launcher is about to say so (`instance_wait_s`);
- instances that die under this and other requests, which are counted by themselves (`proxy/stages/poison.py`);
- an attempt that a lost feature could fail: it is followed by one that it can fail no more, at most twice in all.

**How P and D are given the media** (`next_delivery`, `delivered`):

    METADATA   grid and key instead of the media. The stage cannot recompute: a lost feature fails it.
    FEATURES   the media rides along, yet a lost feature fails the request, because it has to be encoded again first, or
               because the stage must not recompute it under this name (below).
    PIXELS     the media rides along, and a lost feature is recomputed from it. The last resort, which cannot be lost.

A failed attempt is followed by the next of METADATA | FEATURES -> [encoded again: METADATA | FEATURES] -> PIXELS; each
step down happens at most once, and does not use up a retry. Stages without an encoder (`send_pixels: never`) are given
METADATA alone: what they lose is encoded again, as often as a request is tried again.

Why a name matters: vLLM (0.32, `multimodal/cache/lru.py`) caches processed items by `uuid` on both sides of its engine.
An item sent with its media, then as metadata, then with its media again is dropped from the third message as known, and
the engine finds the second one's: no pixels. That is well while the feature is there and kills the engine when it
recomputes. So where metadata travels, media to be recomputed goes under a name of its own, all items of the request.

**Answers of two stages.** A client must not be able to tell that its answer has two authors. So P's first token is
shown (`may_be_shown`) only of

    one answer to one prompt, chat or completion       a merged stream has one first event to cut
    no parser (`parses_chat`), no tools                at the end of an answer parsers say what they have held back
    vLLM flags alike (`Instance.answer_flags`)         else P might sample, or say, something else than D

and, once it is there, only what `proxy.generate.relay.first_token` lets pass. All else is shown D's.

A stream whose stage is gone goes on in one of two ways (`way_on`). FAST: what the client has becomes part of the
prompt, which one prefill computes. That is the same answer where nothing hangs on which tokens are prompt and which
were sampled. REPLAY: the stage samples the given tokens again, one by one, with no other choice, so that seeds draw,
grammars advance, penalties count and parsers see each of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from epd_serve.answer_flags import parses_chat
from epd_serve.errors import StageError
from epd_serve.wire import ALL_MISSING, MISSING_XARG, ON_MISSING_FAIL, ON_MISSING_XARG, PARTS_XARG, FeatureMissing
from proxy.config.limits import MigrationLimits
from proxy.config.settings import ProxySettings
from proxy.context import Delivery, RequestContext
from proxy.errors import StageRefusal, StageTimeout, StageUnreachable
from proxy.generate.router import Route
from proxy.media.loader import LoadedItem
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.stages.bodies import media_name, placeholder_body, renamed_body, with_xargs
from proxy.stages.history import TokenHistory

_FAIL = {ON_MISSING_XARG: ON_MISSING_FAIL}
_COUNTS_USAGE = "--enable-force-include-usage"
_PENALTIES = ("presence_penalty", "frequency_penalty")
_REPLAYED = (
    "seed", "logprobs", "logprob_token_ids", "response_format", "structured_outputs", "bad_words", "tools",
    "thinking_token_budget", "watermarking", "repetition_detection", "vllm_xargs",
)  # fmt: skip
"""Fields that look at the tokens of the answer apart from those of the prompt, or may. A seed of 0 is one."""
_DECODE_ALONE = ("tools", "thinking_token_budget", "watermarking")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


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
    if not settings.stages_encode:
        ill = failed.missing is None and (failed.refused or failed.listening)  # another way of delivery tells nothing
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
    if not settings.stages_encode:
        return Next.ENCODE_AGAIN if ctx.encoded_again < max(1, settings.retries) else Next.GIVE_UP
    confirmed = failed.missing is not None or not (failed.refused or failed.listening)
    again = settings.on_missing_feature == "reencode" and not ctx.encoded_again
    return Next.ENCODE_AGAIN if confirmed and again else Next.SEND_PIXELS


def next_delivery(ctx: RequestContext, settings: ProxySettings, before: Delivery | None = None) -> Delivery:
    """What to try now, by what the encoders made of the items. `before`: in the attempt after which lost features were
    encoded again; None where nothing was lost yet."""
    if ctx.features is not None and not settings.stages_encode:
        return Delivery.METADATA  # that of all items is known, or the encode step would have failed
    if ctx.features is None or ctx.features.missing:
        return Delivery.PIXELS
    if before in (None, Delivery.METADATA) and goes_as_metadata(ctx, settings) and _metadata_suffices(ctx):
        return Delivery.METADATA
    may_encode_again = before is None and settings.on_missing_feature == "reencode"
    return Delivery.FEATURES if may_encode_again or _only_under_another_name(ctx, settings) else Delivery.PIXELS


def goes_as_metadata(ctx: RequestContext, settings: ProxySettings) -> bool:
    """Whether the items of a request would be delivered as metadata, if that were known.

    Not with processor options: vLLM makes another identity of `uuid` and options, and embeddings have none.
    """
    return settings.send_pixels != "always" and not ctx.request.processor_options


def _metadata_suffices(ctx: RequestContext) -> bool:
    """Whether P and D can do without the media of a request, by what is known of its items.

    All items or none, since media and metadata must not mix within a modality, whose items have the same fields.
    """
    assert ctx.features is not None, "only requests with features are asked about"
    fields: dict[str, set[str]] = {}
    for item in ctx.items:
        metadata = ctx.features.metadata.get(item.key)
        if not metadata or fields.setdefault(item.ref.modality, set(metadata)) != set(metadata):
            return False
    return bool(ctx.items)


def delivered(ctx: RequestContext, delivery: Delivery, settings: ProxySettings) -> Mapping[str, Any]:
    """The body that both P's and D's are made from."""
    if ctx.features is None:
        return ctx.base
    base, missing = ctx.base, ctx.features.missing
    if parts := ctx.features.parts:
        base = with_xargs(base, **{PARTS_XARG: ",".join(itertools.chain.from_iterable(parts.values()))})
    if delivery is Delivery.METADATA:
        return with_xargs(placeholder_body(base, ctx.items, ctx.features.metadata), **_FAIL)
    if delivery is Delivery.FEATURES:
        return with_xargs(base, **_FAIL)
    if renamed := _renamed(ctx, settings):
        base = renamed_body(base, renamed)
        missing = tuple(dict.fromkeys(media_name(item.key) for item in renamed))
    if ctx.request.processor_options and set(missing) == {item.key for item in ctx.items}:
        missing = (ALL_MISSING,)
    return with_xargs(base, **{MISSING_XARG: ",".join(missing)}) if missing else base


def _renamed(ctx: RequestContext, settings: ProxySettings) -> Sequence[LoadedItem]:
    """Items whose media goes under a name of its own. What is surely recomputed needs no feature's name, and another
    life of this proxy may have sent it as metadata."""
    assert ctx.features is not None, "only requests with features are asked about"
    if _only_under_another_name(ctx, settings):
        return ctx.items
    if not goes_as_metadata(ctx, settings):
        return ()
    return [item for item in ctx.items if item.key in ctx.features.missing]


def _only_under_another_name(ctx: RequestContext, settings: ProxySettings) -> bool:
    """Whether stages may hold an item of it without its media under its key. Not with processor options: vLLM's own
    name for the item has them in it."""
    assert ctx.features is not None, "only requests with features are asked about"
    return ctx.features.metadata_in_use and goes_as_metadata(ctx, settings)


class Way(StrEnum):
    """`NONE`: there is nothing left to be said but the end."""

    FAST = "fast"
    REPLAY = "replay"
    NONE = "none"


def alike(route: Route) -> bool:
    """Whether D of this route can go on after what P, or a former P, has sampled."""
    if route.prefill is None:
        return False
    flags = route.prefill.instance.answer_flags
    return flags is not None and flags == route.decode.instance.answer_flags


def is_one_token(request: ParsedRequest) -> bool:
    """Whether the client wants no more than one token, so that P can answer alone. Where two of the fields that its
    endpoint has say how many, vLLM heeds the first."""
    limits = (request.body.get(name) for name in _LIMITS)
    return next((limit for limit in limits if limit is not None), None) == 1


def may_be_shown(request: ParsedRequest, route: Route) -> bool:
    """Whether P's first token can be the client's, as far as that is known beforehand."""
    if not (request.stream and alike(route)) or _why_not_one(request):
        return False
    if any(request.body.get(name) for name in _DECODE_ALONE):
        return False
    return request.endpoint is not Endpoint.CHAT or not parses_chat(route.decode.instance.answer_flags or ())


def why_not(request: ParsedRequest) -> str:
    """Why no other stage could go on with the answer to this, or ""."""
    if not request.stream:
        return "answers in one piece do not go on"
    if why := _why_not_one(request):
        return f"{why} do not go on"
    body = request.body
    for name in ("echo", "use_beam_search"):
        if body.get(name):
            return f"answers with {name} do not go on"
    return "hidden reasoning does not go on" if body.get("include_reasoning") is False else ""


def way_on(request: ParsedRequest, history: TokenHistory, go_on: str = "auto") -> Way:
    """How another stage is to go on after `history`. `go_on`: the setting."""
    body = request.body
    if history.finished:
        return Way.REPLAY if _counts_usage(request, history) and not history.counted else Way.NONE
    parsed = request.endpoint is Endpoint.CHAT and parses_chat(history.flags or ())
    short = len(history.tokens) < (body.get("min_tokens") or 0)
    wanted = any(body.get(name) for name in _PENALTIES) or any(_is_wanted(body.get(name)) for name in _REPLAYED)
    return Way.REPLAY if go_on == "replay" or parsed or short or wanted else Way.FAST


def _is_wanted(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _counts_usage(request: ParsedRequest, history: TokenHistory) -> bool:
    options = request.body.get("stream_options") or {}
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    return asked or any(flag.startswith(_COUNTS_USAGE) for flag in history.flags or ())


def _why_not_one(request: ParsedRequest) -> str:
    """What the request wants in place of one answer to one prompt, or ""."""
    prompt = request.body.get("prompt")
    if request.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return f"answers of {request.endpoint.value}"
    if (request.body.get("n") or 1) > 1:
        return "n answers"
    if request.endpoint is Endpoint.CHAT or isinstance(prompt, str):
        return ""
    one = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    return "" if one else "answers to several prompts"


class MigrationPace:
    """Lets streams go on, so many a second and in order: a node's death is no storm of prefills."""

    def __init__(self, limits: MigrationLimits) -> None:
        self._every_s = 1 / limits.per_s
        self._saved_s = (limits.burst - 1) / limits.per_s
        self._due = float("-inf")

    async def turn(self) -> None:
        """Wait for the next one."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due + self._every_s, now - self._saved_s)
        if self._due > now:
            await asyncio.sleep(self._due - now)
