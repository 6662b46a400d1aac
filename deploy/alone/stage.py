"""`epd-serve stage`: one stage in the foreground, alone or with peers that a wiring file names. For debugging."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.host.environment import not_the_operators, run_root
from deploy.host.rundir import private_folder
from deploy.memory.check import OneStage
from deploy.options.config import DeployConfig
from deploy.options.engines import command_of
from deploy.plan.blueprint import draw
from epd_serve.engine.stage_guard import KEY_ENV
from epd_serve.errors import ConfigError
from epd_serve.key_files import read_key
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring
from proxy.config.tree import changed


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
    stage_key_file: str = "",
    uds: str = "",
) -> int:
    """Become one stage's server (exec), or print its command, which tells no key.

    Args:
        uds: path of a Unix socket that its server listens on; "" for TCP.
        stage_key_file: the key that its server wants on TCP, on every path but /health; "" for one that is made.

    Raises:
        ConfigError: a role that needs peers without a wiring file, unknown model, too few devices.
    """
    key = read_key(stage_key_file, "--stage-key-file") if stage_key_file else ""
    connected = _wiring(wiring, role, instance, alone=engine == "sim")
    connected = replace(connected, key_file=connected.key_file or stage_key_file)
    ids = device_list(device_ids)
    tp = max(1, len(ids))
    # One monolith of the same width: the same checks of model and devices as for a whole deployment.
    blueprint = draw(
        changed(
            DeployConfig(),
            {
                "model": model,
                "layout": f"TP{tp}",
                "device": device,
                "served_model_name": served_model_name,
                "engine": engine,
                "sim_profile": sim_profile,
                "feature_slab": "on" if connected.slab else "off",
                "feature_slab_mib": -(-connected.slab_bytes >> 20),
            },
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
            uds=str(Path(uds).absolute()) if uds else "",
            engine=engine,
            sim_profile=blueprint.sim_profile,
        )
    )
    if print:
        _show(command.argv, command.env)
        return 0
    environment = {**os.environ, **not_the_operators(command.env)}
    if not uds:
        environment[KEY_ENV] = key or _made_key(port)
    if "PYTHONPATH" in os.environ and "PYTHONPATH" in command.env:
        environment["PYTHONPATH"] = f"{command.env['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"
    os.execvpe(command.argv[0], command.argv, environment)


def _made_key(port: int) -> str:
    """A new one, in a file of this user's that others may be given; says where."""
    root, key = run_root(), secrets.token_hex(32)
    private_folder(root)
    path = root / f"stage-{port}.key"
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)
    os.write(2, f"its server wants the key in {path} (epd-serve proxy --stage-key-file)\n".encode())
    return key


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
    if str(raw["role"]) not in set(Role):
        raise ConfigError(f"wiring file {path}: {raw['role']!r} is no role", param="--wiring")
    try:
        wiring = StageWiring.from_json(raw)
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise ConfigError(f"wiring file {path}: {error}", param="--wiring") from error
    if role not in (None, wiring.role):
        raise ConfigError(f"--role {role} contradicts role {wiring.role} of {path}; drop --role", param="--role")
    return wiring


def device_list(text: str) -> tuple[int, ...]:
    """`0,1` as ids. Raises ConfigError."""
    try:
        ids = tuple(int(entry) for entry in text.split(",") if entry.strip())
    except ValueError:
        ids = (-1,)
    if any(one < 0 for one in ids) or len(set(ids)) < len(ids):
        raise ConfigError(f"--device-ids {text!r} is not a list such as 0,1", param="--device-ids")
    return ids
