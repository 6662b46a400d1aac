"""The Python environment of AISBench, its own, since it wants an older NumPy and Pillow than vLLM does; and its runs.

Owns checking and using the environment, which `deploy/install/environment.sh aisbench` makes from the pins in
`requirements/aisbench.txt`. AISBench runs to its end, or is ended when it takes too long; it leaves no process and no
shared memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import ROOT
from deploy.host.processes import signal_group
from deploy.host.started import started
from epd_serve.errors import ConfigError, StageError

PINS = ROOT / "requirements" / "aisbench.txt"
PACKAGE = "ais_bench_benchmark"
MARKER = ".epd-bench-aisbench"
CHECK_S = 300.0
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


def found(folder: Path) -> AisBench | None:
    """The environment in `folder` where it is whole, and of the AISBench whose results are read."""
    names = [path.name for path in folder.glob(f"lib/python3*/site-packages/{PACKAGE}-*.dist-info")]
    pinned = re.search(rf"^{PACKAGE}==(\S+)$", PINS.read_text(encoding="utf-8") if PINS.is_file() else "", re.MULTILINE)
    marker = folder / MARKER
    half_made = marker.exists() and marker.read_text(encoding="utf-8").strip() == "unfinished"
    if not names or half_made or not (folder / "bin" / "ais_bench").is_file():
        return None
    version = names[0].removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")
    return AisBench(folder, version) if pinned is None or version == pinned[1] else None


def environment(folder: Path) -> AisBench:
    """The same. Raises ConfigError where there is none, with how it is made."""
    folder = folder.absolute()
    if (ready := found(folder)) is None:
        raise ConfigError(
            f"{folder} has no AISBench of the version whose results are read: make it once, 2.2 GB, by "
            f"`VENV={folder} deploy/install/environment.sh aisbench` in a checkout, or name another with --venv",
            param="--venv",
        )
    return ready


def check_tokenizer(bench: AisBench, tokenizer: Path) -> None:
    """AISBench loads the tokenizer after the whole load was sent, and fails then: better before.

    Raises:
        ConfigError: it is no folder with a tokenizer. StageError: that takes longer than `CHECK_S`.
    """
    if not tokenizer.is_dir():
        raise ConfigError(f"--tokenizer {tokenizer} is no folder", param="--tokenizer")
    command, env = [str(bench.python), "-c", _LOOKS_AT_TOKENIZER, str(tokenizer)], variables("127.0.0.1")
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"no tokenizer from {tokenizer} within {CHECK_S:g} s", stage="AISBench") from error
    if done.returncode:
        said = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).strip().splitlines()[-TAIL_LINES:])
        raise ConfigError(f"--tokenizer {tokenizer}: AISBench cannot load it:\n{said}", param="--tokenizer")


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
