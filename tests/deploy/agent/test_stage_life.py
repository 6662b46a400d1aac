"""One started process: what its log says of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from deploy.agent.stage_life import Process, Spawn, StageLife, executed
from deploy.keeper.in_process import InProcess
from tests.waiting import until


async def test_what_a_process_writes_before_anybody_looks_is_its_own(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_text("of the life before\n")

    async def ended_at_once(command: Spawn, log: BinaryIO) -> Process:
        process = await executed(InProcess())(command, log)
        await until(lambda: process.poll() is not None)
        return process

    code = "print('ValueError: no such dtype'); raise SystemExit(1)"
    life = await StageLife.begin(Spawn((sys.executable, "-c", code), dict(os.environ)), log, ended_at_once)
    assert life.new_log_lines() == ["ValueError: no such dtype"]
    assert life.failure_reason() == "ValueError: no such dtype"
