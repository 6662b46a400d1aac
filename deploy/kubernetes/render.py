"""The manifests of a deployment: `epd-serve render kubernetes`. One function for each kind, in the order in which
they are applied; what they say is `render_values.py`'s.

A Deployment of pods that are alike, whose one container is a node (`epd-serve node`) and forks the stages that the
controller places there: an extended resource belongs to one container, and stages of one pod share its devices and
`/dev/shm`. Secrets are not among them: docs/guides/kubernetes.md says how they are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import yaml

from deploy.kubernetes.hosts import DEVICES, RANGE
from deploy.kubernetes.render_values import ADMIN_DIR, CONFIG_FILE, NODE_PORT, SECRETS_DIR, Mount, Values
from epd_serve import __version__

Manifest = dict[str, Any]
Volume = tuple[Manifest, Manifest]
"""One of a pod, and where its container sees it."""

CONTROLLER, NODE = "controller", "node"
MEMBER_GID = 10001
"""Group that may read mounted secrets; the image's user is in it only by the pod."""

SERVES = {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": "encode-prefill-decode"}
"""In llm-d's and KServe's words. A pod serves all of a request at the clients' port, whichever stages it has."""

LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
STARTUP = {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 90}
READINESS = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2}


def manifests(values: Values) -> Iterator[Manifest]:
    """All objects of a deployment."""
    yield config_map(values)
    yield _object("v1", "ServiceAccount", values, CONTROLLER, automountServiceAccountToken=False)
    yield role(values)
    yield role_binding(values)
    yield from services(values)
    yield from network_policies(values)
    yield disruption_budget(values)
    yield nodes(values)
    yield controller(values)
    if values.service_monitor:
        yield service_monitor(values)


def text_of(documents: Iterator[Manifest]) -> str:
    """As YAML, texts of several lines readable, nothing by reference."""
    return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, width=120, explicit_start=True)


def config_map(values: Values) -> Manifest:
    data = {PurePosixPath(CONFIG_FILE).name: yaml.dump(values.document(), sort_keys=False, width=120)}
    return _object("v1", "ConfigMap", values, CONTROLLER, "config", data=data)


def role(values: Values) -> Manifest:
    """What the controller asks of the API server, and nothing else. It marks pods with what their end would cost."""
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}]
    if values.nodes:
        scale = {"resources": ["deployments/scale"], "resourceNames": [_name(values, NODE)]}
        rules.append({"apiGroups": ["apps"], **scale, "verbs": ["get", "patch"]})
    return _object("rbac.authorization.k8s.io/v1", "Role", values, CONTROLLER, rules=rules)


def role_binding(values: Values) -> Manifest:
    group, name = "rbac.authorization.k8s.io", _name(values, CONTROLLER)
    whose = {"kind": "ServiceAccount", "name": name, "namespace": values.namespace}
    which = {"apiGroup": group, "kind": "Role", "name": name}
    return _object(f"{group}/v1", "RoleBinding", values, CONTROLLER, roleRef=which, subjects=[whose])


def services(values: Values) -> Iterator[Manifest]:
    """The front doors of all pods that are ready; metrics, page and what changes the deployment, with the admin key."""
    config = values.config
    for component, part, name, port, protocol in (
        (NODE, "", "clients", config.port, "https" if config.tls_cert_file else "http"),
        (CONTROLLER, CONTROLLER, "admin", config.admin_port, "http"),
    ):
        ports = [{"name": name, "port": port, "targetPort": name, "appProtocol": protocol}]
        spec = {"selector": _selector(values, component), "ports": ports}
        yield _object("v1", "Service", values, component, part, spec=spec)


def network_policies(values: Values) -> Iterator[Manifest]:
    """Controller and nodes reach every port of a node; whoever else is there, front doors and admin listener."""
    members = {"from": [{"podSelector": {"matchLabels": _selector(values)}}]}
    for component, port, others in ((NODE, "clients", [members]), (CONTROLLER, "admin", [])):
        ingress = [*others, {"ports": [{"port": port, "protocol": "TCP"}]}]
        selector = {"matchLabels": _selector(values, component)}
        spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
        yield _object("networking.k8s.io/v1", "NetworkPolicy", values, component, spec=spec)


def disruption_budget(values: Values) -> Manifest:
    """One node at a time: its instances move before the next goes."""
    selector = {"matchLabels": _selector(values, NODE)}
    spec = {"maxUnavailable": 1, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return _object("policy/v1", "PodDisruptionBudget", values, NODE, spec=spec)


def nodes(values: Values) -> Manifest:
    """In an update no new pod begins before an old one is gone: nobody has devices to spare."""
    listen = f"[::]:{NODE_PORT}" if values.config.host == "::" else f"0.0.0.0:{NODE_PORT}"
    whom = ["--listen", listen, "--secrets", SECRETS_DIR]
    within = str(values.await_empty_s)
    await_empty = ["epd-serve", "node", "--await-empty", *whom, "--within-s", within]
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = _container(values, NODE, ["node", *whom, "--advertise", "$(POD_IP)"], address) | {
        "ports": [
            {"name": "node", "containerPort": NODE_PORT},
            {"name": "clients", "containerPort": values.config.port},
        ],
        "startupProbe": _probe("/health", STARTUP),
        "livenessProbe": _probe("/health", LIVENESS),
        "readinessProbe": _probe("/ready", READINESS),
    }
    if values.limits:
        container["resources"] = {"limits": dict(values.limits), "requests": dict(values.limits)}
    if values.await_empty_s:
        container["lifecycle"] = {"preStop": {"exec": {"command": await_empty}}}
    volumes = [_folder("shm", "/dev/shm", medium="Memory", sizeLimit=f"{values.shm}Mi")]
    volumes += [_bound(f"driver-{at}", Mount("host", path, path)) for at, path in enumerate(values.driver_paths)]
    pod = _pod(values, container, volumes) | {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": values.grace_s,
        "tolerations": [
            {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
            for state in ("unreachable", "not-ready")  # its instances start elsewhere so much later
        ],
    }
    if values.runtime_class:
        pod["runtimeClassName"] = values.runtime_class
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    spec = {"replicas": values.replicas, "strategy": strategy}
    annotations = {DEVICES: str(values.devices)}
    if values.nodes:
        annotations[RANGE] = values.nodes
    return _deployment(values, NODE, spec, pod, annotations, SERVES)


def controller(values: Values) -> Manifest:
    """One at a time; nodes serve on while there is none."""
    words = ["serve", "--config", CONFIG_FILE, "--runtime", "kubernetes", "--node-secrets", SECRETS_DIR]
    container = _container(values, CONTROLLER, words) | {
        "ports": [{"name": "admin", "containerPort": values.config.admin_port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "admin"}, **READINESS},
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
    }
    file = PurePosixPath(CONFIG_FILE).name
    config = {"name": "config", "configMap": {"name": _name(values, "config")}}
    where = {"mountPath": CONFIG_FILE, "subPath": file, "readOnly": True}  # a file: no other volume would be within it
    volumes = [_secrets("admin", ADMIN_DIR, _name(values, "admin")), (config, where)]
    pod = _pod(values, container, volumes) | {
        "serviceAccountName": _name(values, CONTROLLER),
        "automountServiceAccountToken": True,
    }
    digest = hashlib.sha256(config_map(values)["data"][file].encode()).hexdigest()
    spec = {"replicas": 1, "strategy": {"type": "Recreate"}}
    return _deployment(values, CONTROLLER, spec, pod, {"epd-serve/config": digest[:16]}, {})


def service_monitor(values: Values) -> Manifest:
    """For the Prometheus operator: one target has all metrics, whose `instance` is an instance of the deployment."""
    key = {"name": _name(values, "admin"), "key": "key"}
    endpoint = {
        "port": "admin",
        "path": "/metrics",
        "interval": "15s",
        "honorLabels": True,
        "authorization": {"type": "Bearer", "credentials": key},
    }
    spec = {"selector": {"matchLabels": _selector(values, CONTROLLER)}, "endpoints": [endpoint]}
    return _object("monitoring.coreos.com/v1", "ServiceMonitor", values, CONTROLLER, spec=spec)


# --- what they have in common -------------------------------------------------------------------------------------


def _name(values: Values, part: str = "") -> str:
    return "-".join(filter(None, (values.config.name, part)))


def _selector(values: Values, component: str = "") -> dict[str, str]:
    """Labels by which pods are found: those of a component, or all of the deployment. They never change."""
    found = {"app.kubernetes.io/name": "epd-serve", "app.kubernetes.io/instance": values.config.name}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def _object(api: str, kind: str, values: Values, component: str, part: str | None = None, **fields: Any) -> Manifest:
    labels = _selector(values, component) | {"app.kubernetes.io/version": __version__}
    name = _name(values, component if part is None else part)
    metadata = {"name": name, "namespace": values.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def _deployment(
    values: Values,
    component: str,
    spec: Manifest,
    pod: Manifest,
    annotations: dict[str, str],
    labels: dict[str, str],
) -> Manifest:
    selector = _selector(values, component)
    template = {"metadata": {"labels": selector | labels, "annotations": annotations}, "spec": pod}
    spec = {**spec, "selector": {"matchLabels": selector}, "template": template}
    return _object("apps/v1", "Deployment", values, component, spec=spec)


def _pod(values: Values, container: Manifest, own: list[Volume]) -> Manifest:
    """As the Pod Security Standard `restricted` wants it, but for volumes of the host.

    Members show each other a certificate, as cert-manager or kubectl makes its Secret, and a token. Services of the
    namespace stay out of the environment: one called `epd` would set EPD_PORT, a setting of ours.
    """
    members = _secrets("members", SECRETS_DIR, _name(values, "tls"), _name(values, "token"))
    given = (_bound(f"mount-{at}", one) for at, one in enumerate(values.mounts))
    volumes = [members, *own, _folder("tmp", "/tmp"), *given]
    mounts = [{"name": volume["name"], **mount} for volume, mount in volumes]
    return {
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": MEMBER_GID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container | {"volumeMounts": mounts}],
        "volumes": [volume for volume, _ in volumes],
    }


def _container(values: Values, name: str, words: list[str], *variables: Manifest) -> Manifest:
    """`words`: for the image's entry point, which is `epd-serve` in an environment with CANN's variables."""
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    env = [*variables, *({"name": key, "value": value} for key, value in values.variables.items())]
    return {"name": name, "image": values.image, "args": words, "env": env, "securityContext": closed}


def _probe(path: str, times: dict[str, int]) -> Manifest:
    return {"httpGet": {"path": path, "port": "node", "scheme": "HTTPS"}, **times}


def _secrets(name: str, path: str, *secrets: str) -> Volume:
    sources = [{"secret": {"name": one}} for one in secrets]
    volume = {"name": name, "projected": {"sources": sources, "defaultMode": 0o440}}
    return volume, {"mountPath": path, "readOnly": True}


def _folder(name: str, path: str, **fields: str) -> Volume:
    return {"name": name, "emptyDir": fields}, {"mountPath": path}


def _bound(name: str, mount: Mount) -> Volume:
    sources: dict[str, Manifest] = {
        "pvc": {"persistentVolumeClaim": {"claimName": mount.name, "readOnly": not mount.writable}},
        "secret": {"secret": {"secretName": mount.name, "defaultMode": 0o440}},
        "configmap": {"configMap": {"name": mount.name}},
        "host": {"hostPath": {"path": mount.name}},
    }
    return {"name": name, **sources[mount.kind]}, {"mountPath": mount.path, "readOnly": not mount.writable}


class _Readable(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
    return node


_Readable.add_representer(str, _text)
