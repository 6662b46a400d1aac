from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deploy.host.ports import free_ports
from epd_serve.engine import compat
from epd_serve.roles import Role
from store.arena import Arena
from store.mooncake.master import MasterSettings, health_url, master_command, rpc_address
from tests.epd_serve.engine.ec.stages import Stages, make_arena
from tests.epd_serve.engine.ec.vllm_stub import GRID, Base, ECConnectorRole, Make
from tests.waiting import wait_for


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make_arena()
    yield made
    made.close()
    Arena.unlink(made.path)


@pytest.fixture
def stages(arena: Arena, tmp_path: Path) -> Iterator[Stages]:
    made = Stages(arena, tmp_path)
    yield made
    made.close()
    assert arena.stats().leased == 0, "a pin leaked"


@pytest.fixture
def connector_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    base = ModuleType("vllm.distributed.ec_transfer.ec_connector.base")
    base.__dict__.update(ECConnectorBase=Base, ECConnectorMetadata=object, ECConnectorRole=ECConnectorRole)
    parts = base.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "epd_serve.engine.ec.connector", raising=False)
    yield importlib.import_module("epd_serve.engine.ec.connector").FeatureConnector
    sys.modules.pop("epd_serve.engine.ec.connector")


@pytest.fixture
def make(stages: Stages, connector_class: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    for probe in ("can_fail_requests", "hands_over_encoder_cache", "tells_finished_requests"):
        monkeypatch.setattr(compat, probe, lambda: True)
    monkeypatch.setattr(compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(compat, "media_is_absent", lambda config: lambda features: any(f.bare for f in features))
    monkeypatch.setattr(
        compat,
        "item_metadata",
        lambda config: lambda features: {f.identifier: {"item_indices": [0], "metadata": dict(GRID)} for f in features},
    )

    def connector(role: Role, side: ECConnectorRole, **more: Any) -> Any:
        instance = f"{role.value}0"
        publish = {"publish": stages.events(instance)} if side is _announces(role) else {}
        events = {} if role is Role.E else {"E0": stages.events("E0")}
        wiring = stages.wiring(instance, role, events, **publish, **more)
        transfer = SimpleNamespace(
            is_ec_producer=role is Role.E,
            is_ec_consumer=role is not Role.E,
            ec_connector_extra_config={"epd": wiring.to_json()},
        )
        config = SimpleNamespace(
            ec_transfer_config=transfer,
            scheduler_config=SimpleNamespace(async_scheduling=False),
            device_config=SimpleNamespace(device="cpu"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(mm_processor_cache_gb=4, language_model_only=False)
            ),
        )
        made = connector_class(config, side)
        stages.parts.append(SimpleNamespace(close=made.shutdown))
        return made

    yield connector
    stages.close()


def _announces(role: Role) -> ECConnectorRole:
    return ECConnectorRole.WORKER if role is Role.E else ECConnectorRole.SCHEDULER


@pytest.fixture
def master() -> Iterator[str]:
    """A Mooncake master, as `host:port`."""
    rpc_port, metrics_port = free_ports(2)
    with running_master(MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)) as address:
        yield address


@contextlib.contextmanager
def running_master(settings: MasterSettings) -> Iterator[str]:
    executable = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    process = subprocess.Popen(master_command(settings, executable), stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(health_url(settings), timeout=1) as answer:
                return b"service_ready" in answer.read() or answer.status == 200
        except OSError:
            return False

    try:
        wait_for(healthy)
        yield rpc_address(settings)
    finally:
        process.kill()
        process.wait(10)
