"""The admin listener: where it is, who gets in, and that the clients' port tells nothing of what it has."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deploy.cli.command import BAD_INPUT, main
from deploy.host.ports import free_ports, listen
from deploy.launch.admin import open_admin
from deploy.options.config import DeployConfig
from epd_serve.errors import ConfigError
from tests.deploy.launch.test_sim_launch import launched
from tests.waiting import PATIENCE_S


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "admin-key"
    path.touch(mode=0o600)
    path.write_text("an-admin-key-of-some-length\n")
    return str(path)


def get(url: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(url, headers=headers, timeout=PATIENCE_S, trust_env=False)


def test_beyond_loopback_it_needs_a_key(key_file: str) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match="--admin-key-file") as caught, open_admin("0.0.0.0", port, ""):
        pass
    assert caught.value.param == "--admin-key-file"
    with open_admin("0.0.0.0", port, key_file) as admin:
        assert admin is not None and admin.key == "an-admin-key-of-some-length" and admin.key not in repr(admin)
    for host in ("127.0.0.1", "localhost"):
        with open_admin(host, port, "") as admin:
            assert admin is not None and admin.key == ""


def test_a_port_in_use_names_its_own_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = free_ports(2)
    with listen("127.0.0.1", first):
        flags = f"--engine sim --device cpu --port {second} --admin-port {first} --run-root {tmp_path}"
        assert main(["serve", *flags.split()]) == BAD_INPUT
    error = capsys.readouterr().err
    assert f"port {first} is in use" in error and "--admin-port" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("port", "said"), [(8000, "the clients' port"), (70000, "expected int <= 65535"), (-1, "expected int >= 0")]
)
def test_a_port_that_cannot_be_is_refused(port: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeployConfig(admin_port=port)


def test_a_key_without_a_port_is_refused(key_file: str) -> None:
    with pytest.raises(ConfigError, match="--admin-key-file needs --admin-port"), open_admin("127.0.0.1", 0, key_file):
        pass


@pytest.mark.parametrize("workers", ["1", "2"])
def test_metrics_and_the_table_move_to_the_admin_port(tmp_path: Path, key_file: str, workers: str) -> None:
    (port,) = free_ports(1)
    admin, key = f"http://127.0.0.1:{port}", "an-admin-key-of-some-length"
    flags = ("--workers", workers, "--admin-port", str(port), "--admin-key-file", key_file)
    with launched(tmp_path, "P-D", *flags, key=key, table=f"{admin}/instances") as (client, _):
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        for path in ("/metrics", "/instances"):
            assert client.get(path).status_code == 404
            assert get(f"{admin}{path}").status_code == get(f"{admin}{path}", "wrong").status_code == 401
        rows = get(f"{admin}/instances", key).json()["instances"]
        assert {row["id"]: row["up"] for row in rows} == {"P0": True, "D0": True}
        text = get(f"{admin}/metrics", key).text
        assert 'epd_proxy_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
        assert "epd_stage_running" in text, "what the stages report, too"


def test_without_a_key_no_user_of_the_host_and_no_rebound_page_changes_the_deployment(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    admin = f"http://127.0.0.1:{port}"
    with launched(tmp_path, "P-D", "--admin-port", str(port), table=f"{admin}/instances"):

        def relayout(headers: dict[str, str]) -> int:
            order = {"layout": "PD"}
            answer = httpx.post(f"{admin}/deployment/layout", json=order, headers=headers, timeout=PATIENCE_S)
            return answer.status_code

        page = f"evil.example:{port}"
        assert relayout({}) == 401
        assert relayout({"host": page, "origin": f"http://{page}"}) == 403
        assert relayout({"origin": "http://evil.example"}) == 403
        assert httpx.get(f"{admin}/instances", headers={"host": page}, timeout=PATIENCE_S).status_code == 403
        assert get(f"{admin}/deployment").json()["layout"] == "P-D"
