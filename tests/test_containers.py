"""The files that images are made from. No image can be made here: what can go wrong without one is looked at."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.cli.command import serve_config

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "containers").glob("*.Containerfile"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.partition(".")[0])


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and the rest of every instruction, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines()]


def only(path: Path, keyword: str) -> str:
    (found,) = [rest for name, rest in instructions(path) if name == keyword]
    return found


def test_there_is_one_for_each_kind_of_device() -> None:
    assert [path.name.partition(".")[0] for path in FILES] == ["ascend", "cpu", "cuda"]


@every_file
def test_the_base_is_an_argument_and_pinned(path: Path) -> None:
    arguments = dict(rest.split("=", 1) for name, rest in instructions(path) if name == "ARG" and "=" in rest)
    assert only(path, "FROM") == "${BASE_IMAGE}"
    tag = arguments["BASE_IMAGE"].rpartition(":")[2]
    assert re.search(r"\d+\.\d+\.\d+", tag), f"{tag} names no release"


@every_file
def test_what_is_copied_is_here_and_is_sent(path: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for name, rest in instructions(path) if name == "COPY" for word in rest.split()[:-1]}
    assert {"bench", "deploy", "epd_serve", "npu_ops", "proxy", "store", "pyproject.toml"} <= copied <= sent
    assert [name for name in copied if not (ROOT / name).exists()] == []


@every_file
def test_it_does_not_run_as_root(path: Path) -> None:
    (user,) = re.findall(r"useradd .*--uid (\d+)", only_run_with(path, "useradd"))
    assert only(path, "USER") == user != "0"
    names = [name for name, _ in instructions(path)]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")


def only_run_with(path: Path, command: str) -> str:
    (found,) = [rest for name, rest in instructions(path) if name == "RUN" and command in rest]
    return found


@every_file
def test_it_serves_by_default_where_clients_outside_reach_it(path: Path) -> None:
    entry, command = json.loads(only(path, "ENTRYPOINT")), json.loads(only(path, "CMD"))
    assert entry == ["epd-serve"] or (entry[:2] == ["/bin/bash", "-c"] and entry[2].endswith('exec epd-serve "$@"'))
    assert command[0] == "serve"
    config = serve_config(command[1:])
    device = {"ascend": "npu"}.get(path.name.partition(".")[0], path.name.partition(".")[0])
    assert (config.device, config.host) == (device, "0.0.0.0")
    assert str(config.port) == only(path, "EXPOSE")
    assert f"127.0.0.1:{config.port}/live" in only(path, "HEALTHCHECK")


@every_file
def test_extras_that_it_installs_exist(path: Path) -> None:
    extras = re.findall(r'"\.\[([^\]]+)\]"', path.read_text())
    given = dict(rest.split("=", 1) for name, rest in instructions(path) if name == "ARG" and "=" in rest)
    metadata = (ROOT / "pyproject.toml").read_text()
    for extra in extras:
        assert f"\n{given['EXTRAS'] if extra == '${EXTRAS}' else extra} = [" in metadata


@every_file
@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
