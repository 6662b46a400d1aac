"""The Python environment of AISBench, its own, since it wants an older NumPy and Pillow than vLLM does; and its runs.

Owns checking and using the environment. `deploy/install/environment.sh` makes it from the pins in
`requirements/aisbench.txt`, and says so in a file that is written last, so that a half-made one is seen and made again.
pip is the user's: its configuration and all `PIP_*` variables hold. AISBench runs to its end, or is ended when it takes
too long; it leaves no process and no shared memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import ROOT
from deploy.host.processes import signal_group
from deploy.host.started import started
from epd_serve.errors import ConfigError, StageError

PINS, SCRIPT = ROOT / "requirements" / "aisbench.txt", ROOT / "deploy" / "install" / "environment.sh"
PACKAGE = "ais_bench_benchmark"
PYTHONS = ((3, 11), (3, 12))
MARKER = ".epd-bench-aisbench"
MAKE_S, CHECK_S = 3600.0, 300.0
TAIL_LINES = 12

_LOOKS_AT_TOKENIZER = """
import sys
from ais_bench.benchmark.utils.file.load_tokenizer import load_tokenizer
load_tokenizer(sys.argv[1])
"""


@dataclass(frozen=True)
class AisBench:
    """An environment that is ready. `version`: of AISBench."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "ais_bench"


def default_folder() -> Path:
    """`epd-serve/aisbench` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd-serve" / "aisbench"


def outside() -> dict[str, str]:
    """The variables of this process, but for those that lead another Python to this one's packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}


def found(folder: Path, pins: Path = PINS) -> AisBench | None:
    """The environment in `folder` where it is ready to be used: made from `pins`, or the user's own of that version.

    Raises:
        ConfigError: an environment of the user's has another AISBench.
    """
    version = _installed(folder)
    if version is None or not (folder / "bin" / "ais_bench").is_file():
        return None
    marker = folder / MARKER
    if marker.exists():
        return AisBench(folder, version) if marker.read_text(encoding="utf-8").strip() == _digest(pins) else None
    if version != (wanted := _wanted(pins)):
        raise ConfigError(
            f"{folder} has AISBench {version}, its results are read as those of {wanted}: name another folder, "
            "or leave the flag out and one is made",
            param="--venv",
        )
    return AisBench(folder, version)


def environment(folder: Path, say: Callable[[str], None] = print) -> AisBench:
    """The environment in `folder`, made where it is not there yet or not of these pins.

    Raises:
        ConfigError: no fitting Python, no room, a folder of somebody else's, or pip cannot get what is pinned.
    """
    folder = folder.absolute()
    if (ready := found(folder)) is not None:
        return ready
    if not SCRIPT.is_file():
        raise ConfigError(
            f"{SCRIPT} is not there: an installed epd-bench makes no environment for AISBench; run it from a checkout, "
            "or name an environment with --venv",
            param="--venv",
        )
    say(f"AISBench gets an environment of its own in {folder}: once, some minutes, about 2.2 GB")
    python = {"PYTHON": sys.executable} if sys.version_info[:2] in PYTHONS else {}
    done = _ran([SCRIPT, "aisbench"], MAKE_S, VENV=str(folder), **python)
    if done.returncode:
        raise ConfigError(f"{folder} was not made:\n{_tail(done.stdout)}", param="--venv")
    made = found(folder)
    assert made is not None, f"{folder} was made and is not ready"
    return made


def check_tokenizer(bench: AisBench, tokenizer: Path) -> None:
    """AISBench loads the tokenizer after the whole load was sent, and fails then: better before.

    Raises:
        ConfigError: it is no folder with a tokenizer.
    """
    if not tokenizer.is_dir():
        raise ConfigError(f"--tokenizer {tokenizer} is no folder", param="--tokenizer")
    done = _ran([bench.python, "-c", _LOOKS_AT_TOKENIZER, tokenizer], CHECK_S)
    if done.returncode:
        raise ConfigError(
            f"--tokenizer {tokenizer}: AISBench cannot load a tokenizer from there:\n{_tail(done.stdout)}",
            param="--tokenizer",
        )


def _ran(command: list[str | Path], limit_s: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Both outputs as one text. Raises StageError where it takes too long."""
    try:
        return subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**outside(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **more},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        words = " ".join(str(word) for word in command)[:200]
        raise StageError(f"not done within {limit_s:g} s: {words}", stage="AISBench") from error


def _tail(output: str) -> str:
    return "\n".join(f"  {line}" for line in output.strip().splitlines()[-TAIL_LINES:])


def _installed(folder: Path) -> str | None:
    """The version of AISBench in an environment, as its metadata are named."""
    names = [path.name for path in folder.glob(f"lib/python3*/site-packages/{PACKAGE}-*.dist-info")]
    return names[0].removeprefix(f"{PACKAGE}-").removesuffix(".dist-info") if names else None


def _wanted(pins: Path) -> str:
    match = (
        re.search(rf"^{PACKAGE}==(\S+)$", pins.read_text(encoding="utf-8"), re.MULTILINE) if pins.is_file() else None
    )
    if match is None:
        raise ConfigError(f"{pins} does not name {PACKAGE}: run epd-bench from a checkout", param="--venv")
    return match[1]


def _digest(pins: Path) -> str:
    """Of what an environment is made from; empty where there are no pins, and then any that was finished will do."""
    return hashlib.sha256(pins.read_bytes()).hexdigest() if pins.is_file() else ""


GRACE_S = 45.0
"""For AISBench to end in good order: its processes wait for each other."""


def variables(host: str) -> dict[str, str]:
    """For AISBench: nothing from a model hub, no proxy between it and the endpoint, no display that it draws itself."""
    without = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    return {**outside(), **fixed, "no_proxy": without, "NO_PROXY": without}


def run_command(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    *,
    host: str = "127.0.0.1",
    log: str = "ais_bench.log",
    more: Mapping[str, str] | None = None,
) -> int | None:
    """Run `command` in `folder`, for at most `limit_s`; what it prints is in the file `log` there.

    Args:
        host: of the endpoint. more: variables beside the usual.

    Returns:
        Its exit code, which is 0 for failed requests too; None where it took too long. It then got Ctrl-C, as all its
        processes do on a terminal, and time to write what it had.
    """
    argv = ["env", "-C", str(folder), *command]
    with started(argv, folder / log, env={**variables(host), **(more or {})}, stop_s=GRACE_S) as it:
        try:
            return it.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            signal_group(it.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                it.process.wait(GRACE_S)
            return None
