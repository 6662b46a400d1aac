"""Connects the instances of one launch: ports, sockets, arena; and makes the plan of each life of each stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.host.rundir import RunDir
from deploy.memory.shared_memory import SharedMemory
from deploy.plan.blueprint import Blueprint
from deploy.plan.core_plan import order_for
from epd_serve.answer_flags import answer_flags
from epd_serve.instances import Instance
from epd_serve.placement import InstancePlan
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring, worker_endpoints

STAGE_HOST = "127.0.0.1"
"""Stages bind loopback: the proxy is their only client."""


@dataclass(frozen=True)
class WiringPlan:
    """One launch, wired.

    Attributes:
        ports: HTTP port by instance id, the same in every life.
        mooncake_master: `host:port` of the second tier's master, "" for the arena alone.
    """

    blueprint: Blueprint
    run: RunDir
    ports: Mapping[str, int]
    memory: SharedMemory
    mooncake_master: str = ""

    def instance(self, plan: InstancePlan, incarnation: str) -> Instance:
        """What the proxy is told about a life."""
        return Instance(
            id=plan.id,
            role=plan.role,
            url=f"http://{STAGE_HOST}:{self.ports[plan.id]}",
            incarnation=incarnation,
            kv_endpoint=self._kv_endpoint(plan) or None,
            events=self._announces(plan) or None,
            devices=plan.devices,
            kv_news=worker_endpoints(self._kv_news(plan), plan.tp),
            kv_workers=worker_endpoints(self._kv_workers(plan), plan.tp),
            load_news=self._load_news(plan),
            core_share=plan.core_share,
            cpu_cores=self.blueprint.cores_of(plan),
            answer_flags=answer_flags(self.blueprint.stage_args.of(plan)) if self._shows_first_tokens else None,
        )

    def stage(self, plan: InstancePlan, incarnation: str) -> StagePlan:
        """What the stage's command is made from."""
        blueprint = self.blueprint
        return StagePlan(
            instance=plan.id,
            role=plan.role,
            device=blueprint.device,
            device_ids=plan.devices,
            cores=blueprint.cores_of(plan),
            tp=plan.tp,
            model=blueprint.model,
            served_model_name=blueprint.served_model_name,
            port=self.ports[plan.id],
            host=STAGE_HOST,
            wiring=self.wiring(plan, incarnation),
            extra_args=blueprint.stage_args.of(plan),
            colocated=1 + len(plan.colocated_with),
            memory_share=plan.memory_share,
            core_order=order_for(blueprint.core_orders, plan.id, self.run.grant_template(plan.id)),
            kv_cache_bytes=plan.kv_cache_bytes,
            engine=blueprint.config.engine,
            sim_profile=blueprint.sim_profile,
            memory_names=self.run.memory_names(plan.id),
            first_token=self._shows_first_tokens,
        )

    @property
    def _shows_first_tokens(self) -> bool:
        config = self.blueprint.config
        return config.first_token == "prefill" and config.engine == "vllm"

    def wiring(self, plan: InstancePlan, incarnation: str) -> StageWiring:
        """Addresses and policies of one life. Features concern encoders and every instance that takes them."""
        config, role = self.blueprint.config, plan.role
        featured = bool(self._announces(plan))
        pooled = featured and bool(self.mooncake_master)
        return StageWiring(
            instance=plan.id,
            role=role,
            incarnation=incarnation,
            arena=str(self.run.arena) if featured else "",
            arena_id=self.run.launch_id if featured else "",
            events=self._hears(plan) if featured else {},
            publish=self._announces(plan),
            load_publish=self._load_news(plan),
            mooncake_master=self.mooncake_master if featured else "",
            mooncake_segment_bytes=config.mooncake_segment_mib << 20 if pooled and role.sends_features else 0,
            feature_path=self.blueprint.ways.feature_path(plan.id) if featured else "host",
            feature_worker_endpoint=self._feature_agents(plan) if featured and role.takes_features else "",
            feature_prefetch=config.feature_prefetch,
            partial_prefill=config.partial_prefill == "on",
            recompute_limit=config.recompute_limit,
            kv_endpoint=self._kv_endpoint(plan),
            kv_worker_endpoint=self._kv_workers(plan),
            kv_peers=tuple(worker_endpoints(self._kv_workers(taker), taker.tp) for taker in self._takers())
            if role.sends_kv
            else (),
            kv_beside=self._beside(plan),
            kv_transport=self._kv_transport(plan),
            mooncake_protocol="ascend" if self.blueprint.device == "npu" else config.mooncake_protocol,
            kv_grouping=config.kv_grouping,
            kv_packet_floor_bytes=config.kv_packet_floor_kib << 10,
            kv_publish=self._kv_news(plan),
            kv_faults=config.kv_faults,
            traffic=str(self.run.socket(f"{plan.id}.traffic")) if role.sends_kv else "",
            kv_staging=str(self.run.shm / f"epd-{self.run.launch_id}-kv") if role.sends_kv else "",
            kv_staging_bytes=self.memory.staging_mib << 20,
            host=STAGE_HOST,
            trace_path=str(Path(config.trace_dir).resolve() / f"{plan.id}.jsonl") if config.trace_dir else "",
        )

    def _hears(self, plan: InstancePlan) -> dict[str, str]:
        """Consumers hear encoders; encoders hear consumers where these say which way features come to them."""
        plans = self.blueprint.plans
        if plan.role.takes_features:
            return {one.id: self._announces(one) for one in plans if one.role.sends_features}
        if self.blueprint.ways.feature_path(plan.id) == "device":
            return {one.id: self._announces(one) for one in plans if one.role.takes_features}
        return {}

    def _feature_agents(self, plan: InstancePlan) -> str:
        direct = self.blueprint.ways.feature_path(plan.id) == "device"
        return self.run.ipc(f"{plan.id}.features{{rank}}") if direct else ""

    def _announces(self, plan: InstancePlan) -> str:
        concerned = self.blueprint.features_travel and (plan.role.sends_features or plan.role.takes_features)
        return self.run.ipc(f"{plan.id}.events") if concerned else ""

    def _load_news(self, plan: InstancePlan) -> str:
        return self.run.ipc(f"{plan.id}.load")

    def _takers(self) -> list[InstancePlan]:
        return [plan for plan in self.blueprint.plans if plan.role.takes_kv]

    def _beside(self, plan: InstancePlan) -> tuple[str, ...]:
        """Workers of takers on the sender's own devices."""
        names = self.blueprint.ways.beside(plan.id)
        takers = [taker for taker in self._takers() if taker.id in names]
        return tuple(one for taker in takers for one in worker_endpoints(self._kv_workers(taker), taker.tp))

    def _kv_transport(self, plan: InstancePlan) -> str:
        """A taker that is reached one way alone offers nothing else, and so keeps no blocks for what never comes."""
        offered = self.blueprint.ways.offered_by(plan.id)
        return offered[0] if len(offered) == 1 else self.blueprint.config.kv_transport

    def _kv_workers(self, plan: InstancePlan) -> str:
        return self.run.ipc(f"{plan.id}.kvw{{rank}}") if plan.role.takes_kv else ""

    def _kv_news(self, plan: InstancePlan) -> str:
        return self.run.ipc(f"{plan.id}.kvnews{{rank}}") if plan.role.sends_kv else ""

    def _kv_endpoint(self, plan: InstancePlan) -> str:
        return self.run.ipc(f"{plan.id}.kv") if plan.role.sends_kv else ""
