"""Deadlines and bounds of the proxy, one value for each thing that they bound.

Each checks itself when it is made, and names the field and its bound where that fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from epd_serve import slo
from epd_serve.errors import ConfigError
from proxy.config.domains import DomainRules

SCHEMES = ("data", "http", "https", "file")


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds. Each bounds another wait, so that a message can say which one ran out.

    Attributes:
        connect_s: opening a connection to a stage.
        encode_s: one encoder's answer for its share of a request's items.
        encode_silence_s: an encoder that reported before and has stopped to, while other instances report, hangs.
        stage_silence_s: the same of an instance that prefills or decodes, before the first byte, and after it where
            another one can go on; and for how long such a one may be down, though its connections are open.
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
        require_positive(self, "connect_s", "encode_s", "encode_silence_s", "stage_silence_s", "first_byte_s")
        require_positive(self, "idle_s", "total_s")
        if self.instance_wait_s < 0:
            raise ConfigError("instance_wait_s must not be negative", param="instance_wait_s")


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on what a client may make the proxy load.

    Attributes:
        max_bytes: bytes of one item. `max_total_bytes`: bytes of all items of one request.
        max_pixels: width x height of an image or a video's frames, checked on headers before anything decodes them.
        max_video_s, max_audio_s: length of a clip in seconds, where its container tells.
        max_frames: frames that a stage decodes of a video, as the request asks.
        max_video_pixels: pixels of all frames.
        max_items: items of one request.
        fetch_timeout_s: fetching one http(s) item, redirects included. `max_redirects`: hops, each checked anew.
        fetch_wait_s: how long an item waits until its turn to be fetched comes.
        allowed_local_root: directory that `file://` may read from; by default `file://` is refused.
        schemes: schemes of the URLs that clients may send.
        allowed_domains: hosts that http(s) may reach, where there are any: `cdn.example.com` is that host,
            `*.example.com` all below it. denied_domains: hosts that it may not reach.
        allow_private_addresses: let http(s) reach loopback, private and link-local addresses.
        max_parallel_fetches: fetches of the whole process at once. threads: items that are decoded and keyed at once.
            Accounts share both fairly.
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
        require_positive(self, *names, "max_video_s", "max_audio_s", "max_frames", "max_video_pixels", "fetch_wait_s")
        for scheme in self.schemes:
            require_one_of("schemes", scheme, SCHEMES)
        DomainRules(self.allowed_domains, self.denied_domains)  # refuses what is no host name
        if self.max_items < 0 or self.max_redirects < 0:
            raise ConfigError("max_items and max_redirects must not be negative", param="media")


@dataclass(frozen=True)
class BodyPace:
    """How slowly a client may send its body before it is answered 408 and its connection closed.

    Attributes:
        grace_s: seconds before anything is asked of it. bytes_per_s: bytes a second on average after that.
        most_s: seconds for all of the body, however fast.
    """

    grace_s: float = 10.0
    bytes_per_s: int = 16 << 10
    most_s: float = 300.0

    def __post_init__(self) -> None:
        require_positive(self, "grace_s", "bytes_per_s", "most_s")


@dataclass(frozen=True)
class MemoryLimits:
    """What a process may hold of clients' bytes (`proxy/tenants/memory_budget.py`).

    Attributes:
        process_bytes: bodies and media of all requests of one proxy process. An account among others gets half of it
            at most.
    """

    process_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        require_positive(self, "process_bytes")


@dataclass(frozen=True)
class KeyLimits:
    """What one API key may do; where there are no keys, one tenant. 0 means no limit.

    Attributes:
        requests_in_flight: requests of one key that are held at once.
        requests_per_minute: requests of one key that are begun within a minute, on average.
        best_priority: the best (lowest) `priority` that a request of a key gets, whatever it asks for; by default any.
    """

    requests_in_flight: int = 0
    requests_per_minute: int = 0
    best_priority: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_in_flight", "requests_per_minute"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative; 0 means no limit", param=name)

    def shared_by(self, processes: int) -> KeyLimits:
        """What each of so many may do that count for themselves. Rounded up: a limit never becomes 0."""
        return replace(
            self,
            requests_in_flight=-(-self.requests_in_flight // processes),
            requests_per_minute=-(-self.requests_per_minute // processes),
        )


@dataclass(frozen=True)
class AdmissionLimits:
    """The queues in front of the stages (`proxy/admission/queue.py`, `proxy/admission/capacity.py`).

    Attributes:
        single_queue: one queue in order of arrival and no priorities at the stages, to compare with.
        text_queue, media_queue: requests that may wait; beyond it the answer is 429.
        max_wait_s: nobody waits longer, and who would is refused at once.
        media_yields_s: text that arrives up to this much later than a request with media goes first.
        priority_step_s: what one unit of a request's `priority` is worth. priority_limit: larger ones count as this;
            0 to heed none.
        text_share, media_share: share of the capacity that the other modality does not take while both are about.
        sequences_per_instance: sequences prefilling or decoding, where an instance does not report how many.
        prefill_tokens: tokens that one instance may have still to prefill; more where it does more in `prefill_s`.
        prefill_s: seconds of prefilling that one instance may have before it.
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
        require_positive(self, "text_queue", "media_queue", "max_wait_s", "sequences_per_instance", "prefill_tokens")
        require_positive(self, "encodes_per_instance")
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
        ratio: retries per request. floor_per_s: retries a second that may be made in any case. burst: retries at once,
            after a calm.
    """

    ratio: float = 0.2
    floor_per_s: float = 10.0
    burst: int = 256

    def __post_init__(self) -> None:
        if not self.ratio >= 0 or not self.floor_per_s >= 0 or self.burst < 1:
            raise ConfigError("retry.ratio and floor_per_s must not be negative, burst at least 1", param="retry")


@dataclass(frozen=True)
class MigrationLimits:
    """Streams that go on at another instance after theirs is gone (`proxy/generate/given.py`).

    Attributes:
        per_request: how often one stream may.
        per_s: how many a second of one proxy process, in order. burst: at once, after a calm.
        stream_bytes: text and tokens that are kept of one stream; a longer one ends with its instance. process_bytes:
            of all streams of one proxy process.
    """

    per_request: int = 3
    per_s: float = 50.0
    burst: int = 64
    stream_bytes: int = 1 << 20
    process_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        require_positive(self, "per_request", "per_s", "burst", "stream_bytes", "process_bytes")


@dataclass(frozen=True)
class PoisonLimits:
    """When a request body is suspected of killing instances, and for how long it is refused
    (`proxy/stages/suspects.py`).

    Attributes:
        blame_s: a request that was sent to an instance longer ago is not suspected of its death.
        quarantine_s: how long a body is refused at first; doubles each time. quarantine_max_s: how long at most.
        memory_s: how long anything is held against a body. bodies: bodies that are remembered; the oldest are forgotten
            first.
    """

    blame_s: float = 5.0
    quarantine_s: float = 60.0
    quarantine_max_s: float = 3600.0
    memory_s: float = 600.0
    bodies: int = 4096

    def __post_init__(self) -> None:
        require_positive(self, "blame_s", "quarantine_s", "quarantine_max_s", "memory_s", "bodies")


@dataclass(frozen=True)
class RecordLimits:
    """How much one proxy process remembers of requests that have ended, for `epd-serve why`
    (`proxy/records/kept.py`).

    Attributes:
        requests: half of them the newest, a quarter older ones that failed, a quarter older ones that were slow. 0 to
            remember none.
        size_bytes: bytes that they may take, shared out likewise.
    """

    requests: int = 4096
    size_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("requests", "size_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"records.{name} must not be negative", param=f"records.{name}")


@dataclass(frozen=True)
class Slo:
    """What a streamed answer is to keep to, for attainment and goodput on the page and in `GET /rates`; where one of
    the two is named, for steps of the stages, too (`--step-budgets`).

    Attributes:
        ttft_s: until its first token. tpot_s: per token after that.
        judge: of the gaps between its tokens: `p90` (that share of them is within `tpot_s`), another `pNN`, or `mean`.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    judge: str = slo.JUDGE

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"slo.{name} must be greater than 0", param=f"slo.{name}")
        self.objectives()  # refuses a judge that is none

    def objectives(self) -> tuple[slo.Slo, slo.Slo]:
        """These limits with their judge of the gaps, and beside it with the mean."""
        usual = slo.Slo(1e3 * self.ttft_s, 1e3 * self.tpot_s, self.judge)
        return usual, replace(usual, judge=slo.MEAN)


@dataclass(frozen=True)
class Planned:
    """What `epd-serve plan` expects of the deployment, to be shown beside what is measured. 0: nothing was planned.

    Attributes:
        rate_rps: requests a second that it was planned for.
        ttft_s, tpot_s: medians of a streamed answer's time to first token, and of its mean time per token after that.
        attainment: share of the answers within `slo`.
    """

    rate_rps: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    attainment: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate_rps", "ttft_s", "tpot_s", "attainment"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"planned.{name} must not be negative", param=f"planned.{name}")
        if self.attainment > 1:
            raise ConfigError(
                f"planned.attainment is a share, at most 1, not {self.attainment:g}", param="planned.attainment"
            )


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError naming the setting and its choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", param=name)


def require_positive(settings: object, *names: str) -> None:
    """Raises ConfigError naming the first of these fields that is not a positive number."""
    for name in names:
        if not getattr(settings, name) > 0:  # also refuses NaN
            raise ConfigError(f"{name} must be greater than 0, got {getattr(settings, name)}", param=name)
