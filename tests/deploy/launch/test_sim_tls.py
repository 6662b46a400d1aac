"""HTTPS at the clients' port: the OpenAI SDK with an authority of one's own, several workers, another certificate."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.cli.command import main
from deploy.host.ports import free_ports
from tests.certificates import certificate
from tests.deploy.launch.test_sim_launch import profile_file
from tests.epd_serve.sim.served import looking
from tests.waiting import PATIENCE_S, wait_for


def asked(url: str, authority: str) -> list[str]:
    """What the SDK streams about a picture, and a whole answer."""
    context = ssl.create_default_context(cafile=authority)
    with httpx.Client(verify=context, trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
        messages: Any = looking()["messages"]
        stream = client.chat.completions.create(model="epd-demo", messages=messages, max_tokens=5, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        whole = client.chat.completions.create(model="epd-demo", messages=messages, max_tokens=5)
        return [streamed, whole.choices[0].message.content or ""]


@pytest.mark.slow
def test_the_sdk_talks_https_and_a_new_certificate_needs_no_restart(tmp_path: Path) -> None:
    authority, key = certificate(tmp_path)
    (port,) = free_ports(1)
    url = f"https://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deploy.cli", "serve", "--engine", "sim", "--layout", "E-PD", "--port", str(port)]
    command += ["--run-root", str(tmp_path), "--sim-profile", profile_file(tmp_path), "--arena-mib", "32"]
    command += ["--workers", "2", "--tls-cert-file", authority, "--tls-key-file", key]
    log = tmp_path / "launch.log"
    with log.open("wb") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(lambda: "Ready in" in log.read_text() or launcher.poll() is not None, "ready")
        assert f"{url}/v1" in log.read_text(), log.read_text()
        first, whole = asked(url, authority)
        assert first == whole != ""
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/live", trust_env=False)
        certificate(tmp_path, "another")
        wait_for(lambda: all(_trusts(url, authority) for _ in range(8)), "the new certificate at all workers")
        assert asked(url, authority) == [first, whole]
    finally:
        launcher.send_signal(signal.SIGINT)
        try:
            assert launcher.wait(PATIENCE_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise


def _trusts(url: str, authority: str) -> bool:
    try:
        context = ssl.create_default_context(cafile=authority)
        return httpx.get(f"{url}/live", verify=context, trust_env=False).status_code == 200
    except (httpx.TransportError, ssl.SSLError):
        return False


@pytest.mark.parametrize("flags", [["--tls-cert-file", "cert.pem"], ["--tls-key-file", "key.pem"]], ids=str)
def test_a_certificate_without_its_key_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["serve", "--engine", "sim", *flags]) == 2
    assert "go together" in capsys.readouterr().err
