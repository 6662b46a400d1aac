"""`epd-serve proxy`: front doors before stages that somebody else runs, in the foreground, until a signal.

The same front doors as those of a launch, children of this process, which asks each stage's /health and tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deploy.agent.waits import health_status
from deploy.alone.stages import given_stages
from deploy.front.doors import FrontDoors
from deploy.front.key_watch import KeyMetrics, KeyWatch, api_keys_of, of_this_machine, read_key_text
from deploy.front.shared import Shared
from deploy.host import event_loop
from deploy.host.children import Children, be_root
from deploy.host.ending import Ending
from deploy.host.environment import say
from deploy.host.launches import reap_dead
from deploy.host.logs import keep_bounded
from deploy.host.ports import listen, private_socket
from deploy.host.rundir import RunDir
from deploy.host.state import SharedState, StateFiles
from deploy.launch.admin import Admin, open_admin, serve_page
from deploy.options.config import ProxyConfig
from deploy.plan.proxy_settings import check_certificate, settings_with
from epd_serve.instances import Instance
from epd_serve.key_files import read_key
from proxy.config.settings import ModelIdentity
from proxy.workers.wire import Row

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 5.0
HUNG_AFTER = 4
"""Questions in a row without any answer: a stage under load may answer late, as it may to the supervisor."""
GRACE_S = 3.0
"""How long requests in flight may go on after the signal."""


def run_proxy(config: ProxyConfig) -> int:
    """Serve until a signal (`deploy/host/ending.py`).

    Raises:
        ConfigError: what is wrong with the settings. EpdError: a front door does not start.
    """
    key_text = read_key_text(config.api_key_file) if config.api_key_file else ""
    given = given_stages(config.stages, config.stage, config.served_model_name)
    key_file = config.stage_key_file
    settings = settings_with(
        config,
        served_models=(given.model,),
        identity=ModelIdentity(given.model, given.revision, given.dtype),
        api_keys=api_keys_of(key_text, config.api_key_file) if config.api_key_file else None,
        stage_key=read_key(key_file, "--stage-key-file") if key_file else "",
        key_file=key_file,
    )
    check_certificate(settings)
    be_root()
    ending = Ending(config.lame_duck_s, config.drain_s, say)
    root = Path(config.run_root) if config.run_root else None
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(config.host, config.port))
        admin = stack.enter_context(open_admin(config.admin_host, config.admin_port, config.admin_key_file))
        for launch_id in reap_dead(root):
            say(f"cleaned up after launch {launch_id}, which was killed")
        run = RunDir.create(root)
        stack.callback(run.remove)
        shared = Shared.of(listening, stack.enter_context(private_socket(run.feed)), config.workers)
        stack.callback(shared.close)
        doors = FrontDoors(
            settings,
            shared,
            Children(),
            SharedState(StateFiles.make()),
            grace_s=GRACE_S,
            drain_s=config.drain_s,
            say=say,
            launch_id=run.launch_id,
        )
        ending.serves(doors)
        endpoint = f"{'https' if config.tls_cert_file else 'http'}://{config.host}:{config.port}"
        say(f"proxy on {endpoint} in front of {len(given.instances)} stages; logs in {run.path}")
        event_loop.run(_serve(config, given.instances, doors, admin, ending, key_text, run))
    return 0


async def _serve(
    config: ProxyConfig,
    instances: Sequence[Instance],
    doors: FrontDoors,
    admin: Admin | None,
    ending: Ending,
    key_text: str,
    run: RunDir,
) -> None:
    """Until it is time to end. `key_text`: of the clients' keys, as they are now.

    Raises:
        EpdError: a front door does not start.
    """
    ending.listen()
    doors.background.start("logs", partial(keep_bounded, run.path))
    health = _Health(instances, doors)
    for one in instances:
        doors.background.start(f"health of {one.id}", partial(health.watch, one))
    if path := config.api_key_file:
        read, metrics = of_this_machine(path), KeyMetrics(doors.registry)
        watch = KeyWatch(path, key_text, read, lambda now, _: doors.go_by(now), say, metrics)
        doors.background.start("API keys", watch.run)
    tasks = [asyncio.create_task(ending.wait()), asyncio.create_task(doors.serve())]
    if admin is not None:
        tasks.append(asyncio.create_task(_answer(config, doors, admin)))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # raises what ended it
    finally:
        await doors.end()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _answer(config: ProxyConfig, doors: FrontDoors, admin: Admin) -> None:
    requests = await asyncio.to_thread(importlib.import_module, "proxy.http.admin")  # the web framework, too
    traces = await asyncio.to_thread(importlib.import_module, "deploy.front.trace_routes")
    more = [requests.request_routes(doors.look), traces.trace_routes(doors.traced)]
    await serve_page(admin, doors, config, grace_s=GRACE_S, more=more)


class _Health:
    """Tells front doors of each stage what its /health says."""

    def __init__(self, instances: Sequence[Instance], doors: FrontDoors) -> None:
        self._rows = {one.id: Row(one, False, "starting") for one in instances}
        self._doors = doors
        self._roles = frozenset(one.role for one in instances)
        doors.tell(self._rows.values(), self._roles)

    async def watch(self, one: Instance) -> None:
        unanswered = 0
        while True:
            try:
                status = await health_status(one.url, HEALTH_TIMEOUT_S)
            except TimeoutError:
                unanswered += 1
                if unanswered >= HUNG_AFTER:
                    self._say(one, f"hung: no answer on /health, {unanswered} times in a row")
            else:
                unanswered = 0
                self._say(one, "" if status == 200 else f"/health answers {status or 'nothing'}")
            await asyncio.sleep(HEALTH_EVERY_S)

    def _say(self, one: Instance, trouble: str) -> None:
        self._rows[one.id] = Row(one, not trouble, trouble)
        self._doors.tell(self._rows.values(), self._roles)
