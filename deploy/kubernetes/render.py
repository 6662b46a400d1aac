"""The manifests of a deployment, `epd-serve render kubernetes`: `manifests.yaml`, filled with what `render_values.py`
says."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from operator import attrgetter
from typing import Any

import yaml

from deploy.kubernetes.render_values import ADMIN_DIR, CONFIG_FILE, NODE_PORT, SECRETS_DIR, Mount, Values
from epd_serve import __version__

Manifest = dict[str, Any]

STRATEGIES: dict[str, Manifest] = {
    "surge": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 0}},
    "rolling": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    "recreate": {"type": "Recreate"},
}

_NAME = re.compile(r"\$([\w.]+)")

PULL_S = 600
"""For pods to be placed and to have the image; then stages start, before a rollout has failed."""

SERVES = {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": "encode-prefill-decode"}
"""In llm-d's and KServe's words. A pod serves all of a request at the clients' port, whichever stages it has."""


def manifests(values: Values) -> list[Manifest]:
    """All objects of a deployment, in the order in which they are applied."""
    template = resources.files(__package__).joinpath("manifests.yaml").read_text("utf-8")
    made = _made(values)

    def value(name: str) -> Any:
        return made[name] if name in made else attrgetter(name)(values)

    objects = [_filled(one, value) for one in yaml.safe_load_all(template)]
    return [one for one in objects if one["kind"] != "ServiceMonitor" or values.service_monitor]


def text_of(documents: Iterable[Manifest]) -> str:
    """As YAML, texts of several lines readable, nothing by reference."""
    return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, width=120, explicit_start=True)


def _made(values: Values) -> dict[str, Any]:
    """What names in the template stand for that are no attributes of the values."""
    config = values.config
    members = {"app.kubernetes.io/name": "epd-serve", "app.kubernetes.io/instance": config.name}
    node, controller = (members | {"app.kubernetes.io/component": one} for one in ("node", "controller"))
    version = {"app.kubernetes.io/version": __version__}
    settings = yaml.dump(values.document(), sort_keys=False, width=120)
    listen = f"[::]:{NODE_PORT}" if config.host == "::" else f"0.0.0.0:{NODE_PORT}"
    await_empty = ["epd-serve", "node", "--await-empty", "--listen", listen, "--secrets", SECRETS_DIR, "--within-s"]
    scaling = {"resources": ["deployments/scale"], "resourceNames": [f"{config.name}-node"], "verbs": ["get", "patch"]}
    driver_volumes, driver_mounts = _volumes("driver", [Mount("host", path, path) for path in values.driver_paths])
    volumes, mounts = _volumes("mount", values.mounts)
    return {
        "members": members,
        "node": node,
        "node_labels": node | version,
        "pod_labels": node | SERVES,
        "controller": controller,
        "controller_labels": controller | version,
        "settings": settings,
        "digest": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "scaling": {"apiGroups": ["apps"], **scaling} if values.nodes else None,
        "node_port": NODE_PORT,
        "protocol": "https" if config.tls_cert_file else "http",
        "strategy": STRATEGIES[values.strategy],
        "progress_s": PULL_S + math.ceil(config.startup_timeout_s),
        "devices": str(values.devices),
        "listen": listen,
        "config_file": CONFIG_FILE,
        "secrets_dir": SECRETS_DIR,
        "admin_dir": ADMIN_DIR,
        "env": [{"name": name, "value": value} for name, value in values.variables.items()],
        "await_empty": [*await_empty, str(values.await_empty_s)] if values.await_empty_s else None,
        "shm": f"{values.shm}Mi",
        "driver_volumes": driver_volumes,
        "driver_mounts": driver_mounts,
        "volumes": volumes,
        "mounts": mounts,
    }


def _filled(node: Any, value: Callable[[str], Any]) -> Any:
    """A part of the template with values in place of names; None where nothing is left of it."""
    if isinstance(node, str):
        whole = _NAME.fullmatch(node)
        return value(whole[1]) or None if whole else _NAME.sub(lambda name: value(name[1]), node)
    if isinstance(node, dict):
        left = {key: filled for key, one in node.items() if (filled := _filled(one, value)) is not None}
        return left if left or not node else None
    if isinstance(node, list):
        items = (_filled(one, value) for one in node)
        return [each for one in items for each in (one if isinstance(one, list) else [one]) if each is not None]
    return node


def _volumes(name: str, mounts: Sequence[Mount]) -> tuple[list[Manifest], list[Manifest]]:
    """Of a pod, and where its container sees them."""
    volumes = [{"name": f"{name}-{at}", **one.source} for at, one in enumerate(mounts)]
    seen = [
        {"name": f"{name}-{at}", "mountPath": one.path, "readOnly": not one.writable} for at, one in enumerate(mounts)
    ]
    return volumes, seen


class _Readable(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
    return node


_Readable.add_representer(str, _text)
