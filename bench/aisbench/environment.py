"""The Python environment that AISBench runs in: its own, since it wants an older NumPy and Pillow than vLLM does.

Owns making, checking and using it again. What belongs in it is pinned in `requirements/aisbench.txt`; an environment
that these pins made says so in a file which is written last, so that a half-made one is seen and made again. pip is the
user's: its configuration and all `PIP_*` variables hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.record import ROOT
from epd_serve.errors import ConfigError, StageError

PINS = ROOT / "requirements" / "aisbench.txt"
PACKAGE = "ais_bench_benchmark"
PYTHONS = ("3.11", "3.12")
MARKER = ".epd-bench-aisbench"
NEEDED_BYTES = 4_000_000_000
"""Of disk, for a download of 1 GB and 2.2 GB installed."""
MAKE_S, CHECK_S = 3600.0, 300.0
TAIL_LINES = 12

_LOOKS_AT_TOKENIZER = """
import sys
from ais_bench.benchmark.utils.file.load_tokenizer import load_tokenizer
load_tokenizer(sys.argv[1])
"""
_LOOKS_AT_ITSELF = "import pyarrow, datasets, transformers, ais_bench.benchmark"


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
        return AisBench(folder, version) if marker.read_text(encoding="utf-8") == _digest(pins) else None
    if version != (wanted := _wanted(pins)):
        raise ConfigError(
            f"{folder} has AISBench {version}, its results are read as those of {wanted}: name another folder, "
            "or leave the flag out and one is made",
            param="--venv",
        )
    return AisBench(folder, version)


def environment(folder: Path, pins: Path = PINS, say: Callable[[str], None] = print) -> AisBench:
    """The environment in `folder`, made where it is not there yet or not of these pins.

    Raises:
        ConfigError: no fitting Python, no room, a folder of somebody else's, or pip cannot get what is pinned.
    """
    folder = folder.absolute()
    if (ready := found(folder, pins)) is not None:
        return ready
    if not pins.is_file():
        raise ConfigError(
            f"{pins} is not there: an installed epd-bench makes no environment for AISBench; run it from a checkout, "
            "or name an environment with --venv",
            param="--venv",
        )
    if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is no environment with AISBench, and not empty: name another", param="--venv")
    with _alone(folder, say):
        if (ready := found(folder, pins)) is not None:  # somebody else has made it meanwhile
            return ready
        _make(folder, pins, say)
    made = found(folder, pins)
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


def _make(folder: Path, pins: Path, say: Callable[[str], None]) -> None:
    """All of it; the marker says `unfinished` until the end."""
    python = _python()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text("unfinished", encoding="utf-8")
        for path in folder.iterdir():
            if path.name != MARKER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"--venv {folder} cannot be written: {error.strerror}", param="--venv") from error
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"{folder} has {free / 1e9:.1f} GB free, AISBench's environment takes {NEEDED_BYTES / 1e9:.0f} GB: free "
            "some, or name a folder on another disk",
            param="--venv",
        )
    say(f"AISBench gets an environment of its own in {folder}: once, some minutes, about 2.2 GB")
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install"]
    pip += ["--disable-pip-version-check", "--no-input"]
    steps: list[tuple[list[str | Path], str]] = [
        ([python, "-m", "venv", folder], f"{python} makes no virtual environment (Debian: python3-venv)"),
        ([*pip, "-r", pins], "pip could not install AISBench"),
        ([folder / "bin" / "python", "-c", _LOOKS_AT_ITSELF], "AISBench was installed and cannot be imported"),
    ]
    for command, wrong in steps:
        done = _ran(command, MAKE_S)
        if done.returncode:
            raise ConfigError(f"{wrong}{_hint(done.stdout)}:\n{_tail(done.stdout)}", param="--venv")
    (folder / MARKER).write_text(_digest(pins), encoding="utf-8")


def _ran(command: list[str | Path], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Both outputs as one text. Raises StageError where it takes too long."""
    try:
        return subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**outside(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        words = " ".join(str(word) for word in command)[:200]
        raise StageError(f"not done within {limit_s:g} s: {words}", stage="AISBench") from error


def _hint(output: str) -> str:
    """What pip's words come down to."""
    if "No space left on device" in output:
        return " (the disk is full)"
    if re.search(r"NewConnectionError|name resolution|Network is unreachable|ConnectTimeout|ProxyError", output):
        return " (the package index cannot be reached: check the network, or pip's PIP_INDEX_URL)"
    if "No matching distribution" in output:
        return " (the package index does not have it: no network, or an index without it)"
    return ""


def _tail(output: str) -> str:
    return "\n".join(f"  {line}" for line in output.strip().splitlines()[-TAIL_LINES:])


def _python() -> str:
    """This one where it fits, else one by name."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS:
        return sys.executable
    for version in PYTHONS:
        if (path := shutil.which(f"python{version}")) is not None:
            return path
    raise ConfigError(f"AISBench needs Python {' or '.join(PYTHONS)}, none was found: install one, or name an "
                      "environment that has AISBench", param="--venv")  # fmt: skip


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


@contextlib.contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time makes an environment. The lock is a file beside it, and goes with its holder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--venv {folder} cannot be written: {error.strerror}", param="--venv") from error
    try:
        end, told = time.monotonic() + MAKE_S, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise StageError(
                        f"{folder} is being made by somebody else for too long", stage="AISBench"
                    ) from None
                if not told:
                    say(f"{folder} is being made by another epd-bench: waiting for it")
                told = True
                time.sleep(0.2)
        yield
    finally:
        os.close(lock)
