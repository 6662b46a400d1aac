"""What the proxy is configured with: built once by the composition root, validated once, passed down.

Owns the values and their bounds. Leaves reading of flags, files and the environment to `deploy`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from proxy.config.domains import DomainRules
from proxy.fields.parts import Modality
from proxy.fields.rules import OUR_XARGS, XARGS_REFUSED
from proxy.routing.policy import POLICIES

SEND_PIXELS = ("auto", "always")
ON_MISSING_FEATURE = ("recompute", "reencode")
SCHEMES = ("data", "http", "https", "file")
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds. Each bounds another wait, so that a message can say which one ran out.

    Attributes:
        connect_s: opening a connection to a stage.
        encode_s: one encoder's answer for its share of a request's items.
        encode_silence_s: an encoder that reported before and has stopped to, while other instances report, hangs.
        stage_silence_s: the same of an instance that prefills or decodes, before the first byte.
        first_byte_s: from dispatch of P and D to the first streamed event.
        idle_s: between two streamed events.
        total_s: the whole request, media and queues included.
        instance_wait_s: how long a request waits for a missing role to come up (a stage restart takes ~40 s).
    """

    connect_s: float = 5.0
    encode_s: float = 120.0
    encode_silence_s: float = 10.0
    stage_silence_s: float = 10.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 1800.0
    instance_wait_s: float = 60.0

    def __post_init__(self) -> None:
        _require_positive(self, "connect_s", "encode_s", "encode_silence_s", "stage_silence_s", "first_byte_s")
        _require_positive(self, "idle_s", "total_s")
        if self.instance_wait_s < 0:
            raise ConfigError("instance_wait_s must not be negative", param="instance_wait_s")


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on what a client may make the proxy load.

    Attributes:
        max_bytes: one item. `max_total_bytes`: all items of one request.
        max_pixels: width x height of an image or a video's frames, checked on headers before anything decodes them.
        max_video_s, max_audio_s: length of a clip in seconds, where its container tells.
        max_frames: that a stage decodes of a video, as the request asks. max_video_pixels: of all of them.
        max_items: items of one request.
        fetch_timeout_s: one http(s) item, redirects included. `max_redirects`: hops, each checked anew.
        fetch_wait_s: until its turn to be fetched comes.
        allowed_local_root: directory that `file://` may read from, or None to refuse `file://`.
        schemes: of the URLs that clients may send.
        allowed_domains, denied_domains: hosts that http(s) may reach, as `proxy/config/domains.py` reads them.
        allow_private_addresses: let http(s) reach loopback, private and link-local addresses.
        max_parallel_fetches, threads: bounds of the whole process, which accounts share fairly
            (`proxy/tenants/fair_semaphore.py`).
    """

    max_bytes: int = 32 << 20
    max_total_bytes: int = 64 << 20
    max_pixels: int = 36_000_000
    max_video_s: float = 600.0
    max_audio_s: float = 3600.0
    max_frames: int = 256
    max_video_pixels: int = 600_000_000
    max_items: int = 16
    fetch_timeout_s: float = 10.0
    fetch_wait_s: float = 5.0
    max_redirects: int = 3
    allowed_local_root: Path | None = None
    schemes: tuple[str, ...] = SCHEMES
    allowed_domains: tuple[str, ...] = ()
    denied_domains: tuple[str, ...] = ()
    allow_private_addresses: bool = False
    max_parallel_fetches: int = 32
    threads: int = 2

    def __post_init__(self) -> None:
        names = ("max_bytes", "max_total_bytes", "max_pixels", "fetch_timeout_s", "max_parallel_fetches", "threads")
        _require_positive(self, *names, "max_video_s", "max_audio_s", "max_frames", "max_video_pixels", "fetch_wait_s")
        for scheme in self.schemes:
            _require_one_of("schemes", scheme, SCHEMES)
        DomainRules(self.allowed_domains, self.denied_domains)  # refuses what is no host name
        if self.max_items < 0 or self.max_redirects < 0:
            raise ConfigError("max_items and max_redirects must not be negative", param="media")


@dataclass(frozen=True)
class BodyPace:
    """How slowly a client may send its body before it is answered 408 and its connection closed.

    Attributes:
        grace_s: before anything is asked of it. bytes_per_s: on average after that.
        most_s: for all of it, however fast.
    """

    grace_s: float = 10.0
    bytes_per_s: int = 16 << 10
    most_s: float = 300.0

    def __post_init__(self) -> None:
        _require_positive(self, "grace_s", "bytes_per_s", "most_s")


@dataclass(frozen=True)
class Memory:
    """What a process may hold of clients' bytes (`proxy/tenants/memory_budget.py`).

    Attributes:
        process_bytes: bodies and media of all requests of one proxy process. An account among others gets half of it
            at most (`proxy/tenants/fair_share.py`).
    """

    process_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        _require_positive(self, "process_bytes")


@dataclass(frozen=True)
class KeyLimits:
    """What one API key may do; where there are no keys, one tenant. 0 means no limit.

    Attributes:
        requests_in_flight: requests of one key that are held at once.
        requests_per_minute: requests of one key that are begun within a minute, on average.
        best_priority: the best (lowest) `priority` that a request of a key gets, whatever it asks for; None for any.
    """

    requests_in_flight: int = 0
    requests_per_minute: int = 0
    best_priority: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_in_flight", "requests_per_minute"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative; 0 means no limit", param=name)

    def shared_by(self, processes: int) -> KeyLimits:
        """The limits of each of several proxy processes that serve the same clients: their share, rounded up."""
        return replace(
            self,
            requests_in_flight=-(-self.requests_in_flight // processes),
            requests_per_minute=-(-self.requests_per_minute // processes),
        )


@dataclass(frozen=True)
class ModelIdentity:
    """What a feature depends on besides its bytes: part of every key."""

    model: str
    revision: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Admission:
    """The queues in front of the stages (`proxy/admission/queue.py`, `proxy/admission/capacity.py`).

    Attributes:
        single_queue: one queue in order of arrival and no priorities at the stages, to compare with.
        text_queue, media_queue: requests that may wait; beyond it the answer is 429.
        max_wait_s: nobody waits longer, and who would is refused at once.
        media_yields_s: text that arrives up to this much later than a request with media goes first.
        priority_step_s: what one unit of a request's `priority` is worth. priority_limit: larger ones count as this;
            0 to heed none.
        text_share, media_share: of the capacity, that the other modality does not take while both are about.
        sequences_per_instance: prefilling or decoding, for an instance that does not report how many it can run.
        prefill_tokens: of prompts that one instance has still to prefill; or as many as it does in `prefill_s`.
        encodes_per_instance: requests at one encoder.
    """

    single_queue: bool = False
    text_queue: int = 2048
    media_queue: int = 1024
    max_wait_s: float = 60.0
    media_yields_s: float = 30.0
    priority_step_s: float = 5.0
    priority_limit: int = 10
    text_share: float = 0.25
    media_share: float = 0.25
    sequences_per_instance: int = 1024
    prefill_tokens: int = 8192
    prefill_s: float = 1.0
    encodes_per_instance: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "text_queue", "media_queue", "max_wait_s", "sequences_per_instance", "prefill_tokens")
        _require_positive(self, "encodes_per_instance")
        for name in ("media_yields_s", "priority_step_s", "priority_limit", "prefill_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"admission.{name} must not be negative", param=f"admission.{name}")
        for name in ("text_share", "media_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"admission.{name} must be from 0 to below 1", param=f"admission.{name}")
        if self.text_share + self.media_share > 1:
            raise ConfigError("admission.text_share and media_share must not exceed 1 together", param="admission")


@dataclass(frozen=True)
class RetryLimits:
    """How many attempts may be repeated over the whole proxy (`proxy/stages/retry_budget.py`).

    Attributes:
        ratio: retries per request. floor_per_s: retries that may be made in any case. burst: at once, after a calm.
    """

    ratio: float = 0.2
    floor_per_s: float = 10.0
    burst: int = 256

    def __post_init__(self) -> None:
        if not self.ratio >= 0 or not self.floor_per_s >= 0 or self.burst < 1:
            raise ConfigError("retry.ratio and floor_per_s must not be negative, burst at least 1", param="retry")


@dataclass(frozen=True)
class PoisonLimits:
    """When a request body is suspected of killing instances, and for how long it is refused
    (`proxy/stages/suspects.py`).

    Attributes:
        blame_s: a request that was sent to an instance longer ago is not suspected of its death.
        quarantine_s: how long a body is refused at first; doubles each time, up to `quarantine_max_s`.
        memory_s: how long anything is held against a body. bodies: of how many; the oldest are forgotten first.
    """

    blame_s: float = 5.0
    quarantine_s: float = 60.0
    quarantine_max_s: float = 3600.0
    memory_s: float = 600.0
    bodies: int = 4096

    def __post_init__(self) -> None:
        _require_positive(self, "blame_s", "quarantine_s", "quarantine_max_s", "memory_s", "bodies")


@dataclass(frozen=True)
class ProxySettings:
    """All of the proxy's settings.

    Attributes:
        served_models: names that clients may ask for; the first is the default that `/v1/models` lists first.
        identity: model, revision and dtype as they enter feature keys.
        roles: roles of the layout, of which `/ready` says which are missing; empty means "those in the table".
        max_model_len: context length in tokens that `/v1/models` reports, or None when unknown.
        admission: who waits in front of the stages. retry: how many attempts are repeated over the whole proxy.
        poison: when a body that instances die of is refused.
        retries: further attempts of one request after a stage failed before the first byte.
        stage_priorities: stages with a language model run with vLLM's priority policy, so that they heed `priority`.
        processes: proxies that share the stages, and so their capacity.
        max_body_bytes: of one request. body_pace: how slowly it may come. memory: of all requests held at once.
        max_n: answers to one prompt. max_sequences: answers that one request may ask for, over its prompts.
        max_in_flight: requests held at once; beyond it the answer is 429.
        api_keys: accepted bearer tokens; empty means no authentication. Each is a tenant.
        tenant_header: request header whose value names the tenant, set by a gateway that is trusted to; empty to
            heed none. A request without it belongs to the default tenant.
        shared_features: all tenants share features (they can tell by the time taken that somebody else sent the same
            image). Prefix caches stay apart.
        modalities: what the model takes (`image`, `video`, `audio`), or None to leave it to the stages to refuse.
        send_pixels: `auto` sends P and D an item's metadata instead of the media where that is known, `always` never.
        on_missing_feature: `recompute` lets P encode what got lost, `reencode` has an encoder do it again first.
        arena: the arena of this host where all stages of the layout use it, else None.
        max_known_features: how many features the proxy remembers.
        trace_path: JSON-lines file for phase stamps, or None.
        policy: how instances are chosen, a name of `proxy/routing/policy.py`.
        key_limits: what one API key may do at once and per minute.
        strict_fields: answer an unknown field with 400 instead of leaving it out.
        xargs: names that clients may send in `vllm_xargs`, for extensions that the operator loads into the stages.
        trust_request_mm_kwargs: let clients send `mm_processor_kwargs` and `media_io_kwargs`, as vLLM's flag of that
            name, which stages of vLLM 0.32 need, too.
        vllm_version: of the stages, which decides what fields there are; empty where it is not known or not one.
        explain: answer `x-epd-explain: 1` with headers that name path, instances and moments.
        observed: `/metrics` and `/instances` are on the clients' port, for want of an admin listener.
        stage_key: bearer token that the stages want (stages of several hosts), or "".
    """

    served_models: tuple[str, ...]
    identity: ModelIdentity
    roles: tuple[Role, ...] = ()
    max_model_len: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    media: MediaLimits = field(default_factory=MediaLimits)
    admission: Admission = field(default_factory=Admission)
    retry: RetryLimits = field(default_factory=RetryLimits)
    poison: PoisonLimits = field(default_factory=PoisonLimits)
    retries: int = 2
    stage_priorities: bool = False
    processes: int = 1
    max_body_bytes: int = 96 << 20
    body_pace: BodyPace = field(default_factory=BodyPace)
    memory: Memory = field(default_factory=Memory)
    max_n: int = 64
    max_sequences: int = 256
    max_in_flight: int = 2048
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    tenant_header: str = ""
    shared_features: bool = False
    modalities: frozenset[str] | None = None
    send_pixels: str = "auto"
    on_missing_feature: str = "recompute"
    arena: Path | None = None
    max_known_features: int = 65_536
    trace_path: Path | None = None
    policy: str = "least-loaded"
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    explain: bool = True
    strict_fields: bool = False
    xargs: tuple[str, ...] = ()
    trust_request_mm_kwargs: bool = False
    vllm_version: str = ""
    observed: bool = True
    stage_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.served_models:
            raise ConfigError("the proxy needs at least one served model name", param="served_models")
        _require_positive(self, "max_body_bytes", "max_n", "max_sequences", "max_in_flight")
        _require_positive(self, "max_known_features", "processes")
        if self.retries < 0:
            raise ConfigError("retries must not be negative", param="retries")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty", param="api_keys")
        if self.tenant_header and not HEADER_NAME.fullmatch(self.tenant_header):
            raise ConfigError(f"tenant_header {self.tenant_header!r} is no header name", param="tenant_header")
        _require_one_of("policy", self.policy, tuple(POLICIES))
        _require_one_of("send_pixels", self.send_pixels, SEND_PIXELS)
        _require_one_of("on_missing_feature", self.on_missing_feature, ON_MISSING_FEATURE)
        for name in self.xargs:
            if name in XARGS_REFUSED or name.startswith(OUR_XARGS):
                raise ConfigError(f"xargs: {name} is never taken from clients", param="xargs")
        for modality in sorted(self.modalities or ()):
            _require_one_of("modalities", modality, tuple(Modality))

    @property
    def tells_tenants_apart(self) -> bool:
        return bool(self.api_keys or self.tenant_header)

    @property
    def tells_accounts_apart(self) -> bool:
        """Whether there can be two accounts (`proxy/tenants/auth.py`): one alone has nobody to leave anything for."""
        return len(set(self.api_keys)) > 1 if self.api_keys else bool(self.tenant_header)


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", param=name)


def _require_positive(settings: object, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:  # also refuses NaN
            raise ConfigError(f"{name} must be greater than 0, got {getattr(settings, name)}", param=name)
