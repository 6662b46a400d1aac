"""Deadlines and bounds of the proxy, one value for each thing that they bound.

Each holds to the types and bounds of its fields, and names the field where that fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from epd_serve import slo
from epd_serve.errors import ConfigError
from epd_serve.suggestions import unknown
from proxy.config.tree import Checked, Count, CountFrom0, NotNegative, Positive

SCHEMES = ("data", "http", "https", "file")
DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class DomainRules:
    """Which hosts media may be fetched from, by name: `cdn.example.com` is that host, `*.example.com` all below it.
    Denied beats allowed; no allowed domains at all means every one. A name says nothing about the address behind it:
    addresses are `proxy/media/fetch.py`'s to judge, after this.

    Raises:
        ConfigError: a pattern that is no host name.
    """

    def __init__(self, allowed: Iterable[str], denied: Iterable[str]) -> None:
        self._allowed = [_domain(text) for text in allowed]
        self._denied = [_domain(text) for text in denied]

    def admit(self, host: str) -> bool:
        """Whether `host`, as it stands in the URL (ASCII), may be asked."""
        name = host.lower().rstrip(".")
        if any(fnmatchcase(name, pattern) for pattern in self._denied):
            return False
        return not self._allowed or any(fnmatchcase(name, pattern) for pattern in self._allowed)


def _domain(text: str) -> str:
    try:
        pattern = text.rstrip(".").encode("idna").decode("ascii").lower()
    except UnicodeError:
        pattern = ""
    if not DOMAIN.fullmatch(pattern):
        raise ConfigError(f"domain {text!r} is no host name; write cdn.example.com or *.example.com", param="domains")
    return pattern


@dataclass(frozen=True)
class Timeouts(Checked):
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

    connect_s: Positive = 5.0
    encode_s: Positive = 120.0
    encode_silence_s: Positive = 10.0
    stage_silence_s: Positive = 10.0
    first_byte_s: Positive = 300.0
    idle_s: Positive = 120.0
    total_s: Positive = 1800.0
    instance_wait_s: NotNegative = 60.0


@dataclass(frozen=True)
class MediaLimits(Checked):
    """Bounds on what a client may make the proxy load.

    Attributes:
        max_bytes: bytes of one item.
        max_total_bytes: bytes of all items of one request.
        max_pixels: width x height of an image or a video's frames, checked on headers before anything decodes them.
        max_video_s, max_audio_s: length of a clip in seconds, where its container tells.
        max_frames: frames that a stage decodes of a video, as the request asks.
        max_video_pixels: pixels of all frames.
        max_items: items of one request.
        fetch_timeout_s: fetching one http(s) item, redirects included.
        max_redirects: hops, each checked anew.
        fetch_wait_s: how long an item waits until its turn to be fetched comes.
        allowed_local_root: directory that `file://` may read from; by default `file://` is refused.
        schemes: schemes of the URLs that clients may send.
        allowed_domains: hosts that http(s) may reach, where there are any: `cdn.example.com` is that host,
            `*.example.com` all below it.
        denied_domains: hosts that it may not reach.
        allow_private_addresses: let http(s) reach loopback, private and link-local addresses.
        max_parallel_fetches: fetches of the whole process at once.
        threads: items that are decoded and keyed at once. Accounts share both fairly.
    """

    max_bytes: Count = 32 << 20
    max_total_bytes: Count = 64 << 20
    max_pixels: Count = 36_000_000
    max_video_s: Positive = 600.0
    max_audio_s: Positive = 3600.0
    max_frames: Count = 256
    max_video_pixels: Count = 600_000_000
    max_items: CountFrom0 = 16
    fetch_timeout_s: Positive = 10.0
    fetch_wait_s: Positive = 5.0
    max_redirects: CountFrom0 = 3
    allowed_local_root: str = field(default="", metadata={"alias": "media_root"})
    schemes: tuple[str, ...] = SCHEMES
    allowed_domains: tuple[str, ...] = ()
    denied_domains: tuple[str, ...] = ()
    allow_private_addresses: bool = field(default=False, metadata={"alias": "allow_private_media"})
    max_parallel_fetches: Count = 32
    threads: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise ConfigError(unknown("scheme", scheme, SCHEMES), param="schemes")
        DomainRules(self.allowed_domains, self.denied_domains)  # refuses what is no host name


@dataclass(frozen=True)
class BodyPace(Checked):
    """How slowly a client may send its body before it is answered 408 and its connection closed.

    Attributes:
        grace_s: seconds before anything is asked of it.
        bytes_per_s: bytes a second on average after that.
        most_s: seconds for all of the body, however fast.
    """

    grace_s: Positive = 10.0
    bytes_per_s: Count = 16 << 10
    most_s: Positive = 300.0


@dataclass(frozen=True)
class MemoryLimits(Checked):
    """What a process may hold of clients' bytes (`proxy/tenants.py`).

    Attributes:
        process_bytes: bodies and media of all requests of one proxy process. An account among others gets half of it at
            most.
    """

    process_bytes: Count = 2 << 30


@dataclass(frozen=True)
class KeyLimits(Checked):
    """What one API key may do; where there are no keys, one tenant. 0 means no limit.

    Attributes:
        requests_in_flight: requests of one key that are held at once.
        requests_per_minute: requests of one key that are begun within a minute, on average.
        tokens_per_minute: tokens of its prompts and media that are begun within a minute, on average.
        best_priority: the best (lowest) `priority` that a request of a key gets, whatever it asks for; by default any.
        weight: its share of the stages, over those of others that want some.
        slo_ttft_ms, slo_tpot_ms: its objectives, instead of the model's and the deployment's.
    """

    requests_in_flight: CountFrom0 = 0
    requests_per_minute: CountFrom0 = 0
    tokens_per_minute: CountFrom0 = 0
    best_priority: int | None = None
    weight: Count = 1
    slo_ttft_ms: CountFrom0 = 0
    slo_tpot_ms: CountFrom0 = 0

    def shared_by(self, processes: int) -> KeyLimits:
        """What each of so many may do that count for themselves. Rounded up: a limit never becomes 0."""
        return replace(
            self,
            requests_in_flight=-(-self.requests_in_flight // processes),
            requests_per_minute=-(-self.requests_per_minute // processes),
            tokens_per_minute=-(-self.tokens_per_minute // processes),
        )


@dataclass(frozen=True)
class AdmissionLimits(Checked):
    """The queues in front of the stages (`proxy/admission/queue.py`, `proxy/admission/gate.py`).

    Attributes:
        order: whose turn is first: `deadline` (least slack to the TTFT SLO), `fcfs` or `sjf`, to compare with.
        text_queue, media_queue: requests that may wait; beyond it the answer is 429.
        max_wait_s: nobody waits longer, and who would is refused at once.
        priority_step_s: what one unit of a request's `priority` is worth.
        priority_limit: larger ones count as this; 0 to heed none.
        sequences_per_instance: requests at an instance that does not report how many it runs.
        encode_s, prefill_s: seconds of its own work that an encoder, or one that prefills, may have before it gets
            more.
        prefill_tokens: the same in tokens, while nobody knows how many it prefills a second.
        encodes_per_instance: requests at one encoder, each until it is prefilled.
    """

    order: Literal["deadline", "fcfs", "sjf"] = "deadline"
    text_queue: Count = 2048
    media_queue: Count = 1024
    max_wait_s: Positive = 60.0
    priority_step_s: NotNegative = 5.0
    priority_limit: CountFrom0 = 10
    sequences_per_instance: Count = 1024
    encode_s: Positive = 0.05
    prefill_s: Positive = 0.05
    prefill_tokens: Count = 8192
    encodes_per_instance: Count = 16


@dataclass(frozen=True)
class RetryLimits(Checked):
    """How many attempts may be repeated over the whole proxy (`proxy/stages/circuits.py`).

    Attributes:
        ratio: retries per request.
        floor_per_s: retries a second that may be made in any case.
        burst: retries at once, after a calm.
    """

    ratio: NotNegative = 0.2
    floor_per_s: NotNegative = 10.0
    burst: Count = 256


@dataclass(frozen=True)
class MigrationLimits(Checked):
    """Streams that go on at another instance after theirs is gone (`proxy/stages/history.py`).

    Attributes:
        per_request: moves of one stream.
        per_s: moves a second of one proxy process, in order.
        burst: moves at once, after a calm.
        stream_bytes: text and tokens that are kept of one stream; a longer one ends with its instance.
        process_bytes: text and tokens that are kept of all streams of one proxy process.
    """

    per_request: Count = 3
    per_s: Positive = 50.0
    burst: Count = 64
    stream_bytes: Count = 1 << 20
    process_bytes: Count = 256 << 20


@dataclass(frozen=True)
class PoisonLimits(Checked):
    """When a request body is suspected of killing instances, and for how long it is refused
    (`proxy/stages/poison.py`).

    Attributes:
        blame_s: a request that was sent to an instance longer ago is not suspected of its death.
        quarantine_s: how long a body is refused at first; doubles each time.
        quarantine_max_s: how long a body is refused at most.
        memory_s: how long anything is held against a body.
        bodies: bodies that are remembered; the oldest are forgotten first.
    """

    blame_s: Positive = 5.0
    quarantine_s: Positive = 60.0
    quarantine_max_s: Positive = 3600.0
    memory_s: Positive = 600.0
    bodies: Count = 4096


@dataclass(frozen=True)
class RecordLimits(Checked):
    """How much one proxy process remembers of requests that have ended, for `epd-serve why`
    (`proxy/records/records.py`).

    Attributes:
        requests: half of them the newest, a quarter older ones that failed, a quarter older ones that were slow. 0 to
            remember none.
        size_bytes: bytes that they may take, shared out likewise.
    """

    requests: CountFrom0 = 4096
    size_bytes: CountFrom0 = 8 << 20


@dataclass(frozen=True)
class Slo(Checked):
    """What a streamed answer is to keep to, for attainment and goodput on the page and in `GET /rates`; where one of
    the two is named, for steps of the stages, too (`--step-budgets`).

    Attributes:
        ttft_s: until its first token; by default 2 s, which stages do not hold to.
        tpot_s: per token after that; by default 0.05 s, which stages do not hold to.
        judge: how the gaps between its tokens are judged: `p90` (that share of them is within `tpot_s`), another
            `pNN`, or `mean`.
    """

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    judge: str = slo.JUDGE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objectives()  # refuses a judge that is none

    @property
    def named(self) -> bool:
        """Whether one of the two limits is."""
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def limits_s(self) -> tuple[float, float]:
        """To the first token, and per token after that."""
        return self.ttft_s or 2.0, self.tpot_s or 0.05

    def objectives(self) -> tuple[slo.Slo, slo.Slo]:
        """These limits with their judge of the gaps, and beside it with the mean."""
        ttft_s, tpot_s = self.limits_s
        usual = slo.Slo(1e3 * ttft_s, 1e3 * tpot_s, self.judge)
        return usual, replace(usual, judge=slo.MEAN)


@dataclass(frozen=True)
class Planned(Checked):
    """What `epd-serve plan` expects of the deployment, to be shown beside what is measured. 0: nothing was planned.

    Attributes:
        rate_rps: requests a second that it was planned for.
        ttft_s: median of a streamed answer's time to first token.
        tpot_s: median of its mean time per token after that.
        attainment: share of the answers within `slo`.
    """

    rate_rps: NotNegative = 0.0
    ttft_s: NotNegative = 0.0
    tpot_s: NotNegative = 0.0
    attainment: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
