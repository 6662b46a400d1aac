"""The commands over HTTP, and as `epd-serve` gives them to a deployment in memory, through its socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.change.types import Wanted
from deploy.cli.command import main
from deploy.control.aim import Aim
from deploy.control.controller import Controller
from deploy.control.routes import control_routes
from deploy.follow.switch import Switch
from deploy.host.launches import ADMIN_SOCKET
from deploy.host.ports import free_ports, listen, private_socket
from deploy.host.rundir import RunDir
from deploy.launch.admin import Admin, serve_admin
from deploy.runtime.protocol import Spec
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable
from proxy.registry.instance_state import Work
from tests.deploy.control.world import MIB, FileState, World, wanted
from tests.waiting import until

KEY = "an-admin-key-of-some-length"


class Aimed(Aim):
    """At layouts that nobody draws."""

    def __init__(self, options: dict[str, object]) -> None:
        self.leases = None
        self._options = options

    async def __call__(
        self, layout: str, running: Iterable[Spec], *, dry_run: bool = False, core_share: str | None = None
    ) -> Wanted:
        check_servable(parse(layout))
        options = self._options | ({"core_share": core_share} if core_share else {})
        made = wanted(layout, running=list(running), **options)  # type: ignore[arg-type]
        return Wanted(str(parse(layout)), made.specs, core_share=core_share or made.core_share)


class Commanded(World):
    """A deployment that takes commands. `base`: of its admin listener."""

    def __init__(self, folder: Path, layout: str, **options: Any) -> None:
        super().__init__(folder, layout, **options)
        self.folder = folder
        self.base = ""
        self.front_options: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        run = RunDir.create(self.folder)
        (port,) = free_ports(1)
        self.base = f"http://127.0.0.1:{port}"

        async def parts() -> dict[str, int]:
            return self.doors.pids

        async def configure(options: Sequence[str]) -> None:
            if "known=1" not in options:
                raise ConfigError("there is no such proxy setting", param="--proxy")
            self.front_options += options

        self.switch = Switch("off", FileState(self.folder))
        self.controller = controller = Controller(
            run.launch_id, self.reconciler, self.doors, Aimed(self.options), parts, configure, self.switch
        )

        async def metrics() -> bytes:
            return b"up 1\n"

        async with self.running():
            await self.over()
            with listen("127.0.0.1", port) as listening:
                path = run.socket(ADMIN_SOCKET)
                routes = [control_routes(controller)]
                with private_socket(path) as own:
                    admins = (Admin(own, ""), Admin(listening, KEY))
                    tasks = [
                        asyncio.create_task(serve_admin(one, self.doors.table, metrics, grace_s=1.0, more=routes))
                        for one in admins
                    ]
                    await until(lambda: self.get("/health"))
                    try:
                        yield
                    finally:
                        for task in tasks:
                            task.cancel()
                            with contextlib.suppress(asyncio.CancelledError):
                                await task
        run.remove()

    async def get(self, path: str, key: str = KEY) -> httpx.Response | None:
        async with httpx.AsyncClient(base_url=self.base, trust_env=False, timeout=60) as http:
            with contextlib.suppress(httpx.TransportError):
                return await http.get(path, headers={"authorization": f"Bearer {key}"})
        return None

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.base, trust_env=False, timeout=60) as http:
            return await http.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})

    async def says(self, *words: str) -> int:
        """Returns the exit code of `epd-serve WORDS…`."""
        return await asyncio.to_thread(main, [*words, "--run-root", str(self.folder)])


async def test_scale_up_and_down_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        assert await world.says("scale", "E=2") == 0
        assert world.up() == ["D0", "E0", "E1", "P0"]
        assert "start E1" in capsys.readouterr().out
        assert await world.says("scale", "E=1", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["layout"] == "E-P-D" and told["change"]["state"] == "done" and len(world.up()) == 3
        assert [step["action"] for step in told["change"]["steps"]] == ["drain", "stop"]
        assert await world.says("status", "--json") == 0
        status = json.loads(capsys.readouterr().out)
        assert status["state"] == "steady" and status["layouts"][::2] == ["E-P-D", "E-P-D"]
        assert [one["id"] for one in status["instances"]] == ["E0", "P0", "D0"]


async def test_a_dry_run_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        world.runtime.calls.clear()
        assert await world.says("relayout", "EP-D", "--dry-run", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["change"] is None and told["plan"]["waves"][0][0]["action"] == "start"
        assert world.runtime.calls == [] and world.reconciler.changes.present is None
        assert await world.says("relayout", "EP-D", "--dry-run") == 0
        assert "1. start EP0" in capsys.readouterr().out


async def test_undo_and_undo_again(tmp_path: Path) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        assert await world.says("relayout", "EPD") == 0
        assert await world.says("undo") == 0
        assert world.up() == ["D0", "E0", "P0"]
        assert await world.says("undo") == 0
        assert world.up() == ["EPD0"]


async def test_undo_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        assert await world.says("undo", "--json") == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "nothing_to_undo"


async def test_what_is_short_is_named_and_a_pause_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Commanded(tmp_path, "PD", host_bytes=8 * MIB)
    world.runtime.room_bytes = 10 * MIB
    async with world.serving():
        assert await world.says("relayout", "EPD") == 2
        assert "--pause" in capsys.readouterr().err
        refused = await world.post("/deployment/layout", layout="EPD")
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert error["code"] == "shortage" and error["pause_helps"] and error["blocks"] == ["PD0"]
        assert error["needed_bytes"] == 8 * MIB and error["free_bytes"] == 2 * MIB
        assert world.up() == ["PD0"]
        world.doors.room_s = 29.0
        assert await world.says("relayout", "EPD", "--pause", "30") == 2
        long = await world.post("/deployment/layout", layout="EPD", pause_s=30)
        assert long.status_code == 409 and long.json()["error"]["code"] == "pause_too_long"
        assert long.json()["error"]["most_s"] == 29.0 and world.reconciler.changes.present is None
        world.doors.room_s = 30.0
        assert await world.says("relayout", "EPD", "--pause", "30") == 0
        assert world.up() == ["EPD0"]


async def test_one_change_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Commanded(tmp_path, "2PD")
    async with world.serving():
        leases = [world.doors.give(name) for name in ("PD0", "PD1")]
        assert await world.says("scale", "PD=1", "--no-wait") == 0
        refused = await world.post("/deployment/scale", counts={"PD": 3})
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "change_under_way"
        wrong = await world.post("/deployment/undo", pause_s=-1)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "pause_s"
        assert await world.says("undo") == 0
        assert world.up() == ["PD0", "PD1"]
        del leases


async def test_the_instance_that_is_named_goes(tmp_path: Path) -> None:
    world = Commanded(tmp_path, "3E-P-D")
    async with world.serving():
        assert await world.says("drain", "E1") == 0
        assert world.up() == ["D0", "E0", "E2", "P0"]
        assert (await world.post("/deployment/instances/E1/drain")).status_code in (400, 404)
        assert await world.says("drain", "E9") == 2


async def test_restart_of_one_and_of_all_in_turn(tmp_path: Path) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        before = {view.instance.incarnation for view in world.doors.table.snapshot()}
        world.runtime.calls.clear()
        assert await world.says("restart", "D0") == 0
        assert world.runtime.calls == ["start D1", "drain D0", "stop D0"]
        world.runtime.calls.clear()
        assert await world.says("restart", "all") == 0
        assert [call.split()[0] for call in world.runtime.calls] == ["start", "drain", "stop"] * 3
        assert not before & {view.instance.incarnation for view in world.doors.table.snapshot()}
        assert await world.says("restart", "front") == 0 and world.doors.restarts == 1


async def test_front_doors_are_replaced_by_others_with_other_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        assert await world.says("restart", "front", "--proxy", "known=1", "--proxy", "other=2") == 0
        assert world.front_options == ["known=1", "other=2"] and world.doors.restarts == 1
        assert await world.says("restart", "front", "--proxy", "unknown=1") == 2
        assert "there is no such proxy setting" in capsys.readouterr().err
        assert await world.says("restart", "D0", "--proxy", "known=1") == 2
        assert world.front_options == ["known=1", "other=2"] and world.doors.restarts == 1


async def test_front_doors_that_cannot_be_replaced_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Commanded(tmp_path, "E-P-D")
    world.doors.fails = "another one does not start"
    async with world.serving():
        assert await world.says("restart", "front") == 1
        assert "another one does not start" in capsys.readouterr().err


async def test_a_change_that_fails_says_so_and_that_it_went_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        world.runtime.fate = lambda name: "fails"
        assert await world.says("scale", "E=2") == 1
        assert "reverted to E-P-D: E1 did not start: no luck" in capsys.readouterr().out.replace("E2", "E1")
        assert world.up() == ["D0", "E0", "P0"]


@pytest.mark.parametrize("words", [["relayout", "E-P"], ["relayout", "xyz"], ["scale", "E=x"], ["scale", "P=0"]])
async def test_what_cannot_be_is_refused(words: list[str], tmp_path: Path) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        world.runtime.calls.clear()
        assert await world.says(*words) == 2 and world.runtime.calls == []


def test_without_a_deployment_there_is_nothing_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run-root", str(tmp_path)]) == 2
    assert "no launch of this user runs here that takes commands" in capsys.readouterr().err


async def test_the_admin_listener_wants_its_key_and_describes_itself(tmp_path: Path) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        for path in ("/deployment", "/instances", "/metrics", "/openapi.json"):
            refused, answered = await world.get(path, key="another"), await world.get(path)
            assert refused is not None and refused.status_code == 401, path
            assert answered is not None and answered.status_code == 200, path
        assert answered is not None
        document = answered.json()
        names = {route["operationId"] for path in document["paths"].values() for route in path.values()}
        assert {"status", "relayout", "scale", "drain", "restart", "undo"} <= names


async def test_an_encoder_that_encodes_is_waited_for(tmp_path: Path) -> None:
    world = Commanded(tmp_path, "2E-P-D")
    async with world.serving():
        leases = [world.doors.give(name, Work.ENCODE) for name in ("E0", "E1")]
        asked = asyncio.create_task(world.says("scale", "E=1"))
        await until(lambda: world.doors.given_nothing)
        status = await world.get("/deployment")
        assert status is not None and status.json()["state"] == "changing"
        assert sorted(one["in_flight"] for one in status.json()["instances"]) == [0, 0, 1, 1]
        for lease in leases:
            lease.release()  # type: ignore[attr-defined]
        assert await asked == 0
