"""Asks a vendor's command-line tool (npu-smi, nvidia-smi) one question. Never hangs, never raises; no framework."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

TOOL_TIMEOUT_S = 15.0
"""nvidia-smi takes seconds without persistence mode; a hung driver must not hang the launcher."""


def ask(tool: str, *arguments: str) -> tuple[str | None, str]:
    """A tool's output, or None and why there is none.

    The second value is for an error message. With an output it says that the tool lists no device: for callers who
    then find none in it.
    """
    path = shutil.which(tool)
    if path is None:
        return None, f"{tool} is not on PATH"
    try:
        process = subprocess.Popen(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return None, f"{tool} could not be run: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Killed but not waited for: a process that hangs inside a driver does not die before the driver answers.
        os.killpg(process.pid, signal.SIGKILL)
        return None, f"{tool} did not answer within {TOOL_TIMEOUT_S:g} s"
    if process.returncode != 0:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        return None, f"{tool} failed: {last[0] if last else f'exit code {process.returncode}'}"
    return output, f"{tool} lists no device"
