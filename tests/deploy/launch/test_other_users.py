"""What another user of the machine reaches of a deployment: the clients' port, and no stage."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from deploy.host.ports import listeners
from epd_serve.endpoint import unix_url
from tests.deploy.front.test_sim_front_doors import launch_id, members
from tests.deploy.launch.test_sim_launch import launched
from tests.stage_http import stage_client

NOBODY = 65534
REFUSED = "PermissionError"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run root in a folder that everybody may enter: what keeps others out is the run root itself."""
    open_to_all = Path(tempfile.mkdtemp(prefix="epd-other-", dir="/tmp"))
    open_to_all.chmod(0o755)
    yield open_to_all / "run"
    shutil.rmtree(open_to_all)


def as_nobody(paths: list[str], ports: list[tuple[str, int]]) -> dict[str, str]:
    """What becomes of a connection of another user's to each of them."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        found: dict[str, str] = {}
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for family, address in [(socket.AF_UNIX, one) for one in paths] + [(socket.AF_INET, one) for one in ports]:
                with socket.socket(family) as trying:
                    try:
                        trying.connect(address)
                        found[str(address)] = "reached"
                    except OSError as error:
                        found[str(address)] = type(error).__name__
        finally:
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as text:
        return dict(json.load(text))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reaches_the_clients_port_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with launched(folder, "(E-P)-D") as (client, launcher):
        pids = {launcher.pid, *members(launch_id(folder))}
        ports = sorted({(one.address, one.port) for one in listeners(pids)})
        assert [port for _, port in ports] == [urlsplit(str(client.base_url)).port]
        bound = [one for pid in pids for one in psutil.Process(pid).net_connections("unix")]
        paths = sorted({str(one.laddr) for one in bound if one.laddr})
        stages = [path for path in paths if path.endswith(".http")]
        assert sorted(Path(path).name for path in stages) == ["D0.http", "E0.http", "P0.http"]
        for stage in stages:
            with stage_client(unix_url(stage)) as own:
                assert own.get("/v1/models").status_code == 200, "its own user does reach it"
        found = as_nobody(paths, ports)
        assert {found[path] for path in paths} == {REFUSED}
        assert [found[str(port)] for port in ports] == ["reached"]
