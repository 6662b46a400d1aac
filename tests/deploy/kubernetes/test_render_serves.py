"""What is rendered serves: its configuration and its command lines, on a cluster of real node processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from deploy.host.environment import module_environment
from deploy.host.ports import free_ports
from tests.deploy.kubernetes.cluster import FakeCluster, Load
from tests.deploy.kubernetes.manifests import container_of, one, rendered
from tests.deploy.launch.test_sim_launch import profile_file
from tests.deploy.node_secrets import node_secrets
from tests.waiting import PATIENCE_S, until

ADMIN_KEY = "an-admin-key-of-the-test"
IN_THE_POD = """
import sys
from pathlib import Path
from deploy.kubernetes import serve
from deploy.cli.command import main
account, serve_on = Path(sys.argv[1]), serve.serve_on_kubernetes
serve.serve_on_kubernetes = lambda config: serve_on(config, account)
sys.exit(main(sys.argv[2:]))
"""
"""The service account of a pod is elsewhere here; all else is as its command line says."""


@contextmanager
def controller(cluster: FakeCluster, words: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """Its process; the environment of whoever is in its pod."""
    place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.api.port)}
    (folder / "c").mkdir(mode=0o700)
    environment = module_environment() | place | {"XDG_RUNTIME_DIR": str(folder / "c")}
    command = [sys.executable, "-c", IN_THE_POD, str(cluster.api.account), *words]
    with (folder / "controller.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield environment
        assert process.wait(PATIENCE_S) == 0, (folder / "controller.log").read_text()
    finally:
        process.kill()
        process.wait()


async def test_a_rendered_deployment_serves_is_asked_by_prometheus_and_ends(tmp_path: Path, capsys) -> None:
    (admin_port,) = free_ports(1)
    words = f"--set engine=sim --set sim_profile={profile_file(tmp_path)} --mount host:{tmp_path}:{tmp_path}"
    words += " --set arena_mib=32 --set kv_staging_mib=4 --set served_model_name=epd-demo --set lame_duck_s=0"
    manifests = rendered(f"'(E-P)-D' {words} --devices-per-pod 1", capsys)
    workload = one(manifests, "Deployment", "-node")
    key, settings, secrets = tmp_path / "key", tmp_path / "deployment.yaml", node_secrets(tmp_path / "secrets")
    key.touch(mode=0o600)
    key.write_text(ADMIN_KEY)
    written = one(manifests, "ConfigMap")["data"]["deployment.yaml"]
    elsewhere = written.replace("/etc/epd/admin/key", str(key)).replace("port: 9000", f"port: {admin_port}")
    settings.write_text(elsewhere)
    here = {"/etc/epd/deployment.yaml": str(settings), "/etc/epd/secrets": str(secrets)}
    told = [here.get(word, word) for word in container_of(one(manifests, "Deployment", "-controller"))["args"]]

    cluster = FakeCluster(tmp_path, secrets)
    cluster.annotations = workload["spec"]["template"]["metadata"]["annotations"]
    cluster.api.replicas = workload["spec"]["replicas"]
    async with cluster.running():
        with controller(cluster, told, tmp_path) as environment:
            await cluster.ready(2)
            load = Load(cluster)
            async with load.running():
                await load.more()
            assert load.failed == []
            assert len(load.by) == 2, "front doors of both pods"
            text = await scraped(admin_port)
            assert "\nepd_control_nodes 2.0\n" in text
            assert "\nepd_control_nodes_wanted 2.0\n" in text
            down = [sys.executable, "-m", "deploy.cli", "down"]
            assert subprocess.run(down, env=environment, timeout=PATIENCE_S, check=False).returncode == 0


async def scraped(port: int) -> str:
    """Metrics, by the path and the key of the ServiceMonitor."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

        async def healthy() -> bool:
            try:
                return (await http.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        await until(healthy, "the admin listener")
        assert (await http.get("/metrics")).status_code == 401
        answer = await http.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert answer.status_code == 200
        return answer.text
