"""A rendered pod without a cluster: its command line, its secrets as the guide makes them and kubelet mounts them, its
probes and its preStop, on the real node process.
"""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.cli.command import parse_words
from deploy.host.environment import module_environment
from deploy.host.ports import free_ports
from deploy.kubernetes.hosts import RANGE, Pod
from deploy.runtime.secrets import NAME, OPEN, NodeSecrets
from tests.deploy.kubernetes.manifests import Manifest, container_of, one, rendered
from tests.docs.documents import ROOT
from tests.waiting import PATIENCE_S, wait_for

GUIDE = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8").replace("\\\n", " ")


def node_of(capsys, words: str = "") -> Manifest:
    return container_of(one(rendered(f"'(E-P)-D' --device cpu {words}", capsys), "Deployment", "epd-node"))


def mounted(folder: Path) -> Path:
    """The members' secrets, made by the guide's commands, as kubelet has them in a projected volume of mode 0440."""
    (line,) = [line for line in GUIDE.splitlines() if line.startswith("$ openssl req")]
    made = folder / "made"
    made.mkdir()
    subprocess.run(["bash", "-c", line.removeprefix("$ ")], cwd=made, capture_output=True, timeout=60, check=True)
    token = subprocess.run(["openssl", "rand", "-hex", "32"], capture_output=True, text=True, timeout=60, check=True)
    volume = folder / "secrets"
    (data := volume / "..2026_11_28").mkdir(parents=True)
    (volume / "..data").symlink_to(data.name)
    contents = {name: (made / name).read_text() for name in ("tls.crt", "tls.key")} | {"token": token.stdout.strip()}
    for name, text in contents.items():
        (data / name).write_text(text)
        (data / name).chmod(0o440)
        (volume / name).symlink_to(f"..data/{name}")
    return volume


@contextmanager
def running(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "deploy.cli", *words, "--run-root", str(folder)]
    with subprocess.Popen(command, env=module_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_words_of_a_pod_are_the_nodes(capsys):
    container = node_of(capsys, "--await-empty-s 77")
    words = parse_words(container["args"])
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    asked = parse_words(stop[1:])
    assert stop[0] == "epd-serve"
    assert (words["listen"], words["secrets"], words["await_empty"]) == ("0.0.0.0:9443", "/etc/epd/secrets", False)
    assert (asked["listen"], asked["secrets"], asked["await_empty"]) == ("0.0.0.0:9443", "/etc/epd/secrets", True)
    assert asked["within_s"] == 77.0
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == set(OPEN), "kubelet shows no token"


def test_a_pod_listens_is_alive_before_it_is_ready_and_ends(tmp_path, capsys):
    container, secrets = node_of(capsys), mounted(tmp_path)
    (port,) = free_ports(1)
    here = {"0.0.0.0:9443": f"127.0.0.1:{port}", "/etc/epd/secrets": str(secrets), "$(POD_IP)": "127.0.0.1"}

    def told(words: list[str]) -> list[str]:
        return [here.get(word, word) for word in words]

    kubelet = ssl.create_default_context()
    kubelet.check_hostname, kubelet.verify_mode = False, ssl.CERT_NONE

    def probed(kind: str) -> int:
        probe = container[f"{kind}Probe"]["httpGet"]
        try:
            url = f"{probe['scheme'].lower()}://127.0.0.1:{port}{probe['path']}"
            return httpx.get(url, verify=kubelet, trust_env=False, timeout=5).status_code
        except httpx.TransportError:
            return 0

    with running(told(container["args"]), tmp_path) as process:
        wait_for(lambda: probed("startup") == 200, "it listens")
        assert (probed("liveness"), probed("readiness")) == (200, 503), "nobody has told it its deployment"
        stop = told(container["lifecycle"]["preStop"]["exec"]["command"])[1:]
        ended = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *stop], env=module_environment(), timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == 0, "no instance is there"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("words", "range_"), [("", None), ("--nodes 1-4", "1-4")])
def test_the_controller_reads_of_a_pod_what_it_lends(words, range_, capsys):
    workload = one(rendered(f"'(E-P)x2-2D' --device npu --devices-per-pod 2 {words}", capsys), "Deployment", "epd-node")
    template = workload["spec"]["template"]
    metadata = {**template["metadata"], "name": "epd-node-5d4f-x2b", "uid": "0123456789"}
    metadata["labels"] = {**metadata["labels"], "pod-template-hash": "5d4f"}
    metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": "epd-node-5d4f"}]
    states = [{"name": "node", "state": {"running": {}}}]
    status = {"phase": "Running", "podIP": "10.1.2.3", "containerStatuses": states}
    pod = Pod.of({"metadata": metadata, "spec": template["spec"], "status": status})
    assert (pod.host.devices, pod.host.address, pod.node) == (2, "10.1.2.3", "10.1.2.3:9443")
    assert pod.annotations.get(RANGE) == range_
    assert pod.deployment == workload["metadata"]["name"], "which the Role lets it scale"


def test_cert_managers_certificate_is_for_the_name_that_is_wanted():
    (text,) = [block.partition("```")[0] for block in GUIDE.split("```yaml\n")[1:] if "kind: Certificate" in block]
    assert yaml.safe_load(text)["spec"]["dnsNames"] == [NAME]
    assert yaml.safe_load(text)["spec"]["secretName"] == "epd-tls"


def test_secrets_of_a_mounted_volume_are_taken(tmp_path):
    assert len(NodeSecrets(str(mounted(tmp_path)), "--secrets").token) == 64
