"""The commands over HTTP, for `epd-serve status`, `relayout` and the like, and for other programs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from deploy.control.controller import Controller
from deploy.control.refusals import RefusedError
from deploy.control.status import Answer
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from proxy.errors import error_body

MAX_PAUSE_S = 3600.0
Name = Annotated[str, InPath(description="An instance's id, such as `E0`.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Pause(_Body):
    pause_s: float = Field(0.0, ge=0.0, le=MAX_PAUSE_S, description="For how long new requests may wait meanwhile.")


class Relayout(Pause):
    layout: str = Field(description="The layout that is wanted, for example `2E-P-D`.")
    dry_run: bool = Field(False, description="Only say what would be done.")


class Scale(Pause):
    counts: dict[Role, Annotated[int, Field(ge=0)]] = Field(description="Instances by role; others stay as many.")
    dry_run: bool = Field(False, description="Only say what would be done.")


class DrainInstance(_Body):
    dry_run: bool = Field(False, description="Only say what would be done.")


class RestartFront(_Body):
    proxy: list[str] = Field([], description="Options of the front doors, `KEY=VALUE`; others stay as they are.")


class Step(BaseModel):
    action: str = Field(description="`start`, `drain`, `stop`, `leave`, `flip`, `pause` or `resume`.")
    instance: str | None = None
    role: Role | None = None
    node: str | None = None
    devices: list[int] | None = None
    began_s: float | None = Field(None, description="Since the change began.")
    seconds: float | None = Field(None, description="How long it took; null while it is under way.")
    note: str | None = None


class Change(BaseModel):
    number: int
    what: str = Field(description="The command, or `replace`: of what was lost with its node.")
    from_: str = Field(alias="from", description="The layout before.")
    to: str = Field(description="The layout that is wanted.")
    state: str = Field(description="`under way`, `reverting`, `done`, `failed` (and reverted) or `undone`.")
    over: bool
    reason: str = Field(description="Why it failed.")
    seconds: float
    paused_s: float = Field(description="How long new requests have waited in it.")
    cut_requests: int = Field(description="Requests that were still running when their time to drain was over.")
    steps: list[Step]


class Plan(BaseModel):
    waves: list[list[Step]] = Field(description="Steps of a wave begin together, the next wave once they have ended.")
    pauses: bool
    expected_s: float | None = Field(description="By experience; null without any.")
    expected_pause_s: float | None


class Begun(BaseModel):
    layout: str
    plan: Plan
    notes: list[str]
    change: Change | None = Field(description="Null where it was only asked for.")


class Instance(BaseModel):
    id: str
    role: Role
    both: bool = Field(description="It is P or D without a restart.")
    node: str
    devices: list[int]
    phase: str = Field(description="`starting`, `up`, `down`, `draining` or `stopping`.")
    reason: str
    incarnation: str
    pid: int | None
    restarts: int
    up_s: float
    in_flight: int


class Node(BaseModel):
    id: str
    kind: str = Field(description="Of its devices: `npu`, `cuda` or `cpu`.")
    devices: list[int] = Field(
        description="That it has; on CPU, where they are virtual, empty for as many as it takes."
    )
    ours: list[int] = Field(description="That are this deployment's: all of them, or those that are leased.")


class Front(BaseModel):
    restarting: bool = Field(description="Front doors are being replaced, one after another.")
    trouble: str = Field(description="Why the last time it came to nothing, or empty.")


class Part(BaseModel):
    pid: int | None = Field(description="Null between two lives.")
    restarts: int | None = Field(description="Lives before this one; null where nobody counts them.")


class Deployment(BaseModel):
    launch: str
    layout: str = Field(description="What is wanted.")
    state: str = Field(description="`steady`, `changing`, `paused` or `degraded`.")
    trouble: str = Field(description="Why what is wanted is not there, or what it waits for.")
    paused_s: float = Field(description="For how long new requests still wait.")
    change: Change | None
    nodes: list[Node]
    instances: list[Instance]
    front: Front
    parts: dict[str, Part] = Field(description="Processes beside the stages, by name.")
    layouts: list[str] = Field(description="That were wanted, the present one last.")
    past: list[Change]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "No layout, or one that cannot be served here."},
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


async def _begun(asked: Awaitable[Answer]) -> Response:
    try:
        answer = await asked
    except (RefusedError, ConfigError) as error:
        return _refused(error)
    return JSONResponse(answer.to_json(), 200 if answer.change is None else 202)


def _refused(error: RefusedError | ConfigError) -> Response:
    body = error_body(error)
    if isinstance(error, RefusedError):
        return JSONResponse({"error": {**body["error"], **error.details}}, error.status)
    return JSONResponse(body, 400)
