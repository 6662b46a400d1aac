"""What Ray is told and used for: words and numbers, no secret, and nothing of it that it does not promise to keep."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import deploy.ray
from deploy.options.config import DeployConfig
from deploy.ray import attach, cluster
from deploy.ray.cluster import RayNode
from deploy.ray.hosts import RayHosts
from tests.deploy.node_secrets import node_secrets

FOLDER = Path(deploy.ray.__path__[0])


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_of_ray_nothing_is_used_that_it_does_not_promise_to_keep(file: Path) -> None:
    used: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            used += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            used += [name.name for name in node.names if name.name.split(".")[0] == "ray"]
        elif isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("self."):
            used += [f"ray.{word.arg}" for word in node.keywords if (word.arg or "").startswith("_")]
    assert not [one for one in used if any(part.startswith("_") or part == "experimental" for part in one.split("."))]


def test_actors_are_made_of_words_and_numbers_without_any_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []
    made = SimpleNamespace(options=lambda **_: made, remote=lambda *arguments: told.extend(arguments))
    monkeypatch.setattr("ray.remote", lambda kind: made)
    monkeypatch.setattr(cluster, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    for name in ("connect", "require_token"):
        monkeypatch.setattr(attach, name, lambda *_: None)
    monkeypatch.setattr(attach, "deployments", list)
    monkeypatch.setattr(attach, "here", lambda: "a")
    monkeypatch.setattr(attach, "_Attached", lambda name, begun: SimpleNamespace(until_ended=lambda detach: begun()))
    secrets = node_secrets(tmp_path)
    config = DeployConfig(node_secrets=str(secrets), runtime="ray")
    attach.serve_on_ray(config)
    world = RayHosts(config, "cpu")
    world._alive = {"a": RayNode("a", "10.0.0.1", {"CPU": 2.0})}
    world._hired("a")
    assert {type(one) for one in told} <= {str, bool, int}
    assert msgspec.json.decode(told[0], type=DeployConfig) == config
    for name in ("token", "tls.key"):
        assert not [one for one in told if isinstance(one, str) and (secrets / name).read_text().strip() in one]
