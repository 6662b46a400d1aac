"""What Prometheus is told of the controller: instances, actions under way and ended, changes, trouble."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from deploy.control.metrics import ControlMetrics
from tests.deploy.control.world import World
from tests.waiting import until


class Told:
    def __init__(self, world: World) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ControlMetrics(world.reconciler))

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"epd_control_{name}", labels)


async def test_actions_are_counted_once_they_have_ended(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    told = Told(world)
    async with world.running():
        await world.over()
        assert told("actions_total", action="start", outcome="done") == 3
        assert told("changes_total", change="start", outcome="done") == 1
        assert told("instances", role="E", phase="up") == 1 and told("changing") == 0
        world.runtime.fate = lambda name: "hangs"
        world.begin("2E-P-D")
        await until(lambda: told("actions_running", action="start") == 1)
        assert told("changing") == 1 and told("instances", role="E", phase="starting") == 1
        world.runtime.say_up("E1")
        await world.over()
        assert told("actions_running", action="start") == 0 and told("changing") == 0
        assert told("actions_total", action="start", outcome="done") == 4
        assert told("changes_total", change="relayout", outcome="done") == 1


async def test_a_start_that_fails_is_counted_so_and_its_way_back_too(tmp_path: Path) -> None:
    world = World(tmp_path, "E-P-D")
    told = Told(world)
    async with world.running():
        await world.over()
        world.runtime.fate = lambda name: "fails"
        world.begin("2E-P-D")
        await world.over()
        failed = told("actions_total", action="start", outcome="failed")
        assert failed and told("actions_total", action="stop", outcome="done") == failed
        assert told("changes_total", change="relayout", outcome="failed") == 1
