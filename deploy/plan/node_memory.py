"""Memory of all instances: each node's is planned as if there were no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from deploy.memory.check import OneStage, Outcome, share_memory
from deploy.memory.placement_table import short_node
from deploy.memory.plan import MemoryPlan
from deploy.options.stage_args import StageArgs
from deploy.plan.machines import Machines
from epd_serve.errors import ConfigError
from epd_serve.model_facts import ModelFacts
from epd_serve.placement import InstancePlan


def share_memory_of_nodes(
    plans: Sequence[InstancePlan],
    facts: ModelFacts | None,
    machines: Machines,
    words: StageArgs | OneStage,
    *,
    shm_mib: Callable[[Sequence[InstancePlan]], int],
) -> Outcome:
    """As `deploy.memory.check.share_memory`; with several nodes, what is said names the node.

    Args:
        machines: with the properties of their devices. shm_mib: of host memory, for all instances of a node.

    Raises:
        ConfigError: what does not fit, and where.
    """
    outcomes = []
    for machine, own in machines.split(plans):
        where = f"node {short_node(machine.id)}: " * machines.several
        try:
            one = share_memory(
                own,
                facts,
                machine.inventory,
                words,
                shm_mib=shm_mib(own),
                properties=machine.properties,
            )
        except ConfigError as error:
            raise ConfigError(f"{where}{error.message}", param=error.param) from error
        plan = one.plan and replace(
            one.plan,
            groups=tuple(replace(group, node=short_node(machine.id) * machines.several) for group in one.plan.groups),
        )
        outcomes.append(replace(one, plan=plan, warnings=tuple(f"{where}{line}" for line in one.warnings)))
    known = [one.plan for one in outcomes if one.plan is not None]
    whole = MemoryPlan(machines.kind, tuple(group for plan in known for group in plan.groups))
    return Outcome(
        grants={name: grant for one in outcomes for name, grant in one.grants.items()},
        plan=whole if len(known) == len(outcomes) else None,
        warnings=tuple(dict.fromkeys(line for one in outcomes for line in one.warnings)),
    )
