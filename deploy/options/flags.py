"""What every command of `epd-serve` reads its flags with: a parser that raises our errors, and flags from options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn, get_origin

from deploy.options.config import flag_of
from epd_serve.errors import ConfigError
from epd_serve.suggestions import unknown
from proxy.config.tree import settings_of


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


def add_tree(parser: Any, owner: type) -> None:
    """Flags of all settings of a command, and of what brings several at once."""
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file; the environment and flags win")
    parser.add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the proxy, for example media.max_bytes=1000000; repeatable",
    )
    add_settings(parser, owner)


def add_settings(parser: Any, owner: type, names: Iterable[str] = ()) -> None:
    """Flags of these settings of a tree with their defaults; of all if none are named, absent from the result where
    they are not given."""
    known = settings_of(owner)
    for key in names or known:
        setting = known[key]
        alias = setting.notes.get("alias")
        shown = not setting.notes.get("hidden") and ("." not in key or alias)
        kind = "TEXT" if get_origin(setting.kind) is tuple else getattr(setting.kind, "__name__", "").upper()
        value: dict[str, Any] = {"metavar": kind}
        if setting.kind is bool:
            value = {"action": argparse.BooleanOptionalAction}
        elif setting.choices:
            value = {"choices": setting.choices}
        elif setting.notes.get("repeatable"):
            value["action"] = "append"
        default = argparse.SUPPRESS if not names else [] if "action" in value else setting.default
        said = {
            "default": default,
            "help": setting.meaning.rstrip(".").replace("%", "%%") if shown else argparse.SUPPRESS,
        }
        if setting.notes.get("positional"):
            parser.add_argument(key, nargs="?", **said)
        else:
            parser.add_argument(*(flag_of(one) for one in (alias, key) if one), dest=key, **value, **said)


def port(text: str) -> int:
    """A port as argparse's `type`."""
    if not (re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and 65535")
    return int(text)
