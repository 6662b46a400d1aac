"""Every command in README and docs is one that the real parsers take: command, flags, values, targets, settings."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager

import pytest

from bench.cli import parser as bench_parser
from deploy.cli.command import parse_words, serve_config
from deploy.cli.command import parser as serve_parser
from deploy.options.stage_args import parse_stage_args
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable, lower
from tests.docs.documents import DOCUMENTS, ROOT, Command, commands, in_block
from tests.npu.run import parsed as npu_arguments

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
VARIABLES = set(re.findall(r"^([A-Z_0-9]+) *\?=", MAKEFILE, re.MULTILINE)) | {"EPD_TEST_DEVICES"}  # tests/npu reads it
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
MOST_MARKED = 6
"""Commands that a document marks as not to be run here. Few: a mark is for what needs a card or the network."""

STOP_AFTER_PARSING = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def parse_and_stop(self, *words, **named):
    parse(self, *words, **named)
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = parse_and_stop
module, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=False)
raise SystemExit("no command line was parsed")
"""


class WrongCommand(Exception):
    """A command of a document that would fail as it stands."""


def every_command() -> list[Command]:
    first: dict[tuple[str, ...], Command] = {}
    for path in DOCUMENTS:
        for command in commands(path):
            first.setdefault(command.words, command)
    return sorted(first.values(), key=lambda command: command.words)


@pytest.mark.parametrize("command", every_command(), ids=str)
def test_a_documented_command_parses(command):
    check(command.words)


def test_few_commands_are_marked_as_not_to_be_run():
    marked = [command for command in every_command() if command.not_run]

    assert len(marked) <= MOST_MARKED, "\n".join(map(str, marked))


@pytest.mark.parametrize(
    "line",
    [
        "make sreve",
        "make serve LAYUOT=E-P-D",
        "make test-npu TEST_ARGS=--paln",
        "make serve SERVE_ARGS='--lame-duck 3'",
        "epd-serve sreve",
        "epd-serve serve --layuot E-P-D",
        "epd-serve serve --layout E-Q",
        "epd-serve serve --proxy policy=least-laoded",
        "epd-serve serve --proxy polciy=slo",
        "epd-serve serve --layout EP-D --stage-args 'E:--max-num-seqs 8'",
        "epd-serve stage --role E -- --max-num-seqs 8 | epd-serve store lss",
        "epd-bench laod",
        "epd-bench layouts --out DIR --quik",
        "epd-bench transfer dp",
        "python -m bench.nothing",
        "python -m bench.emulation --jsno FILE",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises(WrongCommand):
        check(in_block(line)[-1])


def test_commands_are_found_in_the_shell_that_people_write():
    block = """\
$ (umask 077; openssl rand -hex 32 > key)    # not ours
$ LIMITS='{"a": 1}' .venv/bin/epd-serve serve MODEL --layout '(E-P)-D' \\
    --stage-args "all:--x '$LIMITS'"   # a comment
what it printed: epd-serve: ready
$ make environment-serve DEVICE=npu && epd-serve doctor; npu-smi info
$ python3 -m pip install x | epd-bench load URL
"""

    assert in_block(block) == [
        ("epd-serve", "serve", "MODEL", "--layout", "(E-P)-D", "--stage-args", "all:--x '$LIMITS'"),
        ("make", "environment-serve", "DEVICE=npu"),
        ("epd-serve", "doctor"),
        ("epd-bench", "load", "URL"),
    ]


def check(words: Sequence[str]) -> None:
    """Raises WrongCommand where the real parsers do not take a command."""
    checks = {"make": _make, "epd-serve": _epd_serve, "epd-bench": _epd_bench}
    checks.get(words[0], _python)(list(words[1:]))


def _make(words: list[str]) -> None:
    for word in words:
        name, equals, value = word.partition("=")
        known = VARIABLES if equals else TARGETS
        if name not in known:
            raise WrongCommand(f"the Makefile has no {name}")
        if name == "TEST_ARGS" and "test-npu" in words:
            with _refusals():
                npu_arguments(shlex.split(value))
        if name == "SERVE_ARGS":
            _epd_serve(["serve", *shlex.split(value)])


def _epd_serve(words: list[str]) -> None:
    if is_name(serve_parser(), words):
        return
    with _refusals():
        parse_words(words)
        if words[0] == "serve":
            _serve(words[1:])


def _serve(words: list[str]) -> None:
    """All that `serve` checks before it looks at the machine."""
    if "--config" in words:
        at = words.index("--config")
        words = [*words[:at], *words[at + 2 :]]
    config = serve_config(words)
    layout = parse(config.layout)
    check_servable(layout)
    parse_stage_args(config.stage_args, lower(layout, range(layout.device_count)))


def _epd_bench(words: list[str]) -> None:
    if not is_name(bench_parser(), words):
        with _refusals():
            bench_parser().parse_args(words)


def _python(words: list[str]) -> None:
    _, module, *rest = words
    if not (ROOT / module.replace(".", "/")).is_dir() and importlib.util.find_spec(module) is None:
        raise WrongCommand(f"there is no module {module}")
    if rest:
        done = subprocess.run(
            [sys.executable, "-c", STOP_AFTER_PARSING, module, *rest], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise WrongCommand(f"python -m {shlex.join([module, *rest])}: {done.stderr}")


def is_name(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Whether the words only name a command, or a flag of one, without what it would need to run."""
    for at, word in enumerate(words):
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not groups:
            flags = [flag for action in parser._actions for flag in action.option_strings]
            return len(words) == at + 1 and word in flags and not _runs(parser, words[at:])
        if word not in groups[0].choices:
            if word in ("--help", "--version"):
                return True
            raise WrongCommand(f"{parser.prog} has no command {word}")
        parser = groups[0].choices[word]
    return not _runs(parser, [])


def _runs(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    try:
        parser.parse_args(list(words))
    except (SystemExit, ConfigError):
        return False
    return True


@contextmanager
def _refusals():
    """What the parsers refuse, as WrongCommand."""
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            raise WrongCommand(f"exit status {ended.code}") from ended
    except ConfigError as error:
        raise WrongCommand(str(error)) from error
