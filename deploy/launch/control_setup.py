"""What all lives of the controller are told, and what they ask: decided once, before the first of them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from deploy.agent.waits import Patience
from deploy.front.shared import Shared
from deploy.host.rundir import RunDir
from deploy.launch.admin import Admin
from deploy.launch.screen import Screen
from deploy.plan.blueprint import Blueprint
from deploy.runtime.protocol import Runtime


class Host(Runtime, Protocol):
    """The runtime of this host."""

    async def groups(self) -> Mapping[str, int]:
        """Process groups that run now, by name."""

    async def close(self) -> None:
        """End everything."""


@dataclass(frozen=True)
class ControlSetup:
    """What every life of the controller is told. Made before the first.

    Attributes:
        shared: of the front doors. admin: the listener by the flags, if any.
        commands: where `epd-serve status` and the like ask, bound.
        mooncake: whether it runs in a second tier, or between stages.
        started: of `time.monotonic`.
    """

    blueprint: Blueprint
    run: RunDir
    shared: Shared
    admin: Admin | None
    commands: socket.socket
    mooncake: bool
    patience: Patience
    screen: Screen
    started: float
