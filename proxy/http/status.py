"""What the proxy says about itself: health, readiness, models, version, instances. Pure: from state to JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import structs

from epd_serve.errors import NotFoundError
from epd_serve.instances import Instance
from epd_serve.roles import Role, stages_of
from epd_serve.wire import StoreReport
from npu_ops.core_grants import CoreGrant
from proxy.admission.gate import Drain
from proxy.config.settings import ProxySettings
from proxy.fields.parts import Modality
from proxy.registry.instance_state import InstanceView
from proxy.registry.kv_links import link_fields, link_views
from proxy.registry.table import InstanceTable
from proxy.routing.plan import paths
from proxy.stages.circuits import Circuits, State

STARTED = int(time.time())


TEXT = "text"


class Readiness:
    """Which kinds of requests are served now, and how: `text`, and what the model takes beside it.

    A kind is served while live instances make a path for it. Media are served without a live encoder, too: who prefills
    encodes them then, which `how` says. What waits in a pause for wanted instances counts as served. Whoever may
    not see the status table learns that a kind is served, and not how or what is missing.

    Args:
        down: tasks that feed the status table and do not run. What they would have said is missing; requests go on.
    """

    def __init__(
        self, settings: ProxySettings, table: InstanceTable, drain: Drain, down: Mapping[str, str] | None = None
    ) -> None:
        self._drain = drain
        self._paused = bool(table.pause.left_s)
        self._open = settings.observed and settings.api_keys is None
        self._down = dict(down or {})
        self._missing = [role.value for role in table.missing()]
        self._waiting = [view.instance.id for view in table.snapshot() if not (view.up or view.draining)]
        live = table.live_roles() | (table.wanted if self._paused else frozenset())
        media = settings.modalities if settings.modalities is not None else frozenset(map(str, Modality))
        self._how = {kind: _how(kind, live, table.wanted) for kind in (TEXT, *sorted(media))}

    def health(self) -> tuple[int, dict[str, Any]]:
        """200 while anything is served."""
        if self._drain.announced:
            return 503, {"status": "draining", "running": self._drain.running}
        if any(self._how.values()):
            return 200, {"status": "paused" if self._paused else "ok"}
        return 503, {"status": "unavailable", **self._if_open(missing=self._missing)}

    def ready(self, kind: str | None = None, *, everything: bool = False) -> tuple[int, dict[str, Any]]:
        """200 while any kind is served; of `kind`, while that is; of `everything`, while all are, as the layout means
        it: every role and every instance that is known is live, and nothing that feeds the table is down.

        Raises:
            NotFoundError: this deployment promises no such kind.
        """
        if kind is not None and kind not in self._how:
            raise NotFoundError(
                f"`{kind}` is not served here; kinds are {', '.join(self._how)}", param="kind", code="unknown_kind"
            )
        whole = all(self._how.values()) and not (self._missing or self._waiting or self._down)
        served = whole if everything else bool(self._how[kind]) if kind is not None else any(self._how.values())
        if self._drain.announced:
            served, status = False, "draining"
        elif self._paused:
            status = "paused"
        else:
            status = "ready" if whole else "degraded" if any(self._how.values()) else "unavailable"
        return 200 if served else 503, {
            "status": status,
            "kinds": {
                name: {"served": bool(how), **self._if_open(how=how or "no path of live instances")}
                for name, how in self._how.items()
            },
            **self._if_open(missing=self._missing, waiting=self._waiting, down=self._down),
        }

    def _if_open(self, **of_the_table: object) -> dict[str, object]:
        return of_the_table if self._open else {}


def _how(kind: str, live: frozenset[Role], wanted: frozenset[Role]) -> str:
    """The paths on which requests of a kind are served now; "" where there is none."""
    ways = paths(live, multimodal=kind != TEXT)
    names = ", ".join(path.name for path in ways)
    apart = kind != TEXT and Role.E in wanted and Role.E not in live
    if names and apart and any(path.head in (Role.P, Role.PD) for path in ways):
        return f"{names} (no encoder is live: prefill encodes)"
    return names


def health_of(word: str, table: InstanceTable) -> tuple[int, dict[str, Any]]:
    """200 while a live instance runs the stages of `word`, a role as llm-d calls it: `encode`, `prefill-decode`.

    Raises:
        NotFoundError: it is no role, or none that this deployment is to have.
    """
    stages = stages_of(word)
    if not stages or not any(role.runs(stages) for role in table.wanted):
        there = ", ".join(sorted({role.word for role in table.wanted})) or "none"
        raise NotFoundError(f"`{word}` is no role here; roles are {there}", param="role", code="unknown_role")
    if any(role.runs(stages) for role in table.live_roles()):
        return 200, {"status": "ok"}
    return 503, {"status": "unavailable"}


def models(settings: ProxySettings) -> dict[str, Any]:
    """OpenAI's model list. All names are one model. `role`: to who routes to this server, it is a whole one."""
    shared: dict[str, Any] = {"object": "model", "created": STARTED, "owned_by": "epd-serve", "role": Role.EPD.word}
    if settings.max_model_len is not None:
        shared["max_model_len"] = settings.max_model_len
    root = settings.identity.model
    return {"object": "list", "data": [{"id": name, **shared, "root": root} for name in settings.served_models]}


def model(settings: ProxySettings, name: str) -> dict[str, Any]:
    """One entry of the model list. Raises NotFoundError."""
    entries: list[dict[str, Any]] = models(settings)["data"]
    for entry in entries:
        if entry["id"] == name:
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
                "labels": view.instance.role.labels,
                "incarnation": view.instance.incarnation,
                "devices": list(view.instance.devices),
                "core_share": view.instance.core_share,
                "cores": [_cores(grant) for grant in view.instance.cores],
                "up": view.up,
                "draining": view.draining,
                "reason": view.reason,
                "in_flight": {work.value: count for work, count in view.in_flight.items()},
                "load": view.load,
                "pending_s": round(view.pending_s, 3) if math.isfinite(view.pending_s) else None,
                "neighbours": list(view.neighbours),
                "circuit": _circuit(circuits, view.instance),
                "stage": _stage(view),
                "store": _store(view.report),
                "kv_links": [link_fields(link) for link in links if link.sender == view.instance.id],
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
    fields = {
        name: value for name, value in structs.asdict(view.stage).items() if name not in ("instance", "incarnation")
    }
    return {**fields, "age_s": round(view.stage_age_s, 3)}


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
