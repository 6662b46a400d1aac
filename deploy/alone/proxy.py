"""`epd-serve proxy`: front doors before stages that somebody else runs, in the foreground, until a signal.

The same front doors as those of a launch, children of this process, which asks each stage's /health and tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deploy.agent.health import health_status
from deploy.alone.stages import GivenStages, given_stages
from deploy.front.doors import FrontDoors
from deploy.front.key_watch import KeyMetrics, KeyWatch, api_keys_of, of_this_machine, read_key_text
from deploy.front.shared import Shared
from deploy.host import event_loop
from deploy.host.ending import Ending
from deploy.host.ports import listen, private_socket
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.keeper.in_process import InProcess
from deploy.launch.admin import LOOPBACK, Admin, admin_page, open_admin, serve_admin
from deploy.options.config import check_admin_port, check_drain, check_workers
from deploy.options.proxy_overrides import apply_overrides, proxy_overrides
from deploy.plan.proxy_settings import check_certificate, tls_settings
from epd_serve.instances import Instance
from epd_serve.key_files import read_key

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 5.0
HUNG_AFTER = 4
"""Questions in a row without any answer: a stage under load may answer late, as it may to the supervisor."""
GRACE_S = 3.0
"""How long requests in flight may go on after the signal."""


def run_proxy(
    *,
    host: str,
    port: int,
    proxy: Sequence[str],
    lame_duck_s: float,
    drain_s: float,
    stages: str | None = None,
    stage: Sequence[str] = (),
    served_model_name: str = "",
    stage_key_file: str = "",
    api_key_file: str = "",
    tls_cert_file: str = "",
    tls_key_file: str = "",
    workers: int = 1,
    admin_port: int = 0,
    admin_host: str = LOOPBACK,
    admin_key_file: str = "",
    run_root: str = "",
) -> int:
    """Serve until a signal (`deploy/host/ending.py`).

    Args:
        stages, stage, served_model_name: as of `given_stages`.
        stage_key_file: the key that they want, if any, and that opens their sockets on TCP.
        proxy: settings, as KEY=VALUE. workers: front doors on the one port.

    Raises:
        ConfigError: what is wrong with the flags. EpdError: a front door does not start.
    """
    from proxy.config.settings import ModelIdentity, ProxySettings

    check_drain(lame_duck_s, "lame_duck_s")
    check_drain(drain_s)
    check_workers(workers)
    check_admin_port(admin_port, port)
    key_text = read_key_text(api_key_file) if api_key_file else ""
    given = given_stages(stages, stage, served_model_name)
    settings = ProxySettings(
        served_models=(given.model,),
        identity=ModelIdentity(given.model, given.revision, given.dtype),
        api_keys=api_keys_of(key_text, api_key_file) if api_key_file else None,
        **tls_settings(tls_cert_file, tls_key_file),
        stage_key=read_key(stage_key_file, "--stage-key-file") if stage_key_file else "",
        key_file=stage_key_file,
        observed=not admin_port,
    )
    settings = apply_overrides(settings, proxy_overrides(proxy))
    check_certificate(settings)
    ending = Ending(lame_duck_s, drain_s, _say)
    root = Path(run_root) if run_root else None
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        admin = stack.enter_context(open_admin(admin_host, admin_port, admin_key_file))
        for launch_id in reap_dead(root):
            _say(f"cleaned up after launch {launch_id}, which was killed")
        run = RunDir.create(root)
        stack.callback(run.remove)
        shared = Shared.of(listening, stack.enter_context(private_socket(run.feed)), workers)
        stack.callback(shared.close)
        doors = FrontDoors(
            settings, shared, InProcess(), grace_s=GRACE_S, drain_s=drain_s, say=_say, launch_id=run.launch_id
        )
        ending.serves(doors)
        tls, keys = bool(tls_cert_file), _Keys(api_key_file, key_text)
        _say(f"proxy on {'https' if tls else 'http'}://{host}:{port} in front of {len(given.instances)} stages")
        event_loop.run(_serve(given, doors, admin, port, ending, keys, tls=tls))
    return 0


class _Keys(NamedTuple):
    """Of clients. `path`: of their file, or "". `text`: what it said at first."""

    path: str
    text: str


async def _serve(
    given: GivenStages,
    doors: FrontDoors,
    admin: Admin | None,
    port: int,
    ending: Ending,
    keys: _Keys,
    *,
    tls: bool,
) -> None:
    """Until it is time to end. Raises EpdError when a front door does not start."""
    ending.listen()
    doors.publish((), ())  # who is there is told to the table
    for one in given.instances:
        doors.table.apply(one, up=False)
        doors.background.start(f"health of {one.id}", partial(_watch, one, doors.table))
    if keys.path:
        read, metrics = of_this_machine(keys.path), KeyMetrics(doors.registry)
        watch = KeyWatch(keys.path, keys.text, read, lambda now, _: doors.go_by(now), _say, metrics)
        doors.background.start("API keys", watch.run)
    tasks = [asyncio.create_task(ending.wait()), asyncio.create_task(doors.serve())]
    if admin is not None:
        tasks.append(asyncio.create_task(_answer(doors, admin, port, tls=tls)))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # raises what ended it
    finally:
        await doors.end()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _answer(doors: FrontDoors, admin: Admin, port: int, *, tls: bool) -> None:
    requests = await asyncio.to_thread(importlib.import_module, "proxy.http.requests")  # the web framework, too
    traces = await asyncio.to_thread(importlib.import_module, "deploy.front.trace_routes")
    more = [requests.request_routes(doors.look), traces.trace_routes(doors.traced)]
    page = admin_page(admin, doors, port, tls=tls)
    await serve_admin(admin, doors.table, doors.metrics, grace_s=GRACE_S, page=page, more=more)


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())


async def _watch(one: Instance, table: Any) -> None:
    """Keep the table's view of one stage as its /health says."""
    unanswered = 0
    while True:
        try:
            status = await health_status(one.url, HEALTH_TIMEOUT_S)
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
