"""What every command of `epd-serve` reads its flags with: a parser that raises our errors, and flags from options."""

from __future__ import annotations

import argparse
import re
from dataclasses import Field
from typing import Any, NoReturn

from deploy.options.suggestions import unknown
from epd_serve.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse that raises our errors and names the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            what, word, valid = choice.groups()
            raise ConfigError(unknown(what, word, re.findall(r"[\w.:-]+", valid.replace("'", " "))))
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what stands after `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def subparser(commands: Any, name: str, help: str) -> Parser:
    made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    assert isinstance(made, Parser)
    return made


def add_option(parser: Any, option: Field[Any]) -> None:
    """The flag of a field of `DeployConfig`; absent from the result when it is not given."""
    flag = option.metadata.get("flag", "--" + option.name.replace("_", "-"))
    kind = type(option.default)
    text = argparse.SUPPRESS if option.metadata.get("hidden") else option.metadata["help"]
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        parser.add_argument(flag, action="store_true", **shared)
    elif option.metadata.get("many"):
        parser.add_argument(flag, action="append", metavar="TEXT", **shared)
    elif option.metadata.get("choices"):
        parser.add_argument(flag, choices=option.metadata["choices"], **shared)
    else:
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **shared)


def port(text: str) -> int:
    """A port as argparse's `type`."""
    if not (re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and 65535")
    return int(text)
