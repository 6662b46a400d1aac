"""`epd-serve serve --engine sim`: a whole layout of simulated stages under the launcher, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.cli.command import main
from deploy.host.ports import free_ports
from deploy.options.config import DeployConfig
from deploy.options.engines import checked_profile, command_of
from deploy.plan.blueprint import draw
from epd_serve.errors import ConfigError
from tests.epd_serve.sim.served import looking
from tests.waiting import wait_for


def profile_file(folder: Path) -> str:
    path = folder / "profile.json"
    path.write_text(json.dumps({"decode_step_s": [[1, 0.001]]}))
    return str(path)


@contextmanager
def launched(
    folder: Path, layout: str, *flags: str, key: str = "", table: str = "/instances"
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """The launcher of a layout that is ready, and its endpoint. `folder` has to be short: sockets lie below it.

    Args:
        table: where the status table is, if not on the clients' port.
    """
    (port,) = free_ports(1)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    command = [sys.executable, "-m", "deploy.cli", "serve", "--engine", "sim", "--layout", layout, "--port", str(port)]
    command += ["--run-root", str(folder), "--sim-profile", profile_file(folder), "--arena-mib", "32", *flags]
    with (folder / "launch.log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers=headers) as client:
            wait_for(lambda: _all_up(client, table), "all stages up", 120)
            yield client, launcher
    finally:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise


def _all_up(client: httpx.Client, table: str) -> bool:
    try:
        views = client.get(table).json()["instances"]
    except httpx.TransportError:
        return False
    return bool(views) and all(view["up"] for view in views)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--encoder-free",)], ids=" ".join)
def test_a_layout_serves_text_and_pictures_and_ends_clean(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with launched(tmp_path, "2E-2P-2D", *flags) as (client, launcher):
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        for request in (body, {**looking(), "model": "epd-demo", "messages": _with_picture()}):
            answer = client.post("/v1/chat/completions", json=request)
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        views = {view["id"]: view for view in client.get("/instances").json()["instances"]}
        assert sorted(views) == ["D0", "D1", "E0", "E1", "P0", "P1"] and all(view["up"] for view in views.values())
        assert {link["state"] for name in ("P0", "P1") for link in views[name]["kv_links"]} == {"up"}
        assert len(_stages_below(tmp_path)) == 6
    assert launcher.returncode == 0
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()], "no run directory is left"


@pytest.mark.slow
def test_sixty_four_stages_fit_on_one_small_machine(tmp_path: Path) -> None:
    with launched(tmp_path, "16E-16P-32D") as (client, _):
        views = client.get("/instances").json()["instances"]
        assert len(views) == 64 and all(view["up"] for view in views)
        pids = _stages_below(tmp_path)
        assert len(pids) == 64
        mib = sum(_pss_kib(pid) for pid in pids) / 1024
        assert mib / 64 < 64, f"{mib:.0f} MiB in all"
        with ThreadPoolExecutor(16) as clients:
            request = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answers = [clients.submit(client.post, "/v1/chat/completions", json=request) for _ in range(64)]
        assert {answer.result().status_code for answer in answers} == {200}


def _stages_below(run_root: Path) -> list[int]:
    """Processes of simulated stages that were wired in this launch."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if b"epd_serve.sim" in argv and str(run_root).encode() in argv:
                found.append(int(entry.name))
    return found


def _pss_kib(pid: int) -> int:
    """Its memory, shared pages counted in shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _with_picture() -> list[dict[str, object]]:
    (message,) = looking("k")["messages"]  # type: ignore[misc, attr-defined]
    parts = [{name: value for name, value in part.items() if name != "uuid"} for part in message["content"]]
    return [{"role": "user", "content": parts}]


def test_a_blueprint_of_simulated_stages_needs_no_model_and_no_device(tmp_path: Path) -> None:
    profile = profile_file(tmp_path)
    blueprint = draw(DeployConfig(layout="8E-8P-16D", engine="sim", sim_profile=profile))
    assert blueprint.served_model_name == "epd-demo" and blueprint.facts is None and blueprint.cores is None
    assert len(blueprint.plans) == 32 and blueprint.sim_profile == str(Path(profile).resolve())


def test_a_simulated_stage_alone_has_any_role(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = profile_file(tmp_path)
    assert main(["stage", "--engine", "sim", "--role", "D", "--sim-profile", profile, "--print"]) == 0
    printed = capfd.readouterr().out
    assert "-m epd_serve.sim" in printed and f"--profile {profile}" in printed and '"role": "D"' in printed


@pytest.mark.parametrize(
    ("engine", "path", "said"), [("vllm", "x.json", "--engine sim"), ("sim", "/nowhere/x.json", "nowhere")]
)
def test_a_profile_in_the_wrong_place_is_refused(engine: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked_profile(engine, path)


def test_simulated_stages_keep_features_in_the_arena() -> None:
    with pytest.raises(ConfigError, match="drop mooncake"):
        draw(DeployConfig(engine="sim", layout="E-P-D", mm_store="mooncake"))


def test_the_engine_of_a_plan_decides_its_command() -> None:
    from tests.epd_serve.sim.plans import plan_of

    assert "epd_serve.sim" in command_of(plan_of("sim")).argv
    assert "epd_serve.engine.stage_main" in command_of(plan_of("vllm")).argv
