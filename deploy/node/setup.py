"""What a node process is told of its deployment, once, and what it says of itself. All of it goes over the wire as JSON
(`deploy/runtime/node_api.py`), and neither has a secret in it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from deploy.agent.waits import Patience
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.machines import Machine, Machines
from epd_serve import __version__
from epd_serve.key_files import derived_key


class Notes(msgspec.Struct, frozen=True):
    """What has to outlive the controller, kept by every node: of two, that of the later epoch and number counts.

    Attributes:
        sections: contents by name; those that are not named stay as they are.
    """

    epoch: int = 0
    number: int = 0
    sections: dict[str, bytes] = {}

    @property
    def age(self) -> tuple[int, int]:
        """The later one has the larger one."""
        return self.epoch, self.number

    def merged(self, newer: Notes) -> Notes:
        """With what another one says, if that is newer."""
        return Notes(*newer.age, {**self.sections, **newer.sections}) if newer.age > self.age else self


class NodeSetup(msgspec.Struct, frozen=True):
    """Of one node.

    Attributes:
        deployment, node: its names.
        host: address, name or network interface at which its stages are reached by other nodes; "": as the node says.
        nonce: makes the deployment's key another one than that of the last deployment of this name.
        config: of the deployment; the layout in it is nobody's order. machines: that it was drawn for.
        machine: what the node was before anything of ours ran there.
        master: `host:port` of the second tier's master, where another node has it.
        front: there are to be front doors. options: that they go by beside the config. api_keys: text of the clients'
            keys, which tells hashes.
        notes: as they are now.
        patience, shm_mib: of the stages' supervisor, and how much of /dev/shm is its own, where that is not the usual.
    """

    deployment: str
    node: str
    config: DeployConfig
    machine: Machine
    machines: tuple[Machine, ...]
    nonce: str
    host: str = ""
    master: str = ""
    front: bool = False
    options: tuple[str, ...] = ()
    api_keys: str = ""
    notes: Notes = Notes()
    patience: Patience | None = None
    shm_mib: int | None = None

    @property
    def member(self) -> tuple[str, str, str]:
        """What a node process cannot be two of."""
        return self.deployment, self.node, self.nonce

    def blueprint(self) -> Blueprint:
        """Of this node alone, under its own device ids. Raises ConfigError: it cannot serve it."""
        drawn = draw(self.config, machines=Machines(self.machines))
        others = [one for one in self.machines if one.id != self.node]
        return replace(drawn, machines=Machines.of([*others, self.machine])).at(self.node)


def deployment_key(token: str, deployment: str, nonce: str) -> str:
    """What the members of one deployment share, and no other deployment: it is nowhere but in their memory and run
    directories, for it follows from the token that each of them has."""
    return derived_key(token, f"epd-serve/deployment-key/1/{deployment}/{nonce}").hex()


class NodeInfo(msgspec.Struct, frozen=True):
    """A node process.

    Attributes:
        deployment, node: as it was told; "" while it waits for that.
        epoch: the latest that it has heard of.
        master: `host:port` of the second tier's master that is to run here, or that it was told of, or "".
        warnings: for the operator, a line each.
        pids: of its processes that are no stages, by name. instances: how many it has, those that start or end, too.
    """

    version: str = __version__
    deployment: str = ""
    node: str = ""
    epoch: int = 0
    notes: Notes = Notes()
    master: str = ""
    warnings: tuple[str, ...] = ()
    pids: dict[str, int] = {}
    instances: int = 0
