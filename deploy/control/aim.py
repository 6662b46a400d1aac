"""From a layout's text to what is wanted: the deployment drawn again, and as much as can be left where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.agent.specs import specs
from deploy.change.place import place
from deploy.change.types import Wanted
from deploy.plan.blueprint import Blueprint, draw
from deploy.runtime.protocol import Spec
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse


class Aim:
    """Args:
    blueprint: of the launch: its options hold for every layout.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint

    def first(self) -> Wanted:
        """What the launch begins with."""
        return Wanted(str(self._blueprint.layout), specs(self._blueprint))

    def __call__(self, layout: str, running: Sequence[Spec]) -> Wanted:
        """What a layout wants, by the side of those that run.

        Raises:
            ConfigError, LayoutError: it cannot be served here, and why.
        """
        blueprint = self._blueprint
        parsed = parse(layout)
        drawn = draw(
            replace(blueprint.config, layout=str(parsed)),
            devices=self._devices(parsed, running),
            properties=blueprint.properties,
        )
        return Wanted(str(parsed), specs(drawn))

    def _devices(self, layout: Layout, running: Sequence[Spec]) -> Sequence[int] | None:
        """None where there are too few, and `draw` says so or shares them."""
        inventory = self._blueprint.inventory
        pool: Sequence[int] = inventory.ids
        if inventory.kind == "cpu":  # virtual ones, as many as are asked for
            highest = max((device for spec in running for device in spec.devices), default=-1)
            pool = range(max(layout.device_count, highest + 1))
        return place(layout, pool, running) if len(pool) >= layout.device_count else None
