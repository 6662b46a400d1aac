"""The parts alone: one stage in the foreground, or the proxy in front of stages that somebody else started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.agent.health import health_status
from deploy.cluster.front import Front
from deploy.host import event_loop
from deploy.host.ending import Ending
from deploy.host.environment import not_the_operators
from deploy.launch.admin import LOOPBACK, open_admin
from deploy.options.suggestions import unknown
from epd_serve.errors import ConfigError
from epd_serve.instances import Instance
from epd_serve.key_files import client_keys
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 5.0
HUNG_AFTER = 4
"""Questions in a row without any answer: a stage under load may answer late, as it may to the supervisor."""
GRACE_S = 3.0
"""How long requests in flight may go on after the signal."""


def run_stage(
    *,
    model: str,
    wiring: str | None,
    role: str | None,
    instance: str,
    host: str,
    port: int,
    device: str,
    device_ids: str,
    served_model_name: str,
    print: bool,
    passed: Sequence[str],
    engine: str = "vllm",
    sim_profile: str = "",
) -> int:
    """Become one stage's server (exec), or print its command.

    Raises:
        ConfigError: a role that needs peers without a wiring file, unknown model, too few devices.
    """
    from deploy.memory.check import OneStage
    from deploy.options.config import DeployConfig
    from deploy.options.engines import command_of
    from deploy.plan.blueprint import draw
    from epd_serve.stage_plan import StagePlan

    connected = _wiring(wiring, role, instance, alone=engine == "sim")
    ids = device_list(device_ids)
    tp = max(1, len(ids))
    # One monolith of the same width: the same checks of model and devices as for a whole deployment.
    blueprint = draw(
        DeployConfig(
            model=model,
            layout=f"TP{tp}",
            device=device,
            served_model_name=served_model_name,
            engine=engine,
            sim_profile=sim_profile,
        ),
        stage=OneStage(connected.role, ids, tuple(passed)),
    )
    (plan,) = blueprint.plans
    command = command_of(
        StagePlan(
            instance=connected.instance,
            role=connected.role,
            device=blueprint.device,
            device_ids=ids or plan.devices,
            cores=blueprint.cores_of(plan),
            tp=tp,
            model=blueprint.model,
            served_model_name=blueprint.served_model_name,
            port=port,
            host=host,
            wiring=connected,
            extra_args=tuple(passed),
            memory_share=plan.memory_share,
            engine=engine,
            sim_profile=blueprint.sim_profile,
        )
    )
    if print:
        _show(command.argv, command.env)
        return 0
    environment = {**os.environ, **not_the_operators(command.env)}
    if "PYTHONPATH" in os.environ and "PYTHONPATH" in command.env:
        environment["PYTHONPATH"] = f"{command.env['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"
    os.execvpe(command.argv[0], command.argv, environment)


def _show(argv: Sequence[str], env: dict[str, str]) -> None:
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    os.write(1, f"{settings} {shlex.join(argv)}\n".encode())


def _wiring(path: str | None, role: str | None, instance: str, *, alone: bool) -> StageWiring:
    """`alone`: a stage of any role does without peers."""
    if path is None:
        if role is None:
            raise ConfigError("give --role EPD or PD, or --wiring FILE.json for a stage with peers", param="--role")
        chosen = Role(role)
        if chosen not in (Role.EPD, Role.PD) and not alone:
            raise ConfigError(f"role {role} works with other stages: give their addresses by --wiring FILE.json")
        return StageWiring(instance=instance or f"{role}0", role=chosen, incarnation=uuid.uuid4().hex[:12])
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"wiring file {path} cannot be read: {error}", param="--wiring") from error
    if not isinstance(raw, dict) or not {"instance", "role", "incarnation"} <= set(raw):
        raise ConfigError(f"wiring file {path} needs instance, role and incarnation", param="--wiring")
    if str(raw["role"]) not in {known.value for known in Role}:
        raise ConfigError(f"wiring file {path}: {raw['role']!r} is no role", param="--wiring")
    if role is not None and raw["role"] != role:
        raise ConfigError(f"--role {role} contradicts role {raw['role']} of {path}; drop --role", param="--role")
    try:
        return StageWiring.from_json(raw)
    except TypeError as error:
        raise ConfigError(f"wiring file {path}: {error}", param="--wiring") from error


def device_list(text: str) -> tuple[int, ...]:
    """`0,1` as ids. Raises ConfigError."""
    try:
        ids = tuple(int(entry) for entry in text.split(",") if entry.strip())
    except ValueError:
        ids = (-1,)
    if any(one < 0 for one in ids) or len(set(ids)) < len(ids):
        raise ConfigError(f"--device-ids {text!r} is not a list such as 0,1", param="--device-ids")
    return ids


@dataclass(frozen=True)
class StagesFile:
    """What `epd-serve proxy --stages` reads: `model`, optional `revision` and `dtype`, and `stages`.

    Each stage is a mapping of `Instance`: id, role, url; incarnation and addresses as in the stage's wiring. Without
    `kv_news` the proxy knows nothing of KV links and waits for none, without `load_news` it goes by what it has in
    flight.
    """

    model: str
    instances: tuple[Instance, ...]
    revision: str = ""
    dtype: str = ""


def read_stages_file(path: str) -> StagesFile:
    """Parse and check a stages file.

    Raises:
        ConfigError: names the entry and the fix.
    """
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"stages file {path}: {' '.join(str(error).split())}", param="--stages") from error
    valid = {"model", "stages", "revision", "dtype"}
    if not isinstance(raw, dict) or not isinstance(raw.get("stages"), list) or "model" not in raw:
        raise ConfigError(f"stages file {path} needs `model: NAME` and a list `stages:`", param="--stages")
    for key in raw:
        if key not in valid:
            raise ConfigError(f"stages file {path}: {unknown('key', str(key), valid)}", param="--stages")
    instances = tuple(_instance(path, entry) for entry in raw["stages"])
    if len({one.id for one in instances}) != len(instances) or not instances:
        raise ConfigError(f"stages file {path}: stages need distinct ids, and at least one", param="--stages")
    return StagesFile(str(raw["model"]), instances, str(raw.get("revision", "")), str(raw.get("dtype", "")))


_SAID_BY_OTHERS = {"core_share", "cores", "cpu_cores"}
"""What a launcher or a joining stage says of an instance, and nobody writes by hand."""


def _instance(path: str, entry: Any) -> Instance:
    valid = {field.name for field in fields(Instance)} - _SAID_BY_OTHERS
    if not isinstance(entry, dict) or not {"id", "role", "url"} <= set(entry):
        raise ConfigError(f"stages file {path}: a stage needs id, role and url: {entry!r}", param="--stages")
    for key in entry:
        if key not in valid:
            raise ConfigError(f"stages file {path}: {unknown('key', str(key), valid)}", param="--stages")
    roles = {role.value for role in Role}
    if str(entry["role"]) not in roles:
        raise ConfigError(f"stages file {path}: {unknown('role', str(entry['role']), roles)}", param="--stages")
    if not is_http_address(str(entry["url"])):
        raise ConfigError(f"stages file {path}: url {entry['url']!r} is not http://HOST:PORT", param="--stages")
    for name in ("kv_news", "kv_workers"):
        addresses = entry.get(name, [])
        if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
            raise ConfigError(f"stages file {path}: {name} {addresses!r} is not a list of addresses", param="--stages")
    for name in ("kv_endpoint", "events", "load_news", "node"):
        if not isinstance(entry.get(name, ""), str):
            raise ConfigError(f"stages file {path}: {name} {entry[name]!r} is not an address", param="--stages")
    devices = entry.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(one, int) for one in devices):
        raise ConfigError(f"stages file {path}: devices {devices!r} is not a list of numbers", param="--stages")
    return Instance(
        id=str(entry["id"]),
        role=Role(str(entry["role"])),
        url=str(entry["url"]).rstrip("/"),
        incarnation=str(entry.get("incarnation", "static")),
        kv_endpoint=entry.get("kv_endpoint"),
        events=entry.get("events"),
        devices=tuple(devices),
        kv_news=tuple(entry.get("kv_news", ())),
        kv_workers=tuple(entry.get("kv_workers", ())),
        load_news=entry.get("load_news"),
        node=str(entry.get("node") or urlsplit(str(entry["url"])).hostname),
    )


def is_http_address(url: str) -> bool:
    """Whether it is http://HOST:PORT and nothing more; without a port it is 80."""
    try:
        address = urlsplit(url)
        port = address.port  # raises when it is none
    except ValueError:
        return False
    plain = address.path in ("", "/") and not (address.query or address.fragment or "@" in address.netloc)
    return address.scheme == "http" and bool(address.hostname) and port != 0 and plain


def run_proxy(
    *,
    stages: str,
    host: str,
    port: int,
    proxy: Sequence[str],
    lame_duck_s: float,
    drain_s: float,
    api_keys: Sequence[str] = (),
    api_key_file: str = "",
    workers: int = 1,
    admin_port: int = 0,
    admin_host: str = LOOPBACK,
    admin_key_file: str = "",
) -> int:
    """Serve the proxy alone until a signal (`deploy/host/ending.py`); each stage's /health is asked every second."""
    from deploy.options.config import check_admin_port, check_drain, check_workers
    from deploy.options.proxy_overrides import apply_overrides, proxy_overrides
    from proxy.config.settings import ModelIdentity, ProxySettings
    from proxy.server.uvicorn_server import bind

    check_drain(lame_duck_s, "lame_duck_s")
    check_drain(drain_s)
    check_workers(workers)
    check_admin_port(admin_port, port)
    file = read_stages_file(stages)
    settings = ProxySettings(
        served_models=(file.model,),
        identity=ModelIdentity(file.model, file.revision, file.dtype),
        api_keys=client_keys(api_keys, api_key_file),
    )
    settings = apply_overrides(settings, proxy_overrides(proxy))
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(bind(host, port))
        admin = stack.enter_context(open_admin(admin_host, admin_port, admin_key_file))
        ending = Ending(lame_duck_s, drain_s, _say)
        front = Front(
            settings,
            listening,
            host=host,
            port=port,
            workers=workers,
            grace_s=GRACE_S,
            drain_s=drain_s,
            serves=ending.serves,
            say=_say,
            admin=admin,
        )
        event_loop.run(_serve_proxy(file, front, ending, f"http://{host}:{port}"))
    return 0


async def _serve_proxy(file: StagesFile, front: Front, ending: Ending, address: str) -> None:
    from proxy.errors import most_telling

    table = front.table
    ending.listen()
    for one in file.instances:
        table.apply(one, up=False)
    try:
        async with asyncio.TaskGroup() as group:
            for one in file.instances:
                front.background.start(f"health of {one.id}", partial(_watch, one, table))
            serving = group.create_task(front.serve())
            _say(f"proxy on {address} in front of {len(file.instances)} stages")
            await ending.wait()
            serving.cancel()
    except BaseExceptionGroup as failed:
        raise most_telling(failed) from None


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())


async def _watch(one: Instance, table: Any) -> None:
    """Keep the table's view of one stage as its /health says."""
    address = urlsplit(one.url)
    assert address.hostname is not None
    unanswered = 0
    while True:
        try:
            status = await health_status(address.hostname, address.port or 80, HEALTH_TIMEOUT_S)
        except TimeoutError:
            unanswered += 1
            if unanswered >= HUNG_AFTER:
                table.mark_down(one.id, f"hung: no answer on /health, {unanswered} times in a row")
        else:
            unanswered = 0
            if status == 200:
                table.mark_up(one.id)
            else:
                table.mark_down(one.id, f"/health answers {status or 'nothing'}")
        await asyncio.sleep(HEALTH_EVERY_S)
