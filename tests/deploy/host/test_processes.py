"""What is found out about a process."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from deploy.host.processes import environment_of
from tests.waiting import wait_for


def test_the_environment_of_another_process_is_read_without_what_is_nobodys_business() -> None:
    env = {"PATH": os.environ["PATH"], "EMPTY": "", "TWICE": "a=b", "RAY_x": "1", "RAY_y": "2"}
    process = subprocess.Popen(["/bin/sleep", "60"], env=env)
    try:
        assert wait_for(lambda: environment_of(process.pid), "the program has begun") == env
        assert environment_of(process.pid, without=("RAY_",)) == {k: v for k, v in env.items() if k[:4] != "RAY_"}
    finally:
        process.kill()
        process.wait()
    with pytest.raises(psutil.Error):
        environment_of(process.pid)
