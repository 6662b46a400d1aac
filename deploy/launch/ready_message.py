"""What is printed when a deployment is ready: endpoint, placement, and a command to try it with. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import epd_serve.demo
from deploy.host.started import ENDS
from deploy.memory.placement_table import placement_rows, table
from deploy.plan.blueprint import Blueprint
from epd_serve.endpoint import for_http, socket_path
from epd_serve.instances import Instance
from store.addresses import authority

SAMPLE = Path(epd_serve.demo.__path__[0]) / "samples" / "red_circle.png"


def ready_message(
    blueprint: Blueprint, logs: Path | str, instances: Mapping[str, Instance], seconds: float, ends: str = ENDS
) -> str:
    """The whole message, without a final newline.

    Args:
        logs: where they are, or what shows them. instances: those of the blueprint, by id, as they run.
        ends: how all of it is ended.
    """
    endpoint = endpoint_url(blueprint)
    rows = [
        (*row, column)
        for row, column in zip(
            placement_rows(blueprint.plans, blueprint.device, blueprint.machines.described),
            ("server", *(_server(instances[plan.id].url) for plan in blueprint.plans)),
            strict=True,
        )
    ]
    return "\n".join(
        (
            f"Ready in {seconds:.1f} s: {blueprint.layout} on {blueprint.device} serves {blueprint.served_model_name}",
            "",
            f"  endpoint  {endpoint}/v1   logs  {logs}",
            *_admin_lines(blueprint),
            "",
            table(rows),
            *_core_lines(instances),
            "",
            *(f"  {line}" for line in blueprint.ways.lines()),
            *([""] if blueprint.ways.kv else []),
            "Try it" + (" with a picture (a red circle):" if _sees(blueprint) else ":"),
            "",
            curl(blueprint, endpoint),
            "",
            ends,
        )
    )


def _server(url: str) -> str:
    """Of a stage: its port's address, or its socket's name in the folder of the logs."""
    return Path(socket_path(url)).name or for_http(url).netloc


def _admin_lines(blueprint: Blueprint) -> list[str]:
    config = blueprint.config
    address = authority(config.admin_host, config.admin_port)
    return [f"  admin     http://{address}/metrics, /instances"] if config.admin_port else []


def _core_lines(instances: Mapping[str, Instance]) -> list[str]:
    """What each worker of those with a share read back, `E0: 7 of 24 cube, 14 of 48 vector`."""
    told = [
        f"{name}: {'; '.join(dict.fromkeys(grant.summary() for grant in one.cores)) or 'unknown'}"
        for name, one in instances.items()
        if one.core_share is not None
    ]
    return ["", "  cores     " + "   ".join(told)] if told else []


def endpoint_url(blueprint: Blueprint) -> str:
    """Base URL for clients of this machine."""
    host = blueprint.config.host
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    scheme = "https" if blueprint.config.tls_cert_file else "http"
    return f"{scheme}://{authority(host, blueprint.config.port)}"


def curl(blueprint: Blueprint, endpoint: str) -> str:
    """A chat request to paste into a shell."""
    question = {"type": "text", "text": "What is in the picture?"}
    content: Any = "Hello, who are you?"
    if _sees(blueprint):
        content = [{"type": "image_url", "image_url": {"url": _data_url(SAMPLE)}}, question]
    body = json.dumps(
        {
            "model": blueprint.served_model_name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 64,
            "temperature": 0,
        }
    )
    key = ' -H "Authorization: Bearer $EPD_API_KEY"' if blueprint.config.api_key_file else ""
    return f"curl -s {endpoint}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {_quoted(body)}"


def _data_url(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _sees(blueprint: Blueprint) -> bool:
    return blueprint.facts is None or blueprint.facts.multimodal
