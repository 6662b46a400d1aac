"""What `epd-serve render kubernetes` writes: manifests that the API server takes, by its own schemas, and that say what
a deployment needs of a cluster.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.cli.command import main, serve_config
from deploy.options.config import DeployConfig
from tests.deploy.kubernetes.manifests import (
    IMAGE,
    Manifest,
    check_schema,
    container_of,
    one,
    pod_of,
    rendered,
    settings,
)

ROOT = Path(__file__).parents[3]
LAYOUTS = ["TP1", "(E-P)-D", "E-P-D", "2E-P-2D", "(E-PD)", "(E-P-D)", "(E:tp2-P:tp2)-D:tp2", "TP1x16", "(E-P)x2-2D"]
MODEL = "--model /models/Qwen2.5-VL-7B-Instruct --mount pvc:models:/models"
NPU, CUDA = f"{MODEL} --device npu", f"{MODEL} --device cuda"
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
RESTRICTED_VOLUMES |= {"projected", "secret"}


# --- the API server takes them ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "device"), [*((one, "npu") for one in LAYOUTS), ("TP1", "cuda"), ("TP1", "cpu")])
def test_all_objects_are_valid(layout, device, capsys):
    for manifest in rendered(f"'{layout}' {MODEL} --device {device} --service-monitor", capsys):
        check_schema(manifest)


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_all_objects_are_valid_whatever_is_asked_for(version, capsys):
    words = (
        f"{CUDA} --name qwen-eu --namespace serving --devices-per-pod 4 --nodes 2-8 --limit memory=256Gi "
        "--limit rdma/hca=1 --mount secret:client-keys:/etc/keys --mount configmap:profiles:/etc/profiles "
        "--mount host:/data:/data:rw "
        "--runtime-class nvidia --env HF_HOME=/data/hf --shm-mib 4096 --await-empty-s 60 --service-monitor "
        "--set api_key_file=/etc/keys/keys.json --set host=::1 --set follow=act --set slo.ttft_s=1.5"
    )
    manifests = rendered(f"'(E-P)x2-4D' {words}", capsys)
    for manifest in manifests:
        check_schema(manifest, version)
        assert manifest["metadata"]["namespace"] == "serving"
        assert manifest["metadata"]["name"].startswith("qwen-eu")


def test_a_wrong_field_is_seen_by_the_check_itself(capsys):
    manifests = rendered(f"TP1 {NPU} --service-monitor", capsys)
    node, monitor = one(manifests, "Deployment", "epd-node"), one(manifests, "ServiceMonitor")
    pod_of(node)["shmSize"] = "1Gi"
    with pytest.raises(kubernetes_validate.ValidationError, match="shmSize"):
        check_schema(node)
    monitor["spec"]["endpoints"][0]["honourLabels"] = True
    with pytest.raises(jsonschema.ValidationError, match="honourLabels"):
        check_schema(monitor)


def test_what_is_printed_goes_through_a_pipe():
    words = [sys.executable, "-m", "deploy.cli", "render", "kubernetes", "(E-P)-D", *f"{NPU} {IMAGE}".split()]
    written = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    check = [sys.executable, "-m", "kubernetes_validate", "--strict", "-"]
    checked = subprocess.run(check, input=written.stdout, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("passed for resource") == len(list(yaml.safe_load_all(written.stdout))) == 11
    assert "&id" not in written.stdout, "nothing by reference"


# --- nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "more", "pods", "devices"),
    [
        ("(E-P)-D", "", 1, 2),
        ("2E-P-2D", "", 1, 5),
        ("2E-P-2D", "--devices-per-pod 2", 3, 2),
        ("E-P-D", "--devices-per-pod 1", 3, 1),
        ("(E-PD)", "", 1, 1),
        ("TP1x16", "", 2, 8),
        ("TP2x3", "--devices-per-pod 3", 3, 3),  # none of them is divided between two pods
        ("2E-P:tp4-D:tp4", "--devices-per-pod 4", 3, 4),
    ],
)
def test_there_are_pods_for_the_layout(layout, more, pods, devices, capsys):
    node = one(rendered(f"'{layout}' {NPU} {more}", capsys), "Deployment", "epd-node")
    assert node["spec"]["replicas"] == pods
    assert container_of(node)["resources"]["limits"] == {"huawei.com/Ascend910": str(devices)}
    assert node["spec"]["template"]["metadata"]["annotations"]["epd-serve/devices"] == str(devices)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 0}}),
        ("--strategy rolling", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
        ("--strategy recreate", {"type": "Recreate"}),
    ],
)
def test_an_update_takes_what_is_asked_for_and_has_the_time_of_a_start(words, wanted, capsys):
    manifests = rendered(f"TP1 {NPU} {words} --set startup_timeout_s=1800", capsys)
    for manifest in manifests:
        check_schema(manifest)
    node = one(manifests, "Deployment", "epd-node")
    assert node["spec"]["strategy"] == wanted
    assert node["spec"]["progressDeadlineSeconds"] > 1800


def test_the_admin_key_is_where_its_secret_is_mounted(capsys):
    manifests = rendered(f"TP1 {NPU}", capsys)
    mounts = container_of(one(manifests, "Deployment", "-controller"))["volumeMounts"]
    (path,) = [each["mountPath"] for each in mounts if each["name"] == "admin"]
    assert settings(manifests)["admin_key_file"] == f"{path}/key"


def test_stages_of_a_pod_share_one_container(capsys):
    node = one(rendered(f"'(E-P)-D' {NPU}", capsys), "Deployment", "epd-node")
    container = container_of(node)
    assert container["args"][0] == "node"
    assert "command" not in container, "the image's entry point sets CANN's variables"
    assert dict(zip(container["args"][1::2], container["args"][2::2], strict=True)) == {
        "--listen": "0.0.0.0:9443",
        "--secrets": "/etc/epd/secrets",
        "--advertise": "$(POD_IP)",
    }
    assert container["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--device npu", {"huawei.com/Ascend910": "2"}),
        ("--device npu --resource huawei.com/ascend-1980", {"huawei.com/ascend-1980": "2"}),
        ("--device cuda", {"nvidia.com/gpu": "2"}),
        ("--device cpu", None),
        ("--device cpu --limit cpu=16 --limit memory=64Gi", {"cpu": "16", "memory": "64Gi"}),
        (
            "--device npu --resource huawei.com/Ascend910B3 --limit huawei.com/Ascend910B3-memory=32768",
            {"huawei.com/Ascend910B3": "2", "huawei.com/Ascend910B3-memory": "32768"},
        ),
    ],
)
def test_devices_are_asked_for_by_the_name_that_the_cluster_has_for_them(words, wanted, capsys):
    container = container_of(one(rendered(f"'(E-P)-D' {words}", capsys), "Deployment", "epd-node"))
    assert container.get("resources") == (wanted and {"limits": wanted, "requests": wanted})


def test_probes_ask_the_node(capsys):
    container = container_of(one(rendered(f"TP1 {CUDA}", capsys), "Deployment", "epd-node"))
    (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "node"]
    asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: ask["path"] for kind, ask in asked.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert all((ask["scheme"], ask["port"]) == ("HTTPS", "node") for ask in asked.values())
    assert container["args"][2].endswith(f":{port}")


def test_a_pod_that_ends_waits_for_its_instances_to_move_and_its_requests_to_end(capsys):
    node = one(
        rendered(f"TP1 {CUDA} --await-empty-s 100 --set drain_s=20 --set lame_duck_s=7", capsys),
        "Deployment",
        "epd-node",
    )
    words = container_of(node)["lifecycle"]["preStop"]["exec"]["command"]
    assert words[:3] == ["epd-serve", "node", "--await-empty"]
    assert words[words.index("--within-s") + 1] == "100"
    assert words[words.index("--listen") + 1] == container_of(node)["args"][2]
    assert pod_of(node)["terminationGracePeriodSeconds"] >= 100 + 20 + 7 + 15
    at_once = one(rendered(f"TP1 {CUDA} --await-empty-s 0", capsys), "Deployment", "epd-node")
    assert "lifecycle" not in container_of(at_once)


def shm_mib(manifests: list[Manifest]) -> int:
    pod = pod_of(one(manifests, "Deployment", "epd-node"))
    (volume,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    (mount,) = [
        each for each in container_of(one(manifests, "Deployment", "epd-node"))["volumeMounts"] if each["name"] == "shm"
    ]
    assert (volume["emptyDir"]["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")
    return int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))


def test_shared_memory_holds_arena_and_links_twice(capsys):
    small = shm_mib(rendered(f"'(E-P)-D' {NPU} --set arena_mib=512 --set kv_staging_mib=64", capsys))
    assert small >= 2 * (512 + 64)
    assert shm_mib(rendered(f"'(E-P)-D' {NPU} --set arena_mib=8192", capsys)) >= 2 * 8192
    assert shm_mib(rendered(f"'(E-P)-4D' {NPU} --set arena_mib=512 --set kv_staging_mib=1024", capsys)) >= 2 * 4 * 1024
    assert shm_mib(rendered(f"'E-P-D' {NPU} --devices-per-pod 1 --set kv_staging_mib=4096", capsys)) < 2 * 4096
    assert shm_mib(rendered(f"'(E-P)-D' {NPU} --shm-mib 777", capsys)) == 777


def test_a_service_of_the_namespace_sets_no_setting_of_ours(capsys):
    manifests = rendered(f"TP1 {CUDA}", capsys)
    assert one(manifests, "Service", "epd")["metadata"]["name"] == "epd", "Kubernetes would make EPD_PORT of it"
    assert not pod_of(one(manifests, "Deployment", "epd-node"))["enableServiceLinks"]
    assert not pod_of(one(manifests, "Deployment", "-controller"))["enableServiceLinks"]


# --- controller ---------------------------------------------------------------------------------------------------


def test_there_is_one_controller_at_a_time_and_it_may_ask_what_it_asks(capsys):
    manifests = rendered(f"TP1 {CUDA}", capsys)
    controller = one(manifests, "Deployment", "-controller")
    assert (controller["spec"]["replicas"], controller["spec"]["strategy"]) == (1, {"type": "Recreate"})
    account = one(manifests, "ServiceAccount")["metadata"]["name"]
    assert pod_of(controller)["serviceAccountName"] == account
    assert one(manifests, "RoleBinding")["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    ]
    (rule,) = one(manifests, "Role")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}
    assert not pod_of(one(manifests, "Deployment", "epd-node"))["automountServiceAccountToken"]


def test_it_may_scale_its_own_pods_where_it_is_told_to(capsys):
    manifests = rendered(f"TP1 {CUDA} --nodes 1-8", capsys)
    node = one(manifests, "Deployment", "epd-node")
    assert node["spec"]["template"]["metadata"]["annotations"]["epd-serve/nodes"] == "1-8"
    assert one(manifests, "Role")["rules"][1] == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": [node["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }


def test_it_reads_the_settings_that_were_asked_for(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "layout: E-P-D\nname: mine\nstage_args: {P: --max-num-seqs 8}\nproxy: {slo: {ttft_s: 1.5}}\nport: 8100\n"
    )
    manifests = rendered(f"{file} {CUDA} --set media.schemes=data,https", capsys)
    controller = one(manifests, "Deployment", "-controller")
    words = container_of(controller)["args"]
    assert words == [
        *("serve", "--config", "/etc/epd/deployment.yaml", "--runtime", "kubernetes"),
        *("--node-secrets", "/etc/epd/secrets"),
    ]
    (mount,) = [each for each in container_of(controller)["volumeMounts"] if each["name"] == "config"]
    assert mount["mountPath"] == words[2]
    there = tmp_path / "there.yaml"
    there.write_text(one(manifests, "ConfigMap")["data"]["deployment.yaml"])
    config = serve_config(["--config", str(there), "--runtime", "kubernetes"])
    assert config.stage_args == ("P:--max-num-seqs 8",)
    assert (config.layout, config.slo.ttft_s, config.media.schemes) == ("E-P-D", 1.5, ("data", "https"))
    assert (config.model, config.device, config.fronts) == ("/models/Qwen2.5-VL-7B-Instruct", "cuda", "every")
    assert (config.host, config.port, config.admin_host, config.admin_port) == ("0.0.0.0", 8100, "0.0.0.0", 9000)
    assert config.admin_key_file == "/etc/epd/admin/key"
    assert one(manifests, "Service", "mine")["spec"]["ports"][0]["port"] == 8100


def test_only_what_differs_from_the_defaults_is_written(capsys):
    written = settings(rendered(f"'(E-P)-D' {CUDA}", capsys))
    assert DeployConfig().layout == "(E-P)-D"
    assert sorted(written) == ["admin_host", "admin_key_file", "admin_port", "device", "fronts", "host", "model"]


def test_other_settings_are_read_by_another_controller(capsys):
    digests = {
        one(rendered(f"TP1 {CUDA} {more}", capsys), "Deployment", "-controller")["spec"]["template"]["metadata"][
            "annotations"
        ]["epd-serve/config"]
        for more in ("", "--set port=8001", "--limit cpu=1")
    }
    assert len(digests) == 2


# --- who reaches whom, and what may be done -----------------------------------------------------------------------


def labels_of(workload: Manifest) -> dict[str, str]:
    found = workload["spec"]["template"]["metadata"]["labels"]
    assert isinstance(found, dict)
    return found


def selects(selector: dict[str, str], workload: Manifest) -> bool:
    return selector.items() <= labels_of(workload).items()


def test_services_lead_to_front_doors_and_controller(capsys):
    manifests = rendered(f"'(E-P)x2-2D' {CUDA} --devices-per-pod 2", capsys)
    node, controller = one(manifests, "Deployment", "epd-node"), one(manifests, "Deployment", "-controller")
    for name, workload, other in (
        ("epd", node, controller),
        ("epd-controller", controller, node),
    ):
        service = next(each for each in manifests if (each["kind"], each["metadata"]["name"]) == ("Service", name))
        assert selects(service["spec"]["selector"], workload)
        assert not selects(service["spec"]["selector"], other)
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] in [each["name"] for each in container_of(workload)["ports"]]
    assert labels_of(node)["llm-d.ai/role"] == "encode-prefill-decode"


def test_members_reach_nodes_and_clients_only_front_doors(capsys):
    manifests = rendered(f"TP1 {CUDA}", capsys)
    node, controller = one(manifests, "Deployment", "epd-node"), one(manifests, "Deployment", "-controller")
    members, clients = one(manifests, "NetworkPolicy", "node")["spec"]["ingress"]
    (source,) = members["from"]
    assert "ports" not in members
    assert all(selects(source["podSelector"]["matchLabels"], each) for each in (node, controller))
    assert "from" not in clients
    assert [port["port"] for port in clients["ports"]] == ["clients"]
    (admin,) = one(manifests, "NetworkPolicy", "controller")["spec"]["ingress"]
    assert [port["port"] for port in admin["ports"]] == ["admin"]


def test_two_deployments_of_a_namespace_have_nothing_in_common(capsys):
    first, second = (rendered(f"TP1 {CUDA} --name {name}", capsys) for name in ("epd", "epd-b"))
    names = [{(each["kind"], each["metadata"]["name"]) for each in some} for some in (first, second)]
    assert not names[0] & names[1]
    for name in ("-node", "-controller"):
        workloads = [one(some, "Deployment", name) for some in (first, second)]
        assert not selects(workloads[0]["spec"]["selector"]["matchLabels"], workloads[1])
    budget = one(first, "PodDisruptionBudget")
    assert not selects(budget["spec"]["selector"]["matchLabels"], one(second, "Deployment", "-node"))


def not_restricted(pod: Manifest) -> set[str]:
    """What the Pod Security Standard `restricted` would say against a pod."""
    (container,) = pod["containers"]
    own, shared = container["securityContext"], pod["securityContext"]
    wrong = {kind for volume in pod["volumes"] for kind in volume if kind != "name"} - RESTRICTED_VOLUMES
    wrong |= {"privilege escalation"} if own.get("allowPrivilegeEscalation") is not False else set()
    wrong |= {"capabilities"} if own["capabilities"] != {"drop": ["ALL"]} else set()
    wrong |= {"root"} if shared.get("runAsNonRoot") is not True else set()
    wrong |= {"seccomp"} if shared["seccompProfile"]["type"] != "RuntimeDefault" else set()
    wrong |= {"privileged"} if own.get("privileged") else set()
    return wrong | {"host"} if any(key.startswith("host") for key in pod) else wrong


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (CUDA, set()),
        (f"{MODEL} --device cpu", set()),
        (NPU, {"hostPath"}),
        (f"{NPU} --runtime-class ascend", set()),
        (f"{NPU} --drivers ''", set()),
    ],
)
def test_pods_are_restricted_but_for_what_the_driver_wants(words, wrong, capsys):
    manifests = rendered(f"TP1 {words}", capsys)
    assert not_restricted(pod_of(one(manifests, "Deployment", "epd-node"))) == wrong
    assert not_restricted(pod_of(one(manifests, "Deployment", "-controller"))) == set()


def test_secrets_are_for_their_group_alone_and_are_in_no_manifest(capsys):
    manifests = rendered(f"TP1 {CUDA}", capsys)
    assert not [each for each in manifests if each["kind"] == "Secret"]
    pods = [pod_of(one(manifests, "Deployment", name)) for name in ("-node", "-controller")]
    named = []
    for pod in pods:
        assert pod["securityContext"]["fsGroup"] > 0
        projected = [volume["projected"] for volume in pod["volumes"] if "projected" in volume]
        assert {volume["defaultMode"] for volume in projected} == {0o440}
        named.append([source["secret"]["name"] for volume in projected for source in volume["sources"]])
    assert named == [["epd-tls", "epd-token"], ["epd-tls", "epd-token", "epd-admin"]]


def test_volumes_are_seen_by_nodes_and_controller(capsys):
    words = "--mount secret:client-keys:/etc/keys --mount host:/data:/data:rw --set api_key_file=/etc/keys/keys.json"
    manifests = rendered(f"TP1 {CUDA} {words}", capsys)
    for name in ("-node", "-controller"):
        workload = one(manifests, "Deployment", name)
        mounts = {each["mountPath"]: each for each in container_of(workload)["volumeMounts"]}
        sources = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
        assert mounts["/models"]["readOnly"]
        assert sources[mounts["/models"]["name"]]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert sources[mounts["/etc/keys"]["name"]]["secret"] == {"secretName": "client-keys", "defaultMode": 0o440}
        assert not mounts["/data"]["readOnly"]
        assert sources[mounts["/data"]["name"]]["hostPath"] == {"path": "/data"}
        assert len(mounts) == len(container_of(workload)["volumeMounts"])


def test_drivers_are_the_hosts_unless_a_runtime_brings_them(capsys):
    def paths(words: str) -> list[str]:
        volumes = pod_of(one(rendered(f"TP1 {words}", capsys), "Deployment", "epd-node"))["volumes"]
        return [volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume]

    assert "/usr/local/Ascend/driver" in paths(NPU)
    assert paths(f"{NPU} --runtime-class ascend") == paths(CUDA) == []
    assert paths(f"{CUDA} --drivers /opt/driver,/etc/rdma.conf") == ["/opt/driver", "/etc/rdma.conf"]
    pod = pod_of(one(rendered(f"TP1 {NPU} --runtime-class ascend", capsys), "Deployment", "epd-node"))
    assert pod["runtimeClassName"] == "ascend"


# --- monitoring ---------------------------------------------------------------------------------------------------


def test_prometheus_asks_the_controller_with_the_admin_key(capsys):
    manifests = rendered(f"TP1 {CUDA} --service-monitor", capsys)
    monitor, service = one(manifests, "ServiceMonitor"), one(manifests, "Service", "epd-controller")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"]] == [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["honorLabels"], "`instance` is one of the deployment, as dashboard and alerts want it"
    assert endpoint["authorization"]["credentials"] == {"name": "epd-admin", "key": "key"}
    others = [each for each in manifests if each["kind"] == "Service" and each is not service]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert not [each for each in others if wanted <= each["metadata"]["labels"].items()]


def test_the_alerts_are_a_prometheus_rule():
    """By the lines of the guide."""
    guide = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = [each for each in guide.splitlines() if "kind: PrometheusRule" in each]
    command = line.removeprefix("$ ").rpartition("|")[0]
    made = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    rule = yaml.safe_load(made.stdout)
    check_schema(rule)
    alerts = yaml.safe_load((ROOT / "docs/examples/monitoring/alerts.yaml").read_text(encoding="utf-8"))
    assert rule["spec"] == alerts


# --- what cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("'(E-P)-D' --device npu", "--image says what the pods run"),
        (f"'(E-P)-D' {IMAGE}", "--device auto: nobody sees the pods'"),
        (f"'P-' {IMAGE} --device npu", "P-"),
        (f"'E-D' {IMAGE} --device npu", "E encodes, but there is no P"),
        (f"nothere.yaml {IMAGE} --device npu", "config file nothere.yaml does not exist"),
        (f"TP1 {IMAGE} --device tpu", "npu"),
        (f"TP1 {IMAGE} --device npu --strategy serge", "surge"),
        (f"TP16 {IMAGE} --device npu", "takes 16 devices and a pod has 8"),
        (f"TP4 {IMAGE} --device npu --devices-per-pod 2", "take more by --devices-per-pod, or a smaller tp"),
        (f"TP1 {IMAGE} --device npu --devices-per-pod -1", "--devices-per-pod is '-1'; expected int >= 0"),
        (f"TP1 {IMAGE} --device npu --nodes 2-4", "--nodes '2-4' is not FIRST-LAST around the 1 of EPD, as 1-2"),
        (f"TP1 {IMAGE} --device npu --nodes some", "--nodes 'some' is not FIRST-LAST"),
        (f"TP1 {IMAGE} --device npu --mount models:/models", "not KIND:NAME:/PATH"),
        (f"TP1 {IMAGE} --device npu --mount nfs:a:/models", "KIND one of pvc, secret, configmap, host"),
        (f"TP1 {IMAGE} --device npu --mount pvc:a:models", "--mount 'pvc:a:models' is not KIND:NAME:/PATH"),
        (f"TP1 {IMAGE} --device npu --mount host:data:/data", "--mount 'host:data:/data' is not KIND:NAME:/PATH"),
        (f"TP1 {IMAGE} --device npu --mount host:/a/../b:/data", "is not KIND:NAME:/PATH"),
        (f"TP1 {IMAGE} --device npu --mount pvc:a:/etc/epd/secrets", "pods have something of their own at"),
        (f"TP1 {IMAGE} --device npu --limit memory", "--limit 'memory' is not NAME=VALUE"),
        (f"TP1 {IMAGE} --device npu --limit memory=lots", "--limit memory=lots is no quantity, such as"),
        (f"TP1 {IMAGE} --device npu --limit memory=1Gi --shm-mib 2048", "less to it by --shm-mib"),
        (f"TP1 {IMAGE} --device npu --env =1", "--env '=1' is not NAME=VALUE"),
        (f"TP1 {IMAGE} --device npu --drivers usr", "--drivers 'usr' is no absolute path"),
        (f"TP1 {IMAGE} --device npu --namespace Prod", "--namespace 'Prod'"),
        (f"TP1 {IMAGE} --device npu --name 9x", "begins with a letter"),
        (f"TP1 {IMAGE} --device npu --set api_key_file=/keys", "api_key_file /keys: no pod has it; bring a volume"),
        (f"TP1 {IMAGE} --device npu --set trace_path=/var/x", "trace_path /var/x: no pod has it"),
        (f"TP1 {IMAGE} --device npu --set admin_key_file=/k", "Secret epd-admin has it; drop it"),
        (f"TP1 {IMAGE} --device npu --set host=10.0.0.1", "take 0.0.0.0 or ::"),
        (f"TP1 {IMAGE} --device npu --set port=9443", "port 9443 is one of nodes"),
        (f"TP1 {IMAGE} --device npu --set admin_port=20001", "admin_port 20001 is one of nodes"),
        (f"TP1 {IMAGE} --device npu --set fronts=here", "fronts here: the controller's pod has no front doors"),
        (f"TP1 {IMAGE} --device npu --set node_host=eth0", "node_host: a pod says its own address"),
        (f"TP1 {IMAGE} --device npu --set share_devices=true", "share_devices"),
        (f"TP1 {IMAGE} --device npu --set stage_args='Q:--x'", "Q"),
        (f"TP1 {IMAGE} --device npu --set layuot=TP1", "layout"),
        (f"TP1 {IMAGE} --device npu --set port", "set entry 'port' is not KEY=VALUE"),
        (f"TP1 {IMAGE} --device npu --replicas 2", "--replicas"),
    ],
)
def test_bad_input_is_said_in_one_line(words, said, capsys):
    assert main(["render", "kubernetes", *shlex.split(words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "", "nothing that kubectl would take"
    assert said in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("TP1 --device npu --model /models/x", "no --mount brings it"),
        ("'E-P:tp2-D:tp2' --device cuda --devices-per-pod 2", "3 pods of 2 devices have 1 more"),
        ("'E-P-D' --device npu --devices-per-pod 1", "features of NPUs stay in their pod"),
    ],
)
def test_doubts_are_said_beside_the_manifests(words, said, capsys):
    assert main(["render", "kubernetes", *shlex.split(f"{words} {IMAGE}")]) == 0
    shown = capsys.readouterr()
    assert f"warning: {said}" in shown.err or said in shown.err
    assert len(list(yaml.safe_load_all(shown.out))) == 11
