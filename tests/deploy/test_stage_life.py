"""One started process: what its log says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import stage_life
from deploy.stage_life import Spawn, StageLife


def test_what_a_process_writes_before_anybody_looks_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, popen = tmp_path / "P0.log", stage_life._popen
    log.write_text("of the life before\n")

    def ended_at_once(*arguments: Any) -> subprocess.Popen[bytes]:
        process = popen(*arguments)
        process.wait()
        return process

    monkeypatch.setattr(stage_life, "_popen", ended_at_once)
    code = "print('ValueError: no such dtype'); raise SystemExit(1)"
    life = StageLife.spawn(Spawn((sys.executable, "-c", code), dict(os.environ)), log)
    assert life.new_log_lines() == ["ValueError: no such dtype"]
    assert life.failure_reason() == "ValueError: no such dtype"
