"""One started process: what its log says of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deploy.agent.stage_life import Spawn, StageLife, executed
from tests.deploy.rooted_here import root_here
from tests.waiting import until


async def test_what_a_process_writes_before_anybody_looks_is_its_own(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_text("of the life before\n")
    code = "print('ValueError: no such dtype'); raise SystemExit(1)"
    lives: list[StageLife] = []
    with root_here() as root, log.open("ab") as file:
        start, size = executed(root.children), log.stat().st_size
        command = Spawn((sys.executable, "-c", code), dict(os.environ))
        process = await start(command, file, lambda child: lives.append(StageLife(child, log, size)))
        await until(lambda: process.poll() is not None)
        (life,) = lives
        assert life.new_log_lines() == ["ValueError: no such dtype"]
        assert life.failure_reason() == "ValueError: no such dtype"
