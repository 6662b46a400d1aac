"""What the proxy says about itself: health, readiness, models, version, instances. Pure: from state to what is
answered, of types that the OpenAPI document is made from, too."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from epd_serve.errors import NotFoundError
from epd_serve.roles import Role, stages_of
from epd_serve.wire import StageReport, StoreReport
from proxy.admission.gate import Drain
from proxy.config.settings import ProxySettings
from proxy.fields.parts import Modality
from proxy.registry.stage_metrics import link_fields, link_views
from proxy.registry.table import InstanceTable
from proxy.routing.plan import paths
from proxy.stages.circuits import Circuits, State

STARTED = int(time.time())
TEXT = "text"


class Live(Struct):
    status: Literal["alive"] = "alive"


class Version(Struct):
    version: str


class ModelCard(Struct):
    """`role`: what this server is to a router before it, in llm-d's words. `root`: the name of the model itself.
    `max_model_len`: context length in tokens, where it is known."""

    id: str
    created: int
    root: str
    max_model_len: int | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "epd-serve"
    role: str = Role.EPD.word


class Models(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(Struct):
    """`missing`: roles of the layout without a live instance, for those who may see the status table."""

    status: Literal["ok", "paused", "unavailable", "draining"]
    running: int | UnsetType = UNSET
    missing: list[str] | UnsetType = UNSET


class Kind(Struct):
    """Of requests. `how`: on which paths, for those who may see the status table."""

    served: bool
    how: str | UnsetType = UNSET


class Ready(Struct):
    """The last three are for those who may see the status table. `missing`: roles of the layout without a live
    instance. `waiting`: instances that are known and not live. `down`: tasks that feed the status table and do not run,
    and why."""

    status: Literal["ready", "degraded", "paused", "unavailable", "draining"]
    kinds: dict[str, Kind]
    missing: list[str] | UnsetType = UNSET
    waiting: list[str] | UnsetType = UNSET
    down: dict[str, str] | UnsetType = UNSET


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
        paused = bool(table.pause.left_s)
        live = table.live_roles() | (table.wanted if paused else frozenset())
        media = settings.modalities if settings.modalities is not None else frozenset(map(str, Modality))
        self._how = {kind: _how(kind, live, table.wanted) for kind in (TEXT, *sorted(media))}
        self._state: Literal["draining", "paused", ""] = "draining" if drain.announced else "paused" if paused else ""
        self._running = drain.running
        missing = [role.value for role in table.missing()]
        waiting = [view.instance.id for view in table.snapshot() if not (view.up or view.draining)]
        self._some = any(self._how.values())
        self._whole = all(self._how.values()) and not (missing or waiting or down)
        self._open = settings.observed and settings.api_keys is None
        self._lacks: dict[str, Any] = (
            {"missing": missing, "waiting": waiting, "down": dict(down or {})} if self._open else {}
        )

    def health(self) -> tuple[int, Health]:
        """200 while anything is served."""
        if self._state == "draining":
            return 503, Health("draining", self._running)
        if self._some:
            return 200, Health(self._state or "ok")
        return 503, Health("unavailable", missing=self._lacks.get("missing", UNSET))

    def ready(self, kind: str | None = None, *, everything: bool = False) -> tuple[int, Ready]:
        """200 while any kind is served; of `kind`, while that is; of `everything`, while all are, as the layout means
        it: every role and every instance that is known is live, and nothing that feeds the table is down.

        Raises:
            NotFoundError: this deployment promises no such kind.
        """
        if kind is not None and kind not in self._how:
            raise NotFoundError(
                f"`{kind}` is not served here; kinds are {', '.join(self._how)}", param="kind", code="unknown_kind"
            )
        asked = self._whole if everything else self._some if kind is None else self._how[kind]
        state = self._state or ("ready" if self._whole else "degraded" if self._some else "unavailable")
        kinds = {
            name: Kind(bool(how), (how or "no path of live instances") if self._open else UNSET)
            for name, how in self._how.items()
        }
        code = 200 if asked and self._state != "draining" else 503
        return code, Ready(state, kinds, **self._lacks)


def _how(kind: str, live: frozenset[Role], wanted: frozenset[Role]) -> str:
    """The paths on which requests of a kind are served now; "" where there is none."""
    ways = paths(live, multimodal=kind != TEXT)
    names = ", ".join(path.name for path in ways)
    apart = kind != TEXT and Role.E in wanted and Role.E not in live
    if apart and any(path.head in (Role.P, Role.PD) for path in ways):
        return f"{names} (no encoder is live: prefill encodes)"
    return names


def health_of(word: str, table: InstanceTable) -> tuple[int, Health]:
    """200 while a live instance runs the stages of `word`, a role as llm-d calls it: `encode`, `prefill-decode`.

    Raises:
        NotFoundError: it is no role, or none that this deployment is to have.
    """
    stages = stages_of(word)
    if not stages or not any(role.runs(stages) for role in table.wanted):
        there = ", ".join(sorted({role.word for role in table.wanted})) or "none"
        raise NotFoundError(f"`{word}` is no role here; roles are {there}", param="role", code="unknown_role")
    live = any(role.runs(stages) for role in table.live_roles())
    return (200, Health("ok")) if live else (503, Health("unavailable"))


def models(settings: ProxySettings) -> Models:
    """OpenAI's model list. All names are one model. `role`: to who routes to this server, it is a whole one."""
    root, length = settings.identity.model, settings.max_model_len
    return Models([ModelCard(name, STARTED, root, length or UNSET) for name in settings.served_models])


def model(settings: ProxySettings, name: str) -> ModelCard:
    """One entry of the model list. Raises NotFoundError."""
    for card in models(settings).data:
        if card.id == name:
            return card
    raise NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")


def instances(table: InstanceTable, circuits: Circuits | None = None) -> dict[str, Any]:
    """The status table, with the state of each instance's circuit where somebody keeps circuits."""
    views = table.snapshot()
    links = list(link_views(views))
    rows = []
    for view in views:
        instance = view.instance
        circuit = circuits.state(*instance.incarnation_id) if circuits is not None else State.CLOSED
        rows.append(
            {
                "id": instance.id,
                "role": instance.role.value,
                "labels": instance.role.labels,
                "incarnation": instance.incarnation,
                "devices": list(instance.devices),
                "cpu_cores": list(instance.cpu_cores),
                "core_share": instance.core_share,
                "cores": [
                    # what one worker has of its device's cores, and whether anything holds it to that
                    {
                        "rank": grant.rank,
                        "cores": dict(grant.cores),
                        "of": dict(grant.total),
                        "ids": list(grant.core_ids),
                        "enforced": grant.enforced,
                    }
                    for grant in instance.cores
                ],
                "up": view.up,
                "draining": view.draining,
                "reason": view.reason,
                "in_flight": {work.value: count for work, count in view.in_flight.items()},
                "load": view.load,
                "pending_s": round(view.pending_s, 3) if math.isfinite(view.pending_s) else None,
                "neighbours": list(view.neighbours),
                "circuit": circuit.value,
                "stage": _reported(view.stage, age_s=round(view.stage_age_s, 3)),
                "store": _reported(view.report),
                "kv_links": [link_fields(link) for link in links if link.sender == instance.id],
            }
        )
    return {"instances": rows}


def _reported(report: StageReport | StoreReport | None, **more: float) -> dict[str, Any] | None:
    """What a stage reports of its scheduler or of the MM Store; None of one that has not."""
    if report is None:
        return None
    fields = structs.asdict(report) | more
    return {name: value for name, value in fields.items() if name not in ("instance", "incarnation")}
