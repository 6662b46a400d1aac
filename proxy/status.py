"""What the proxy says about itself: health, models, version, instances. Pure functions from state to JSON."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import structs

from epd_serve.errors import NotFoundError
from epd_serve.instances import Instance
from epd_serve.wire import StoreReport
from npu_ops.core_grants import CoreGrant
from proxy.circuit import State
from proxy.circuits import Circuits
from proxy.kv_links import link_views, shown
from proxy.life import InstanceView
from proxy.paths import paths
from proxy.settings import ProxySettings
from proxy.table import InstanceTable

STARTED = int(time.time())


def health(settings: ProxySettings, table: InstanceTable) -> tuple[int, dict[str, Any]]:
    """200 while every role of the layout has a live instance, else 503 and what is missing.

    Without a layout (stages join one by one) the roles that came count, and they have to make a path.
    """
    wanted = settings.roles or table.roles()
    missing = [role.value for role in table.missing(wanted)]
    if not missing and paths(wanted, multimodal=False):
        return 200, {"status": "ok"}
    return 503, {"status": "unavailable", "missing": missing, "instances": instances(table)["instances"]}


def models(settings: ProxySettings) -> dict[str, Any]:
    """OpenAI's model list. All names are one model."""
    shared: dict[str, Any] = {"object": "model", "created": STARTED, "owned_by": "epd-serve"}
    if settings.max_model_len is not None:
        shared["max_model_len"] = settings.max_model_len
    root = settings.identity.model
    return {"object": "list", "data": [{"id": name, **shared, "root": root} for name in settings.served_models]}


def model(settings: ProxySettings, name: str) -> dict[str, Any]:
    """One entry of the model list. Raises NotFoundError."""
    for found in models(settings)["data"]:
        if found["id"] == name:
            entry: dict[str, Any] = found
            return entry
    raise NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")


def instances(table: InstanceTable, circuits: Circuits | None = None) -> dict[str, Any]:
    """The status table, with the state of each instance's circuit where somebody keeps circuits."""
    views = table.snapshot()
    links = list(link_views(views))
    return {
        "instances": [
            {
                "id": view.instance.id,
                "role": view.instance.role.value,
                "incarnation": view.instance.incarnation,
                "devices": list(view.instance.devices),
                "core_share": view.instance.core_share,
                "cores": [_cores(grant) for grant in view.instance.cores],
                "up": view.up,
                "reason": view.reason,
                "in_flight": {work.value: count for work, count in view.in_flight.items()},
                "load": view.load,
                "circuit": _circuit(circuits, view.instance),
                "stage": _stage(view),
                "store": _store(view.report),
                "kv_links": [shown(link) for link in links if link.sender == view.instance.id],
            }
            for view in views
        ]
    }


def _cores(grant: CoreGrant) -> dict[str, Any]:
    """What one worker has of its device's cores, and whether anything holds it to that."""
    return {
        "rank": grant.rank,
        "cores": dict(grant.cores),
        "of": dict(grant.total),
        "ids": list(grant.core_ids),
        "enforced": grant.enforced,
    }


def _circuit(circuits: Circuits | None, instance: Instance) -> str:
    state = circuits.state(instance.id, instance.incarnation) if circuits is not None else State.CLOSED
    return state.value


def _stage(view: InstanceView) -> dict[str, Any] | None:
    """What its scheduler reports, and how long ago; None for one that has not reported yet."""
    if view.stage is None:
        return None
    told = {
        name: value for name, value in structs.asdict(view.stage).items() if name not in ("instance", "incarnation")
    }
    return {**told, "age_s": round(view.stage_age_s, 3)}


def _store(report: StoreReport | None) -> dict[str, Any] | None:
    """What the instance reports of the MM Store; None for one that does not."""
    if report is None:
        return None
    return {name: value for name, value in structs.asdict(report).items() if name not in ("instance", "incarnation")}


def own_version() -> dict[str, str]:
    try:
        return {"version": version("epd-serve")}
    except PackageNotFoundError:
        return {"version": "unknown"}
