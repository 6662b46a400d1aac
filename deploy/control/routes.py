"""The commands over HTTP, for `epd-serve status`, `relayout` and the like, and for other programs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from deploy.control.controller import Controller
from deploy.control.refusals import RefusedError
from deploy.control.status import Json
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from proxy.errors import error_body

MAX_PAUSE_S = 3600.0
Name = Annotated[str, InPath(description="An instance's id, such as `E0`.")]


class _Model(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class _Body(_Model):
    model_config = ConfigDict(extra="forbid")


class Pause(_Body):
    pause_s: Annotated[float, Field(ge=0.0, le=MAX_PAUSE_S)] = 0.0
    """For how long new requests may wait meanwhile."""


class DryRun(_Body):
    dry_run: bool = False
    """Only say what would be done."""


class DrainInstance(DryRun):
    pass


class Relayout(Pause, DryRun):
    layout: str
    """The layout that is wanted, for example `2E-P-D`."""


class Scale(Pause, DryRun):
    counts: dict[Role, Annotated[int, Field(ge=0)]]
    """Instances by role; others stay as many."""


class RestartFront(_Body):
    proxy: list[str] = []
    """Options of the front doors, `KEY=VALUE`; others stay as they are."""


class Follow(_Body):
    mode: Literal["off", "advise", "act"]
    """`advise` decides and changes nothing."""


class Step(_Model):
    action: str
    """`start`, `drain`, `stop`, `leave`, `flip`, `pause` or `resume`."""
    instance: str | None = None
    role: Role | None = None
    node: str | None = None
    devices: list[int] | None = None
    began_s: float | None = None
    """Since the change began."""
    seconds: float | None = None
    """How long it took; null while it is under way."""
    note: str | None = None


class Change(_Model):
    number: int
    what: str
    """The command, or `replace`: of what was lost with its node."""
    from_: Annotated[str, Field(alias="from")]
    """The layout before."""
    to: str
    """The layout that is wanted."""
    state: str
    """`under way`, `reverting`, `done`, `failed` (and reverted) or `undone`."""
    over: bool
    reason: str
    """Why it failed."""
    seconds: float
    paused_s: float
    """How long new requests have waited in it."""
    cut_requests: int
    """Requests that were still running when their time to drain was over."""
    steps: list[Step]


class Plan(_Model):
    waves: list[list[Step]]
    """Steps of a wave begin together, the next wave once they have ended."""
    pauses: bool
    expected_s: float | None
    """By experience; null without any."""
    expected_pause_s: float | None


class Begun(_Model):
    layout: str
    plan: Plan
    notes: list[str]
    change: Change | None
    """Null where it was only asked for."""


class Instance(_Model):
    id: str
    role: Role
    both: bool
    """It is P or D without a restart."""
    node: str
    devices: list[int]
    phase: str
    """`starting`, `up`, `down`, `draining` or `stopping`."""
    reason: str
    incarnation: str
    pid: int | None
    restarts: int
    up_s: float
    in_flight: int


class Node(_Model):
    id: str
    kind: str
    """Of its devices: `npu`, `cuda` or `cpu`."""
    devices: list[int]
    """That it has; on CPU, where they are virtual, empty for as many as it takes."""
    ours: list[int]
    """That are this deployment's: all of them, or those that are leased."""


class Front(_Model):
    restarting: bool
    """Front doors are being replaced, one after another."""
    trouble: str
    """Why the last time it came to nothing, or empty."""


class Part(_Model):
    pid: int | None
    """Null between two lives."""
    restarts: int | None
    """Lives before this one; null where nobody counts them."""


class Move(_Model):
    what: str
    """`flip`, `scale` or `relayout`."""
    layout: str
    relieves: str
    """The group that lacks most."""
    before: float
    """How many times what it may be used it would have to be."""
    after: float
    why: str


class RefusedMove(Move):
    reason: str


class GroupNeed(_Model):
    group: str
    there: int
    """Copies of it."""
    wanted: int
    """In the layout that was chosen."""
    needed: float
    """Copies that would never rest."""
    peak: float
    """The most that was needed in the quiet time."""


class Gain(_Model):
    group: str
    """That the move relieved; after a relayout, the busiest one."""
    predicted: float
    """Share of its time that it would be busy, at the load that came."""
    measured: float


class Decision(_Model):
    ago_s: float
    times: int
    """So many decisions, one after another, were like this one."""
    outcome: str
    """`stays`, `advised`, `begun`, `done`, or `held`, `refused`, `failed` or `undone` with the reason."""
    layout: str
    rates_rps: dict[str, float]
    """Requests a second that are reckoned with, by kind."""
    groups: list[GroupNeed]
    chosen: Move | None
    refused: list[RefusedMove]
    plan: str
    """Why the layout is of these groups, and no others."""
    gain: Gain | None
    """Half a minute after what was chosen is done."""


class Budget(_Model):
    instance: str
    neighbours: list[str]
    """That compute on its device."""
    prompt_tokens: int
    """That its last step was let have, so that no decode breaks the SLO."""
    item_tokens: int
    """Likewise, of images and other media."""
    held_steps: int
    """Steps so far whose budget left something for the next ones."""


class Following(_Model):
    mode: str
    """`off`, `advise` or `act`."""
    every_s: float | None
    use: float | None
    """Share of its time that an instance may be busy."""
    lacking: list[int]
    """Devices of each copy that is wanted, too, and has no place; on a cluster they are asked for in mode `act`."""
    budgets: list[Budget]
    """What stages with an SLO do by themselves at every step, before anything is moved."""
    decisions: list[Decision]
    """The newest first."""


class Deployment(_Model):
    launch: str
    layout: str
    """What is wanted."""
    state: str
    """`steady`, `changing`, `paused` or `degraded`."""
    trouble: str
    """Why what is wanted is not there, or what it waits for."""
    paused_s: float
    """For how long new requests still wait."""
    change: Change | None
    nodes: list[Node]
    instances: list[Instance]
    front: Front
    follow: Following
    """Of the decisions the last 20."""
    parts: dict[str, Part]
    """Processes beside the stages, by name."""
    layouts: list[str]
    """That were wanted, the present one last."""
    past: list[Change]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "No layout, or one that cannot be served here; of `follow`, a profile that cannot be read."},
    404: {"description": "There is no such instance or change."},
    409: {
        "description": "Refused: `shortage` (`what`, `where`, `needed_bytes`, `free_bytes`, `blocks`, `pause_helps`), "
        "`no_devices` (`missing`, `free`), "
        "`pause_too_short` (`needed_s`), `pause_too_long` (`most_s`), `change_under_way` or `nothing_to_undo`. Nothing "
        "was begun."
    },
}
_BEGUN: dict[int | str, dict[str, Any]] = {
    200: {"model": Begun, "description": "What would be done."},
    202: {"model": Begun, "description": "It has begun."},
    **_REFUSALS,
}


def control_routes(controller: Controller) -> APIRouter:
    """`/deployment` and what is below it."""
    router = APIRouter(tags=["deployment"])

    @router.get("/deployment", operation_id="status", response_model=Deployment)
    async def status() -> Response:
        return JSONResponse(await controller.status())

    @router.get("/deployment/decisions", operation_id="decisions", response_model=Following)
    async def decisions() -> Response:
        return JSONResponse(controller.following.told())

    @router.post("/deployment/follow", operation_id="follow", response_model=Follow, responses={400: _REFUSALS[400]})
    async def follow(body: Follow) -> Response:
        try:
            await controller.following.set(body.mode)
        except ConfigError as error:
            return _refused(error)
        return JSONResponse(dict(body))

    @router.get(
        "/deployment/changes/{number}", operation_id="change", response_model=Change, responses={404: _REFUSALS[404]}
    )
    async def change(number: int) -> Response:
        return JSONResponse(controller.change(number))

    @router.post("/deployment/layout", operation_id="relayout", responses=_BEGUN)
    async def relayout(body: Relayout) -> Response:
        return await _begun(controller.relayout(**dict(body)))

    @router.post("/deployment/scale", operation_id="scale", responses=_BEGUN)
    async def scale(body: Scale) -> Response:
        return await _begun(controller.scale(**dict(body)))

    @router.post("/deployment/undo", operation_id="undo", responses=_BEGUN)
    async def undo(body: Pause) -> Response:
        return await _begun(controller.undo(**dict(body)))

    @router.post("/deployment/restart", operation_id="restartAll", responses=_BEGUN)
    async def restart_all(body: Pause) -> Response:
        return await _begun(controller.restart(**dict(body)))

    @router.post("/deployment/front/restart", operation_id="restartFront", status_code=202, responses=_REFUSALS)
    async def restart_front(body: RestartFront) -> Response:
        try:
            await controller.restart_front(body.proxy)
        except (RefusedError, ConfigError) as error:
            return _refused(error)
        return JSONResponse({"status": "restarting"}, 202)

    @router.post("/deployment/instances/{name}/drain", operation_id="drain", responses=_BEGUN)
    async def drain(name: Name, body: DrainInstance) -> Response:
        return await _begun(controller.drain(name, **dict(body)))

    @router.post("/deployment/instances/{name}/restart", operation_id="restart", responses=_BEGUN)
    async def restart(name: Name, body: Pause) -> Response:
        return await _begun(controller.restart(name, **dict(body)))

    return router


async def _begun(asked: Awaitable[Json]) -> Response:
    try:
        answer = await asked
    except (RefusedError, ConfigError) as error:
        return _refused(error)
    return JSONResponse(answer, 200 if answer["change"] is None else 202)


def _refused(error: RefusedError | ConfigError) -> Response:
    body = error_body(error)
    if isinstance(error, RefusedError):
        return JSONResponse({"error": {**body["error"], **error.details}}, error.status)
    return JSONResponse(body, 400)
