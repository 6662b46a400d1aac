"""What the proxy is configured with: built once by the composition root, validated once, passed down.

Owns what a deployment is and what its proxy does; how long and how much is `proxy/config/limits.py`'s. Leaves reading
of flags, files and the environment to `deploy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea, ImageTokens
from epd_serve.key_files import read_key, stage_key
from epd_serve.suggestions import unknown
from proxy.config.keys import ApiKeys
from proxy.config.limits import (
    AdmissionLimits,
    BodyPace,
    KeyLimits,
    MediaLimits,
    MemoryLimits,
    MigrationLimits,
    Planned,
    PoisonLimits,
    RecordLimits,
    RetryLimits,
    Slo,
    Timeouts,
)
from proxy.config.tree import Checked, Count, CountFrom0
from proxy.fields.rules import OUR_XARGS, XARGS_REFUSED
from proxy.routing.policy import POLICIES

FORMS = {
    "tenant_header": (re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"), "header name"),
    "otlp_traces_endpoint": (re.compile(r"https?://[^/\s]+/\S*"), "URL, such as http://HOST:4318/v1/traces"),
}
"""Settings that are text of a form, where they are anything."""

MODEL_SLO = re.compile(r"([^,]+)=(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class ModelIdentity:
    """What a feature depends on besides its bytes: part of every key."""

    model: str
    revision: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class ProxyOptions(Checked):
    """What an operator may say of the proxy.

    Attributes:
        max_model_len: context length in tokens that `/v1/models` reports; by default the model's, where it is
            known. Stages have theirs by `--stage-args`.
        admission: who waits in front of the stages.
        retry: how many attempts are repeated over the whole proxy.
        migration: streams that go on at another instance after theirs is gone.
        poison: when a body that instances die of is refused.
        retries: further attempts of one request after a stage failed before the first byte.
        stage_priorities: stages with a language model run with vLLM's priority policy, so that they heed `priority`; by
            default as their flags say.
        max_body_bytes: bytes of one request's body.
        body_pace: how slowly it may come.
        memory: what all requests may hold at once.
        max_n: answers to one prompt.
        max_sequences: answers that one request may ask for, over its prompts.
        max_in_flight: requests held at once; beyond it the answer is 429.
        tenant_header: request header whose value names the tenant, set by a gateway that is trusted to; empty to heed
            none. A request without it belongs to the default tenant.
        shared_features: all tenants share features (they can tell by the time taken that somebody else sent the same
            image). Prefix caches stay apart.
        send_pixels: `auto` sends P and D an item's metadata instead of the media where that is known, `always` the
            media, `never` the metadata alone, as they have no encoder: E then encodes again what gets lost.
        overlap: P and D are called while encoders work: `always` as soon as the metadata of all items is known, `auto`
            too, but D only when the first feature is stored where the tower shares cores with them, or `never`.
        image_parts: most encoders that share one image, where they have nothing else to do and the model's tower takes
            tiles each by itself (InternVL); 1 has each image encoded by one.
        on_missing_feature: `recompute` lets P encode what got lost, `reencode` has an encoder do it again first.
        first_token: `prefill` shows streams the first token of P, after which D goes on, `decode` that of D.
        go_on: how a stream goes on at another instance after its own is gone: `auto` by one prefill of what the client
            has where no field of the request speaks against it, else by sampling those tokens again; `replay` by the
            latter always, token for token what it would have been; `never` ends it.
        max_known_features: how many features the proxy remembers.
        trace_path: JSON-lines file for phase stamps; by default none.
        access_log: file for a line of JSON for each request that has ended, `-` for standard error; by default none.
        recording: file for sizes and times of the requests that were answered, without content, for `epd-serve plan`
            and `epd-bench load`; by default none.
        recording_bytes: most bytes of the recording, and of the `.1` beside it with what is older.
        otlp_traces_endpoint: URL that takes the spans of requests (OTLP over HTTP); by default none are made.
        records: what is remembered of requests that have ended.
        slo: what streamed answers are to keep to, for attainment and goodput; where it is named, stages hold to it.
        model_slos: of single ones of the served models, as `NAME=TTFT:TPOT` in milliseconds. A key's objectives come
            before a model's, a request's (`x-epd-slo-ttft-ms`, `x-epd-slo-tpot-ms`) before both.
        planned: what `epd-serve plan` expects of the deployment; shown beside what is measured.
        policy: how instances are chosen: `first-token`, `least-loaded`, `round-robin` or `power-of-two`.
        prefix_routing: what instances have cached of a prompt counts as done when one is chosen.
        key_limits: what one API key may do at once and per minute.
        strict_fields: answer an unknown field with 400 instead of leaving it out.
        xargs: names that clients may send in `vllm_xargs`, for extensions that the operator loads into the stages.
        trust_request_mm_kwargs: let clients send `mm_processor_kwargs` and `media_io_kwargs`, as vLLM's flag of that
            name, which stages of vLLM 0.32 need, too.
        explain: answer `x-epd-explain: 1` with headers that name path, instances and moments, to any client.
    """

    max_model_len: Count | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    media: MediaLimits = field(default_factory=MediaLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    retry: RetryLimits = field(default_factory=RetryLimits)
    migration: MigrationLimits = field(default_factory=MigrationLimits)
    poison: PoisonLimits = field(default_factory=PoisonLimits)
    retries: CountFrom0 = 2
    stage_priorities: bool | None = None
    max_body_bytes: Count = 96 << 20
    body_pace: BodyPace = field(default_factory=BodyPace)
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    max_n: Count = 64
    max_sequences: Count = 256
    max_in_flight: Count = 2048
    tenant_header: str = ""
    shared_features: bool = False
    send_pixels: Literal["auto", "always", "never"] = "auto"
    overlap: Literal["auto", "always", "never"] = "auto"
    image_parts: Count = 8
    on_missing_feature: Literal["recompute", "reencode"] = "recompute"
    first_token: Literal["prefill", "decode"] = "prefill"
    go_on: Literal["auto", "replay", "never"] = "auto"
    max_known_features: Count = 65_536
    trace_path: str = ""
    access_log: str = ""
    recording: str = ""
    recording_bytes: Count = 64 << 20
    otlp_traces_endpoint: str = ""
    records: RecordLimits = field(default_factory=RecordLimits)
    slo: Slo = field(default_factory=Slo)
    model_slos: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    planned: Planned = field(default_factory=Planned)
    policy: str = "first-token"
    prefix_routing: bool = True
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    explain: bool = False
    strict_fields: bool = False
    xargs: tuple[str, ...] = ()
    trust_request_mm_kwargs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (form, meant) in FORMS.items():
            value = getattr(self, name)
            if value and not form.fullmatch(value):
                raise ConfigError(f"{name} {value!r} is no {meant}", param=name)
        if self.policy not in POLICIES:
            raise ConfigError(unknown("policy", self.policy, POLICIES), param="policy")
        self.slos_of_models()  # refuses what is none
        for name in self.xargs:
            if name in XARGS_REFUSED or name.startswith(OUR_XARGS):
                raise ConfigError(f"xargs: {name} is never taken from clients", param="xargs")

    @property
    def stages_encode(self) -> bool:
        """Whether P and D have an encoder, for what no other stage encodes."""
        return self.send_pixels != "never"

    def slos_of_models(self) -> Mapping[str, tuple[float, float]]:
        """Limits in seconds by name of a model: to the first token, and per token after that.

        Raises:
            ConfigError: one is not of that form.
        """
        found = {}
        for text in self.model_slos:
            match = MODEL_SLO.fullmatch(text)
            name, *limits_ms = match.groups() if match else ("", "0", "0")
            ttft_s, tpot_s = (float(ms) / 1e3 for ms in limits_ms)
            if not (ttft_s and tpot_s):
                raise ConfigError(
                    f"model_slos {text!r}: write NAME=TTFT:TPOT in milliseconds, as my-model=2000:50",
                    param="model_slos",
                )
            found[name] = ttft_s, tpot_s
        return found


@dataclass(frozen=True, kw_only=True)
class ProxySettings(ProxyOptions):
    """All that the proxy goes by: what the operator says, and what follows from the deployment.

    Attributes:
        served_models: names that clients may ask for; the first is the default that `/v1/models` lists first.
        identity: model, revision and dtype as they enter feature keys.
        processes: proxies that share the stages, and so their capacity.
        api_keys: those of clients, as they are at first; None: nobody needs one.
        tls_cert_file, tls_key_file: of the clients' port, PEM; "": it talks plain HTTP.
        modalities: what the model takes (`image`, `video`, `audio`), or None to leave it to the stages to refuse.
        image_tokens: how many tokens the model's encoder makes of an image, by its size.
        arena: path of this host's arena where all stages of the layout use it, else "".
        vllm_version: of the stages, which decides what fields there are; empty where it is not known or not one.
        observed: `/metrics` and `/instances` are on the clients' port, for want of an admin listener.
        stage_key: bearer token that the stages want which somebody else runs, or "".
        key_file: of the key of a deployment on several machines, on this one: what its stages want is made from it.
    """

    served_models: tuple[str, ...]
    identity: ModelIdentity
    processes: int = 1
    api_keys: ApiKeys | None = field(default=None, repr=False)
    tls_cert_file: str = ""
    tls_key_file: str = ""
    modalities: frozenset[str] | None = None
    image_tokens: ImageTokens = field(default_factory=ByArea)
    arena: str = ""
    vllm_version: str = ""
    observed: bool = True
    stage_key: str = field(default="", repr=False)
    key_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.served_models:
            raise ConfigError("the proxy needs at least one served model name", param="served_models")
        for name in self.slos_of_models():
            if name not in self.served_models:
                raise ConfigError(f"model_slos: {unknown('model', name, self.served_models)}", param="model_slos")

    def bearer_of_stages(self) -> str:
        """The token that the stages want, or "". Raises ConfigError where the key cannot be read."""
        if self.stage_key or not self.key_file:
            return self.stage_key
        return stage_key(read_key(self.key_file, "key_file"))

    @property
    def tells_tenants_apart(self) -> bool:
        """Whether there can be two tenants, and so two accounts (`proxy/tenants.py`): one alone has nobody to
        leave anything for. There can be another key at any time."""
        return self.api_keys is not None or bool(self.tenant_header)
