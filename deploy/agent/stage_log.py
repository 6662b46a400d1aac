"""Reads a stage's log: which phase of its start it is in, and why it died. Pure; written against vLLM's lines."""

from __future__ import annotations

import re
import signal

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"^\((?:[\w.]+[ _])?\w+ pid=\d+\)\s?")  # (EngineCore_DP0 pid=123), (Worker_TP0 pid=4)
_LEVEL = re.compile(r"^(?:ERROR|CRITICAL|WARNING|INFO|DEBUG)\s+(?:[\d-]+ )?[\d:,.]+ (?:\[[^\]]*\]\s?)+")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Refused))(?::\s*(.*))?$")
_USAGE = re.compile(r"^[\w.\- ]+: error: (.*)$")
_NATIVE = re.compile(
    r"Fatal Python error: |Bus error|.*Segmentation fault|terminate called after |.*: not found$|.*No module named "
)

_SYMPTOMS = ("See root cause above", "EngineDeadError", "Engine core initialization failed", "EngineCore encountered")
"""What vLLM's outer processes say when an inner one died; the inner one's line is the reason."""

PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("configuring", re.compile(r"vLLM API server version|non-default args|Resolved architecture")),
    ("starting engine", re.compile(r"Initializing a V1 LLM engine|Started engine process")),
    ("loading weights", re.compile(r"Starting to load model|Loading safetensors|Loading pt checkpoint")),
    ("profiling memory", re.compile(r"Loading weights took|Model loading took")),
    ("KV cache", re.compile(r"KV cache size|Available KV cache memory|# (?:GPU|CPU|NPU) blocks")),
    ("warming up", re.compile(r"Capturing|Graph capturing|[Ww]arming up model|init engine \(profile")),
    (
        "starting API",
        re.compile(r"Starting vLLM (?:API )?server|Started server process|Waiting for application startup"),
    ),
)
FIRST_PHASE = "importing"
_TRACEBACK = ("Traceback", "During handling", "The above exception")
_MAX_REASON = 400


def phase_of(line: str) -> str | None:
    """The phase of a stage's start that a log line announces, or None."""
    return next((phase for phase, pattern in PHASES if pattern.search(line)), None)


def failure_reason(log: str, exit_code: int | None = None) -> str:
    """The most telling error of a log in one line: the last error that is not merely the echo of an inner one.

    Frames, prefixes and colours are dropped; for a validation error its detail lines are joined. Without any error
    line, or after SIGKILL (nobody can say why), the reason is how the process ended. Requests that failed while the
    server lived on say nothing about its end.
    """
    lines = _without_failed_requests([_plain(line) for line in log.splitlines()])
    errors = [(at, text) for at, line in enumerate(lines) if (text := _error_text(lines, at, line)) is not None]
    causes = [(at, text) for at, text in errors if not any(symptom in text for symptom in _SYMPTOMS)]
    if (causes or errors) and exit_code != -signal.SIGKILL:
        return _shorten((causes or errors)[-1][1])
    ending = describe_exit(exit_code)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return _shorten(f"{ending}; its log ends with: {last}" if last else ending)


def describe_exit(exit_code: int | None) -> str:
    """`killed by SIGKILL …` or `exited with code 3`."""
    if exit_code is None:
        return "did not become ready"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hints = {"SIGKILL": " (out of memory?)", "SIGBUS": " (is /dev/shm full?)"}
    return f"killed by {name}{hints.get(name, '')}"


def _plain(line: str) -> str:
    line = _PROCESS.sub("", _ANSI.sub("", line))
    return _LEVEL.sub("", line).rstrip()


def _without_failed_requests(lines: list[str]) -> list[str]:
    """The lines without the tracebacks that uvicorn writes for a request that raised."""
    kept = []
    inside = False
    for line in lines:
        if line.endswith("Exception in ASGI application"):
            inside = True
        elif inside and _ERROR.match(line):
            inside = False
        elif not (inside and (not line or line[0].isspace() or line.startswith(_TRACEBACK))):
            inside = False
            kept.append(line)
    return kept


def _error_text(lines: list[str], at: int, line: str) -> str | None:
    """The error that line `at` states, with what belongs to it, or None."""
    if line[:1].isspace():
        return None
    usage = _USAGE.match(line)
    if usage:
        return usage.group(1)
    if _NATIVE.match(line):
        return line
    found = _ERROR.match(line)
    if found is None:
        return None
    name, message = found.group(1), (found.group(2) or "").strip()
    if name in ("KeyboardInterrupt", "SystemExit"):
        return None
    if name == "ValidationError" or not message:
        details = []
        for following in lines[at + 1 : at + 4]:
            if not following.startswith(" ") or not following.strip():
                break
            details.append(following.strip().split(" [type=")[0])
        message = " ".join([message, *details]).strip()
    return f"{name}: {message}" if message else name


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
