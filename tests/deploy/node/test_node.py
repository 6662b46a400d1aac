"""Node processes: two of them on this machine over TLS, one with front doors, run by somebody else; every end."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from types import NoneType

import httpx
import msgspec
import pytest

from deploy.host.environment import module_environment
from deploy.host.launches import reap_dead
from deploy.node.facts import NodeFacts
from deploy.node.setup import NodeInfo, Notes
from deploy.runtime.node_api import NOT_SET_UP
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError
from tests.deploy.launched import children
from tests.deploy.node.nodes import Deployment, deployment
from tests.deploy.node_secrets import node_secrets
from tests.waiting import PATIENCE_S, until


def part(d: Deployment, node: str, name: str) -> int:
    """Pid of the life of now; 0 between two."""
    return next((pid for pid, own in children(d.runs[node].pid).items() if own == f"epd {name}"), 0)


def door(d: Deployment) -> int:
    (pid,) = d.doors.pids.values()
    return pid


async def two(d: Deployment) -> list:
    await asyncio.gather(d.start("a", front=True), d.start("b"))
    d.join("a", front=True)
    d.join("b")
    return d.orders("a", "b")


async def test_a_node_process_is_nobodys_child_and_says_where_it_is(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        assert (await d.there("a")).pid == run.pid, "there is one"
        assert d.found("b") is None
        assert os.getsid(run.pid) not in (os.getsid(0), run.pid), "with the terminal of nobody, and it can get none"
        assert (run.path / "key").stat().st_mode & 0o777 == 0o600
        assert d.secrets.token.encode() not in Path(f"/proc/{run.pid}/cmdline").read_bytes()


@pytest.mark.slow
async def test_of_many_starts_at_once_one_begins(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        begun = [d.begin("a") for _ in range(4)]
        run = await d.start("a")
        assert [one.wait(PATIENCE_S) for one in begun] == [0] * 4
        await until(lambda: [path.parent for path in tmp_path.glob("*/launcher.json")] == [run.path])


async def test_members_alone_are_answered_and_only_over_tls(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        address = (await d.there("a")).address
        trusting = ssl.create_default_context(cafile=d.folder / "tls.crt")
        trusting.check_hostname = False

        async def status(path: str, token: str = "", verify: ssl.SSLContext = trusting) -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            async with httpx.AsyncClient(verify=verify, headers=headers, trust_env=False) as http:
                return (await http.get(f"https://{address}{path}")).status_code

        assert [await status(path) for path in ("/health", "/ready", "/node", "/agent?after=0", "/nowhere")] == [
            *(200, 503),
            *[401] * 3,
        ]
        assert [await status("/node", token) for token in (d.secrets.token[:-1], "x", d.secrets.token)] == [
            401,
            401,
            200,
        ]
        assert await status("/agent?after=0", d.secrets.token) == NOT_SET_UP
        async with d.secrets.client(address, 10.0) as member:  # the next controller tells it first, then asks again
            assert (await member.post("/node/notes", content=b"[{}]")).status_code == NOT_SET_UP
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{address}/health")
        (tmp_path / "others").mkdir()
        others = NodeSecrets(str(node_secrets(tmp_path / "others")), "--node-secrets")
        async with others.client(address, 10.0) as http:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.get("/health")
        await d.start("a", front=True)
        d.join("a", front=True)

        async def ready() -> bool:
            return await status("/ready") == 200

        async with d.controlled(d.orders("a")):
            await until(ready, "an instance of each role to answer")


async def test_it_is_one_node_of_one_deployment_and_keeps_what_its_controllers_note(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        http = d.http("a")
        async with asyncio.timeout(PATIENCE_S):
            await http.call("setup", NoneType, d.setup("a", front=False))
            with pytest.raises(ConfigError, match="this node is a of deployment test"):
                await http.call("setup", NoneType, d.setup("b", front=False))
            with pytest.raises(ConfigError, match="begun before"):
                await http.call("setup", NoneType, msgspec.structs.replace(d.setup("a", front=False), nonce="another"))
            for age, sections in (((1, 2), {"x": b"1", "y": b"\0\xff"}), ((1, 1), {"x": b"0"}), ((2, 0), {"x": b"2"})):
                await http.call("notes", NoneType, Notes(*age, sections))
            os.kill(part(d, "a", "control"), signal.SIGKILL)
            info = await http.get(NodeInfo)
            assert (info.deployment, info.node, info.notes) == ("test", "a", Notes(2, 0, {"x": b"2", "y": b"\0\xff"}))
            assert info.pids["node"] == run.pid
            facts = await http.call("facts", NodeFacts, d.blueprint.config, "a", 99)
            assert len(facts.machine.inventory.ids) == 2, "what it was before"
        await http.close()


async def test_two_nodes_answer_requests_and_end_at_a_word(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            assert {one.order.spec.node for one in (await d.seen()).values()} == {"a", "b"}
            assert [await d.answers() for _ in range(4)] == [200] * 4
            assert [node.id for node in await d.nodes.nodes()] == ["a", "b"]


@pytest.mark.parametrize(
    "killed",
    [
        "control",
        pytest.param("control and front door", marks=pytest.mark.slow),
        pytest.param("front door", marks=pytest.mark.slow),
    ],
)
async def test_a_part_that_is_killed_costs_no_stage_and_comes_again(tmp_path: Path, killed: str) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            before, first_door = await d.seen(), door(d)
            if "control" in killed:
                control = part(d, "a", "control")
                os.kill(control, signal.SIGKILL)
            if "front door" in killed:
                os.kill(first_door, signal.SIGKILL)
            if "control" in killed:
                await until(lambda: part(d, "a", "control") not in (0, control))
            if "front door" in killed:
                await until(lambda: d.doors.pids and first_door not in d.doors.pids.values())
            else:
                assert [await d.answers() for _ in range(4)] == [200] * 4
                await until(lambda: [*d.doors.pids.values()] == [first_door], "it is found again")
            async with asyncio.timeout(60):
                await d.doors.seen()
            assert await d.answers() == 200
            after = await d.up(*wanted)
            assert {name: one.pid for name, one in after.items()} == {name: one.pid for name, one in before.items()}


@pytest.mark.slow
async def test_a_node_process_that_is_killed_is_followed_by_one_with_nothing(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            before, killed = await d.seen(), d.runs["b"]
            os.kill(killed.pid, signal.SIGKILL)
            await until(lambda: not killed.lives)
            run = await d.start("b")
            assert run.pid != killed.pid and not killed.path.exists()

            async def begun_again() -> bool:
                return all(
                    one.pid != before[name].pid for name, one in (await d.seen()).items() if one.order.spec.node == "b"
                )

            await until(begun_again)
            after = await d.up(*wanted)
            assert all(one.pid == before[name].pid for name, one in after.items() if one.order.spec.node == "a")

            async def served() -> bool:
                return await d.answers() == 200

            await until(served)


@pytest.mark.slow
async def test_by_sigterm_it_ends_when_its_requests_have_and_is_empty_once_its_instances_have_moved(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, "PD") as d:
        await d.start("a", front=True)
        d.join("a", front=True)
        wanted = d.orders("a")
        words = ["node", "--await-empty", "--listen", d.runs["a"].address, "--secrets", str(d.folder)]

        def awaited(within_s: float) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "deploy.cli", *words, "--within-s", str(within_s)]
            return subprocess.Popen(argv, env=module_environment())

        async with d.controlled(wanted):
            assert await asyncio.to_thread(awaited(1.0).wait, PATIENCE_S) == 1
            asked = asyncio.create_task(d.answers(tokens=1000))
            await until(lambda: d.doors.running == 1, "the request")
            os.kill(d.runs["a"].pid, signal.SIGTERM)
            assert await asked == 200
        await until(lambda: not d.processes(), "all of it to end")
        (await d.there("a"))
        again = await d.start("a")
        assert await asyncio.to_thread(awaited(10.0).wait, PATIENCE_S) == (0 if again.address == words[3] else 1)


async def test_with_its_owner_a_node_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        wanted = await two(d)
        async with d.controlled(wanted):
            d.owner.kill()
            await until(lambda: not d.processes(), "no process")
            await until(lambda: not d.left(), "nothing left")
        assert reap_dead(tmp_path) == [] and d.found("a") is None


async def test_what_a_killed_node_process_leaves_is_cleaned_up_by_whoever_starts_next(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        run = await d.start("a")
        d.join("a")
        await d.nodes.start(d.orders("a")[0])
        os.kill(run.pid, signal.SIGKILL)
        await until(lambda: not run.lives)
        assert run.path.exists()
        assert reap_dead(tmp_path) == [run.path.name]
        assert not d.left()


async def test_what_is_wrong_with_it_is_said_to_whoever_tells_it(tmp_path: Path) -> None:
    async with deployment(tmp_path) as d:
        await d.start("a", front=True)
        with pytest.raises(ConfigError) as caught:  # the port
            await d.start("b", front=True)
        assert caught.value.param == "--port"
        with pytest.raises(ConfigError):
            await d.start("b", shm_mib=1)
        assert len([*tmp_path.glob("*/launcher.json")]) == 1
        await d.start("b")  # it still waits to be told


async def test_who_has_no_secrets_does_not_begin(tmp_path: Path) -> None:
    folder = node_secrets(tmp_path / "secrets")
    (folder / "tls.key").chmod(0o644)
    words = [sys.executable, "-m", "deploy.cli", "node", "--listen", "127.0.0.1:20000-24999"]
    for flags, said in (([], "openssl"), (["--secrets", str(folder)], "chmod 600")):
        done = subprocess.run(
            [*words, *flags], capture_output=True, text=True, env=module_environment(), timeout=PATIENCE_S
        )
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_node_process_is_to_the_kernel_what_its_owner_is() -> None:
    """And not what is made of the workers of a cluster: nice, and the first to be ended where memory is short."""
    code = (
        "import os, pathlib; from deploy.node.process import _take_after\n"
        "os.nice(7); mine = pathlib.Path('/proc/self/oom_score_adj'); mine.write_text('900')\n"
        "warnings = _take_after(os.getppid())\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0), mine.read_text().strip(), len(warnings))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], env=module_environment(), text=True).split()
    nice, memory, warnings = map(int, told)
    as_owner = [
        nice == os.getpriority(os.PRIO_PROCESS, 0),
        memory == int(Path("/proc/self/oom_score_adj").read_text()),
    ]
    assert warnings == as_owner.count(False), "what could not be had is said"
    assert all(as_owner) or os.geteuid() != 0
