"""Every message that crosses a process boundary of ours: frozen, tagged, versioned, decoded from explicit unions.

msgpack through msgspec; nothing is ever unpickled from a socket. Channels:

* announcements, stages → consumers and proxies (PUB/SUB): `FeatureExpected`, `FeatureMade`, `FeatureReady`,
  `FeatureFailed`, `FeaturePending` from encoders, `FeatureMissing` from consumers, `StoreReport` from all that have to
  do with features, `KvReport` from the workers of every stage that sends KV, `StageReport` from the scheduler of every
  stage.
* transfer control, D scheduler ↔ P scheduler (DEALER/ROUTER): `Queued`, `Ready`, `Cancel` | `Alive`, `Refused`,
  `CancelAck`, `FirstToken`.
* transfer data, P worker ↔ D worker (DEALER/ROUTER): `Hello`, `Probe`, `Packet`, `Done` | `HelloAck`, `HelloRefused`,
  `Credit`. On the same socket of D's worker, from D's scheduler: `FirstToken`.
* features to the device, scheduler ↔ workers of who prefills (ROUTER/DEALER): `SlabCopy` | `SlabOpened`, `SlabCopied`.
* features from card to card, scheduler of who prefills ↔ encoder (DEALER/ROUTER): `Push` | `Pushed`.

A transfer is named by `TransferKey`: the proxy's transfer id and the child (vLLM fans `n` and prompt lists out under
one set of transfer params), so both ends of one child agree without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

VERSION = 6

MISSING_XARG = "epd_missing"
"""Proxy → P, in `vllm_xargs`: comma-separated keys of items that no encoder produced; P need not wait for them."""
ALL_MISSING = "*"
"""Instead of the keys: every item. Where a request has processor options only vLLM knows the items' names."""

ON_MISSING_XARG = "epd_on_missing"
"""Proxy → P, PD, D, in `vllm_xargs`: `fail` where a lost feature must fail the request instead of being recomputed,
because the stage has no pixels (it was sent metadata only) or because the policy is to encode again."""
ON_MISSING_FAIL = "fail"

ENCODE_AGAIN_XARG = "epd_encode_again"
"""Proxy → E, in `vllm_xargs`: comma-separated keys that a consumer could not get. E must not take its own word, or the
store's index, for it that they are there."""

PARTS_XARG = "epd_parts"
"""Proxy → P, PD, D, in `vllm_xargs`: comma-separated keys of parts (`store.keys.part_keys`), in order. An item whose
parts are named comes from these features, one behind the other, and has none of its own."""

PROMPT_XARG = "epd_prompt"
"""Proxy → P, PD, D, in `vllm_xargs`: the digests at which the prompt can be cut (`PromptBlocks.nodes`), base64."""

WHOLE_TOPIC = b"whole:"
"""Before the id of an instance: who subscribes to that has missed a `CacheReport` and wants to hear everything."""

FIRST_TOKEN = "first_token"
"""Proxy → P, D, in `kv_transfer_params`: True where P's first token is shown to the client and D goes on after it."""
GOES_ON_AFTER = "goes_on_after"
"""Proxy → all stages, in `kv_transfer_params`, with or without a transfer: the tokens, a list of int, that the client
has of this answer. The stage's answer begins with them, and goes on after them."""
REPLAY = "replay"
"""Beside it, to those that decode: True where the tokens are to be sampled again, one by one, because something hangs
on it (a seed, a grammar, penalties); else they are prefilled like a prompt, by P as well, which is told them then."""
STARTING = "starting"
"""D → P, for the reason of `HelloRefused`: it may be capturing graphs, and the device is not to be touched."""
TOKEN_SENT = "epd-serve: sent token "
KV_NOT_SENT = "epd-serve: no KV: "
"""P → proxy, in `stop_reason` of such an answer that ended at its one token: what follows is the token, or why there is
no KV for D. Streams have no field of vLLM's for `kv_transfer_params`."""


class TransferKey(msgspec.Struct, frozen=True, array_like=True):
    """One prompt's KV on its way: the proxy's id of the attempt, and the request id within the stages."""

    transfer_id: str
    child: str


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# --- announcements --------------------------------------------------------------------------------------------------


class FeatureExpected(_Message, frozen=True):
    """The encoder begins to work on these items. From now on their requests can be prepared wherever they go next: what
    stands in for the media is known, and what becomes of each feature will be announced.

    Attributes:
        items: key → metadata, as in `FeatureReady`; only items that have some.
    """

    items: dict[str, dict[str, Any]]
    incarnation: str


class FeatureMade(_Message, frozen=True):
    """The encoder has queued the last operation on this feature, and may write it into the memory of others' devices.

    Attributes:
        push: where it takes `Push`.
    """

    key: str
    nbytes: int
    shape: list[int]
    dtype: str
    instance: str
    incarnation: str
    push: str


class FeatureReady(_Message, frozen=True):
    """Published only after the put succeeded. A hint: the store's index is the truth.

    Attributes:
        host: the arena that holds it (`StageWiring.arena_id`), whose consumers need no second tier.
        pooled: the second tier holds it too.
        metadata: what a consumer needs in place of the media, e.g. `{"image_grid_thw": [[1, 4, 4]]}`; empty when this
            vLLM cannot say (consumers then need the media itself).
    """

    key: str
    nbytes: int
    incarnation: str
    host: str = ""
    pooled: bool = False
    metadata: dict[str, Any] = {}


class FeatureFailed(_Message, frozen=True):
    """The encoder could not make or store this feature: consumers stop waiting and recompute."""

    key: str
    reason: str


class FeaturePending(_Message, frozen=True):
    """E holds these items, queued, running or being stored: consumers renew their deadlines."""

    keys: list[str]
    incarnation: str


class FeatureMissing(_Message, frozen=True):
    """A consumer failed this request for want of features. `request_id` begins with the proxy's id of the request."""

    request_id: str
    keys: list[str]
    cause: str


class StoreReport(_Message, frozen=True):
    """What one instance sees of the MM Store: on change at most every 50 ms, else every 500 ms.

    Attributes:
        capacity_bytes, used_bytes, leased: of its host's arena.
        pool: state of the second tier as seen here: `none`, `up` or `down`.
        waiting_puts: features that wait for room (encoders).
        encoding: items that this encoder holds.
        counters: monotonic counts of this life, e.g. `encoded`, `encode_skipped`, `fetched`, `recomputed.deadline`.
        seq: grows by one per report of this life; `/instances` shows it, so that one can wait for counts of later.
    """

    instance: str
    incarnation: str
    capacity_bytes: int
    used_bytes: int
    leased: int
    pool: str = "none"
    waiting_puts: int = 0
    encoding: int = 0
    counters: dict[str, int] = {}
    seq: int = 0


FEW_PROMPT_TOKENS = 16
"""A step that computes fewer ends a prompt whose KV came from elsewhere or was cached: it says nothing of how fast
prompts are computed, which is asked of a D once it becomes a P."""


class StageReport(_Message, frozen=True):
    """How busy one instance is, as its scheduler sees it: on change at most every 50 ms, else every 500 ms, because an
    idle engine does not step (the global instance status table of the EPD-Serve paper, §3.4).

    Attributes:
        seq: grows by one per report of this life.
        waiting, running: requests; deferred ones (no features or no KV yet) wait.
        max_running: how many it runs at once at most (vLLM's --max-num-seqs); 0 while unknown.
        pending_prompt_tokens: prompt tokens of waiting and running requests that are not computed yet.
        pending_item_tokens: tokens of media items that this instance has still to encode.
        kv_used: fraction of its KV blocks in use, 0 to 1; 0 where it has none.
        kv_tokens: how many tokens its KV cache holds; 0 where it has none.
        step_s: mean seconds of a recent step that did something; 0 before the first.
        prompt_tokens_per_s, item_tokens_per_s: done per second of busy time, lately; 0 while unknown. Steps that
            compute fewer prompt tokens than `FEW_PROMPT_TOKENS` do not count.
        decode_tokens_per_s: tokens generated per second and running request, lately; 0 while unknown.
        decode_step_s: seconds of a step with decodes, lately; 0 where nothing decodes, or no SLO is named.
        token_budget, item_budget: prompt tokens, and tokens of media items, that its last step was let have
            (`epd_serve/budgets.py`); 0 where no SLO is named.
        held_steps: steps so far whose budget left something for the next ones.
        shared_tokens: prompt tokens of a step, of which none of several requests takes more than its part; 0 where
            whoever is first takes what it needs.
    """

    instance: str
    incarnation: str
    seq: int
    waiting: int = 0
    running: int = 0
    pending_prompt_tokens: int = 0
    pending_item_tokens: int = 0
    kv_used: float = 0.0
    kv_tokens: int = 0
    step_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    item_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    max_running: int = 0
    decode_step_s: float = 0.0
    token_budget: int = 0
    item_budget: int = 0
    held_steps: int = 0
    shared_tokens: int = 0


class PromptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Which blocks a prompt is made of: what a stage, which has its tokens, tells the front doors, which have not.

    Attributes:
        nodes: as `PROMPT_XARG` had them: 8 bytes each, of the prompt up to that place, the whole one last.
        blocks: hashes of its full blocks in order, packed (`epd_serve.cache_ledger.packed`).
        grown: they are those of the prompt and its answer; `nodes` is then the last node alone.
    """

    nodes: bytes
    blocks: bytes
    grown: bool = False


class CacheReport(_Message, frozen=True):
    """What has changed in the prefix cache of one instance: at most every 50 ms, and only when something has.

    A hint: a block may be gone before this is read. Hashes depend on model, media, tenant (salt) and adapter, so that
    equal ones are equal KV.

    Attributes:
        seq: grows by one per message of this life. Who misses one asks for the whole (`WHOLE_TOPIC`).
        block_tokens: tokens of a block.
        stored, removed: hashes, packed; none is in both.
        part: of an account of the whole cache: `first` (forget what was known), `more`; "" for changes.
        prompts: that this instance has been given.
    """

    instance: str
    incarnation: str
    seq: int
    block_tokens: int
    stored: bytes = b""
    removed: bytes = b""
    part: str = ""
    prompts: list[PromptBlocks] = []


class KvLink(msgspec.Struct, frozen=True):
    """One link of a sending worker, as it is now and since the worker's start. Times are this worker's own.

    Attributes:
        peer: `D0`, the receiving instance; rank: of its worker.
        state: `opening` (never up so far), `up`, `down`; reason: why it is not up, or why its transport is not the
            first choice.
        transport: `shm`, `mooncake/tcp`, …; "" while it is not up.
        setup_s, s_per_byte: the line t = a + b·bytes fitted to its packets (`epd_serve.kv.grouping.LinkCost`).
        queued_bytes: packets not yet sent.
        transfers, failed, cancelled: ended so far; the latter two are not in `transfers`.
        retries: connections made again after a failure.
        busy_s: time spent moving packets.
        exposed_s: summed over transfers, from the end of the prompt's prefill to DONE.
        transfer_s: summed over transfers, the time their packets took on the link.
    """

    peer: str
    rank: int
    state: str
    reason: str = ""
    transport: str = ""
    setup_s: float = 0.0
    s_per_byte: float = 0.0
    queued_bytes: int = 0
    packets: int = 0
    layers: int = 0  # summed over packets: layers / packets is the mean g
    bytes: int = 0
    transfers: int = 0
    failed: int = 0
    cancelled: int = 0
    retries: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    transfer_s: float = 0.0


class KvReport(_Message, frozen=True):
    """What one sending worker says of its links: on change at most every 200 ms, else every second.

    Attributes:
        rank: tensor-parallel rank of the worker.
        grouping: the mode in force, e.g. `adaptive`.
        layer_s: seconds per layer of the last measured step.
        open: transfers that have not ended, of prompts that are computed or being computed. That there is one, or
            none any more, is said within 50 ms.
    """

    instance: str
    incarnation: str
    rank: int
    grouping: str
    layer_s: float
    links: list[KvLink]
    open: int = 0


# --- transfer control, D scheduler → P scheduler --------------------------------------------------------------------


class Queued(_Message, frozen=True):
    """D holds the request but has no blocks for it yet; renews P's patience."""

    keys: list[TransferKey]


class Ready(_Message, frozen=True):
    """D reserved blocks: P may admit the request and push.

    Attributes:
        incarnation: the P life this is meant for; another life refuses it.
        source: instance id and incarnation of D, `D0:1f3c…`.
        blocks: D's block ids for the whole prompt, in order.
        start_token: first prompt token D lacks (block-aligned; earlier ones came from its prefix cache).
        prompt_tokens, prompt_hash: what D tokenised; P refuses a transfer whose prompt differs.
        endpoints: data endpoints of D's workers, by rank.
    """

    key: TransferKey
    incarnation: str
    source: str
    blocks: list[int]
    start_token: int
    prompt_tokens: int
    prompt_hash: str
    endpoints: list[str]


class Cancel(_Message, frozen=True):
    """D gives the transfer up. Its blocks are not reused before `CancelAck`, `Done`, or proof that P is gone."""

    key: TransferKey


# --- transfer control, P scheduler → D scheduler --------------------------------------------------------------------


class Alive(_Message, frozen=True):
    """Heartbeat: P still holds these transfers."""

    keys: list[TransferKey]


class Refused(_Message, frozen=True):
    """P does not serve this transfer, or not any more; nothing is or will be written."""

    key: TransferKey
    reason: str


class CancelAck(_Message, frozen=True):
    """No write for this transfer is in flight and none will start. `token`: as `FirstToken`, where there is one."""

    key: TransferKey
    token: int | None = None


class FirstToken(_Message, frozen=True):
    """What P has sampled after the prompt, which the client may have by now: D goes on after it.

    Repeated while P holds the transfer; afterwards its answer to READY says it. D's scheduler hands it on to D's
    workers, in whose next step it would be told anyway.
    """

    key: TransferKey
    token: int


# --- transfers, D scheduler → D worker, and back --------------------------------------------------------------------


class Expect(_Message, frozen=True):
    """Blocks are reserved for this transfer. Packets of others are dropped, so P hears of the blocks (READY) when every
    worker has answered; the step that tells the worker of the request may begin later."""

    key: TransferKey


class Expecting(_Message, frozen=True):
    """The worker takes packets of this transfer from now on."""

    key: TransferKey


# --- transfer data, P worker → D worker -----------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message on a link: what must agree for KV bytes to mean the same on both ends.

    Attributes:
        node: of the worker that sends it. Shared memory joins workers of one node only.
    """

    version: int
    source: str
    transport: str
    shape: dict[str, Any]
    staging: str = ""
    staging_bytes: int = 0
    node: str = "local"


class Packet(_Message, frozen=True):
    """Layers of one or several transfers wait in the sender's staging memory (shared-memory transport only).

    Attributes:
        seq: number on this connection, growing; returned in `Credit`. A receiver obeys each once.
        offset: where the packet's bytes start in the staging memory.
        layers: first and one past the last layer.
        parts: per transfer (first destination block, blocks). Bytes lie per layer, per region, per part, per run.
    """

    seq: int
    offset: int
    layers: tuple[int, int]
    parts: list[tuple[TransferKey, list[tuple[int, int]]]]


class Probe(_Message, frozen=True):
    """Bytes of no meaning, staged like a packet's: copied to scratch memory, answered by `Credit`."""

    seq: int
    offset: int
    nbytes: int


class Done(_Message, frozen=True):
    """Last message of a transfer from this sender; follows every write.

    Attributes:
        packets: staged packets of this connection that had a part in the transfer; a receiver that saw another number
            lost one (0 where packets need no message).
        senders: how many workers of P send to this worker of D; the transfer is over when all of them said so.
    """

    key: TransferKey
    ok: bool
    reason: str = ""
    packets: int = 0
    senders: int = 1


# --- transfer data, D worker → P worker -----------------------------------------------------------------------------


class HelloAck(_Message, frozen=True):
    """The link is open.

    Attributes:
        target: instance and incarnation of D, `D0:1f3c…`.
        session, bases: of one-sided transports; bases are region addresses.
        scratch: address and bytes of memory that probes may write at any time.
        shape: D's, from which P sees which of its heads travel on this link.
        node: of D.
    """

    target: str
    session: str = ""
    bases: list[int] = []
    scratch: tuple[int, int] = (0, 0)
    shape: dict[str, Any] = {}
    node: str = "local"


class HelloRefused(_Message, frozen=True):
    """The ends do not match; `reason` says in what. Or D is `STARTING`: the same hello may be accepted later."""

    reason: str


class Credit(_Message, frozen=True):
    """The packet's staging memory may be used again."""

    seq: int


# --- features to the device, scheduler → workers, and back -----------------------------------------------------------


class SlabOpened(_Message, frozen=True):
    """This rank has a slab of `nbytes` device memory for features, and copies from now on what it is told to.

    Attributes:
        session, base: how encoders write to it: its Transfer Engine's name and the slab's address; "" where none can.
    """

    rank: int
    nbytes: int
    session: str = ""
    base: int = 0


class SlabCopy(_Message, frozen=True):
    """Copy a feature, which the scheduler has pinned, from the arena to a place in the slab. Of no bytes: say when this
    rank has done all that may read what lay there.

    Attributes:
        job: a number, which grows.
        arena_at, slab_at, nbytes: from where to where.
        freed_in: the last step in which places were given back: what was queued before it may still read them.
    """

    job: int
    arena_at: int
    slab_at: int
    nbytes: int
    freed_in: int


class SlabCopied(_Message, frozen=True):
    """The bytes lie on the device of this rank: whatever its model queues from now on sees them."""

    job: int
    rank: int


# --- features from card to card, scheduler of who prefills → encoder, and back ---------------------------------------


class Push(_Message, frozen=True):
    """Write this feature to these places, which nobody else uses until the answer.

    Attributes:
        job: a number of the asking life, which grows.
        targets: of each rank, the session of its Transfer Engine and the address.
    """

    job: int
    key: str
    nbytes: int
    targets: list[tuple[str, int]]


class Pushed(_Message, frozen=True):
    """What became of it.

    Attributes:
        wrote: `all`: it is there, on every rank; `none`: no write was begun, and none will be; `some`: a write failed,
            and may still land.
        reason: why it is not there.
    """

    job: int
    wrote: Literal["all", "none", "some"]
    reason: str = ""


Announcement = (
    FeatureExpected
    | FeatureMade
    | FeatureReady
    | FeatureFailed
    | FeaturePending
    | FeatureMissing
    | StoreReport
    | KvReport
    | StageReport
    | CacheReport
)
ToPrefillScheduler = Queued | Ready | Cancel
ToDecodeScheduler = Alive | Refused | CancelAck | FirstToken
ToDecodeControl = ToDecodeScheduler | Expecting
FromDecodeControl = ToPrefillScheduler | Expect | FirstToken
ToDecodeWorker = Hello | Probe | Packet | Done | Expect | FirstToken
ToPrefillWorker = HelloAck | HelloRefused | Credit
FromSlabWorker = SlabOpened | SlabCopied

encode: Callable[[_Message], bytes] = msgspec.msgpack.Encoder().encode
"""msgpack bytes of one message."""

announcements: msgspec.msgpack.Decoder[Announcement] = msgspec.msgpack.Decoder(Announcement)
to_prefill_scheduler: msgspec.msgpack.Decoder[ToPrefillScheduler] = msgspec.msgpack.Decoder(ToPrefillScheduler)
to_decode_scheduler: msgspec.msgpack.Decoder[ToDecodeScheduler] = msgspec.msgpack.Decoder(ToDecodeScheduler)
to_decode_control: msgspec.msgpack.Decoder[ToDecodeControl] = msgspec.msgpack.Decoder(ToDecodeControl)
to_decode_worker: msgspec.msgpack.Decoder[ToDecodeWorker] = msgspec.msgpack.Decoder(ToDecodeWorker)
to_prefill_worker: msgspec.msgpack.Decoder[ToPrefillWorker] = msgspec.msgpack.Decoder(ToPrefillWorker)
to_slab_worker: msgspec.msgpack.Decoder[SlabCopy] = msgspec.msgpack.Decoder(SlabCopy)
from_slab_worker: msgspec.msgpack.Decoder[FromSlabWorker] = msgspec.msgpack.Decoder(FromSlabWorker)
to_encoder: msgspec.msgpack.Decoder[Push] = msgspec.msgpack.Decoder(Push)
from_encoder: msgspec.msgpack.Decoder[Pushed] = msgspec.msgpack.Decoder(Pushed)

DecodeError = msgspec.DecodeError


def report_topic(instance: str) -> bytes:
    """What every `StageReport` of this instance begins with, and nothing else that it announces."""
    whole = encode(StageReport(instance, "", 0))
    return whole[: whole.index(b"\xabincarnation")]
