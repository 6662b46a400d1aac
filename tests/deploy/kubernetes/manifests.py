"""Rendered manifests for tests: by what a user types, found by kind and name, and held to the schemas of Kubernetes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from deploy.cli.command import main

SCHEMAS = Path(__file__).parent / "schemas"
IMAGE = "--image registry.example/epd-serve:1"
Manifest = dict[str, Any]


def rendered(words: str, capsys: Any, *, image: str = IMAGE) -> list[Manifest]:
    """What `epd-serve render kubernetes WORDS` prints."""
    code = main(["render", "kubernetes", *shlex.split(f"{words} {image}")])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return list(yaml.safe_load_all(shown.out))


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Manifest) -> Manifest:
    (only,) = pod_of(workload)["containers"]
    assert isinstance(only, dict)
    return only


def settings(manifests: list[Manifest]) -> Manifest:
    """The configuration that the controller reads."""
    read = yaml.safe_load(one(manifests, "ConfigMap")["data"]["deployment.yaml"])
    assert isinstance(read, dict)
    return read


def check_schema(manifest: Manifest, version: str = "1.37") -> None:
    """As the API server would, unknown fields included. Raises ValidationError."""
    own = SCHEMAS / f"{manifest['kind'].lower()}.json"
    if own.exists():
        jsonschema.validate(manifest, _closed(json.loads(own.read_text())))
        return
    assert kubernetes_validate.validate(manifest, version, strict=True) == version


def _closed(schema: Any) -> Any:
    """Objects with known fields have no others; nothing else of a CRD's is looser than JSON Schema."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(each) for key, each in schema.items()}
    if "properties" in closed and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
