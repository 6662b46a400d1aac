"""What the head of a cluster and its joined stages say to each other: JSON over HTTP, frozen types, one file.

    POST /cluster/join   JoinRequest → JoinAnswer      refused with a code that names what differs
    POST /cluster/beat   Beat                          every `beat_s`, and at once when the stage goes up or down
    POST /cluster/leave  Leave → Left                  drained, then forgotten

All three carry `Authorization: Bearer <cluster key>`. A member is one *agent*: the process that runs `epd-serve stage
--join` and restarts its vLLM server as often as needed; each of those lives has an incarnation, which the beats carry.
The head decides names and addresses, the stage decides where it listens.
"""

from __future__ import annotations

import re

import msgspec

from epd_serve.errors import EpdError
from epd_serve.roles import Role

JOIN, BEAT, LEAVE = "/cluster/join", "/cluster/beat", "/cluster/leave"

BEAT_S = 1.0
MISSED_S = 5.0
"""Silence after which the head sends a member nothing more; its next beat brings it back."""

MAX_DRAIN_S = 120.0
"""Longest farewell: a head waits no longer for what a leaving member has in flight."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of members and of their lives."""


class JoinRequest(msgspec.Struct, frozen=True):
    """A stage introduces itself.

    Attributes:
        agent: random id of the process that asks; the same one may join again, another one may not use its name.
        host: address that every other machine of the cluster reaches this stage at.
        url: of its OpenAI server. kv_endpoint, kv_workers: as in `StageWiring`, "" where the role has none.
        devices, cpu_cores: as in `Instance`.
        instance: wanted name, or "". instance_fixed: the operator's choice; refuse rather than give another one.
        model: directory name or hub name; revision: digest of the weights, "" for a hub name.
        processing: its vLLM flags that change what features or KV mean, as canonical text, or "".
        versions: what must be equal on all machines, by name: `epd-serve`, `vllm`, `device`.
        incarnation: of the vLLM server that runs already (the head was restarted), else "".
        answer_flags: as in `Instance`.
    """

    role: Role
    agent: str
    host: str
    url: str
    model: str
    revision: str = ""
    processing: str = ""
    tp: int = 1
    devices: list[int] = []
    cpu_cores: list[int] = []
    versions: dict[str, str] = {}
    instance: str = ""
    instance_fixed: bool = False
    kv_endpoint: str = ""
    kv_workers: str = ""
    incarnation: str = ""
    answer_flags: tuple[str, ...] | None = None


class ClusterSettings(msgspec.Struct, frozen=True):
    """What the head decides for all members. A member that gets other settings restarts its vLLM server.

    Attributes:
        served_model: name that clients use.
        events_publish, events_listen: ZMQ addresses of the bus, for those who announce and for those who listen.
        mooncake_master: `host:port` of the feature store's second tier, or "" without one.
        mooncake_protocol: for features and KV on CPU and CUDA (`tcp` or `rdma`); NPUs use `ascend`.
        feature_path: `host`, `device`, or `auto`: straight into device memory on NPUs with a second tier.
    """

    served_model: str
    events_publish: str
    events_listen: str
    mooncake_master: str = ""
    mooncake_protocol: str = "tcp"
    kv_grouping: str = "adaptive"
    kv_packet_floor_kib: int = 1024
    recompute_limit: int = 2
    feature_path: str = "host"
    beat_s: float = BEAT_S


class JoinAnswer(msgspec.Struct, frozen=True):
    """`id` is the member's name from now on; kv_peers: of the D's known so far, to warm links."""

    id: str
    settings: ClusterSettings
    kv_peers: list[tuple[str, ...]] = []


class Beat(msgspec.Struct, frozen=True):
    """`number` grows with every beat of an agent: one that was overtaken on its way is ignored."""

    id: str
    agent: str
    number: int
    incarnation: str
    up: bool
    reason: str = ""


class Leave(msgspec.Struct, frozen=True):
    """`drain_s`: how long requests in flight may go on."""

    id: str
    agent: str
    drain_s: float


class Left(msgspec.Struct, frozen=True):
    drained: bool


class JoinRefusedError(EpdError):
    """This stage cannot be a member. `code` says what differs; trying again without a change is useless."""

    status = 409
    type = "invalid_request_error"
    code = "join_refused"


class NotAMemberError(EpdError):
    """The head does not know this agent (any more), or gave its name to another: join again."""

    status = 404
    type = "not_found_error"
    code = "not_a_member"
