"""A layout as its agent would wire it, without one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.agent.specs import orders
from deploy.agent.wiring import Site, instance_of, wire
from deploy.host.rundir import RunDir
from deploy.options.config import build_config
from deploy.plan.blueprint import Blueprint, draw
from epd_serve.instances import Instance
from epd_serve.peers import Peer, peer_of
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring

RUN = RunDir("abcd", Path("/run/x"), Path("/dev/shm"))


@dataclass(frozen=True)
class Wired:
    """Ports are 21000 and on, in layout order."""

    blueprint: Blueprint
    site: Site = field(default_factory=lambda: Site(RUN, staging_bytes=8 << 20))

    def stage(self, name: str, incarnation: str = "i") -> StagePlan:
        all_ = {order.id: order for order in orders(self.blueprint)}
        port = 21000 + list(all_).index(name)
        return wire(all_[name], self.site, port, incarnation)

    def wiring(self, name: str) -> StageWiring:
        return self.stage(name).wiring

    def instance(self, name: str, incarnation: str = "i") -> Instance:
        return instance_of(self.stage(name, incarnation))

    def instances(self) -> dict[str, Instance]:
        return {plan.id: self.instance(plan.id) for plan in self.blueprint.plans}

    def peers(self) -> list[Peer]:
        return [peer_of(instance) for instance in self.instances().values()]

    def with_master(self, address: str) -> Wired:
        return replace(self, site=replace(self.site, mooncake_master=address))


def wired(layout: str, **options: Any) -> Wired:
    return Wired(draw(build_config({"layout": layout, "device": "cpu", **options})))
