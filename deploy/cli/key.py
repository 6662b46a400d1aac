"""`epd-serve key`: makes, lists and revokes the API keys in a file that front doors go by.

Who changes the file holds its folder's lock; the new file takes the old one's name in one step, so that nobody reads
half of one. A key is shown once, when it is made: the file has its hash.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from deploy.cli.which import Arguments
from deploy.front.key_watch import api_keys_of, read_key_text
from deploy.options.flags import Parser, subparser
from epd_serve.errors import ConfigError

SHORTEST = 16
"""Characters of a key that somebody else made."""

PREFIX = "epd-"


def key_flags(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    add = _action(actions, "add", "make a key and print it, this once", _add)
    add.add_argument("name", metavar="NAME", help="what people call it")
    add.add_argument("--tenant", default="", help="shares features with keys of the same tenant (default: NAME)")
    add.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="instead of that of all keys (--proxy key_limits.NAME), for example requests_in_flight=8; repeatable",
    )
    add.add_argument("--stdin", action="store_true", help="take this key, a line of standard input, and make none")
    show = _action(actions, "list", "names, tenants and limits", _list)
    show.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    revoke = _action(actions, "revoke", "have a key be refused from now on", _revoke)
    revoke.add_argument("name", metavar="NAME")


def _action(actions: Any, name: str, help: str, command: Any) -> Parser:
    parser = subparser(actions, name, help)
    parser.set_defaults(command=command)
    parser.add_argument("--file", type=Path, required=True, help="as of --api-key-file")
    return parser


def _add(arguments: Arguments) -> int:
    from proxy.config.keys import ApiKey, ApiKeys, digest

    path: Path = arguments["file"]
    key = _given() if arguments["stdin"] else PREFIX + secrets.token_urlsafe(32)
    with _changing(path):
        keys = api_keys_of(read_key_text(str(path)), str(path)) if path.exists() else ApiKeys(secrets.token_hex(16))
        hashed = digest(bytes.fromhex(keys.salt), key.encode()).hex()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        entry = ApiKey(arguments["name"], hashed, arguments["tenant"], _limits(arguments["limit"]), today)
        _write(path, ApiKeys(keys.salt, (*keys.keys, entry)))
    if not arguments["stdin"]:
        print(key)
    return 0


def _list(arguments: Arguments) -> int:
    from deploy.memory.placement_table import table
    from proxy.config.keys import tenant_digest

    path = str(arguments["file"])
    rows = []
    for key in api_keys_of(read_key_text(path), path).keys:
        tenant = key.tenant or key.name
        rows.append((key.name, tenant, tenant_digest(tenant), dict(key.limits), key.created))
    if arguments["as_json"]:
        names = ("name", "tenant", "tenant_digest", "limits", "created")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    elif rows:
        shown = [
            (name, tenant, digest, " ".join(f"{limit}={value}" for limit, value in limits.items()), created)
            for name, tenant, digest, limits, created in rows
        ]
        print(table([("name", "tenant", "as logs know it", "limits", "created"), *shown]))
    return 0


def _revoke(arguments: Arguments) -> int:
    path: Path = arguments["file"]
    with _changing(path):
        keys = api_keys_of(read_key_text(str(path)), str(path))
        left = tuple(key for key in keys.keys if key.name != arguments["name"])
        if len(left) == len(keys.keys):
            names = ", ".join(key.name for key in keys.keys) or "none"
            raise ConfigError(f"there is no key {arguments['name']!r}; there are {names}", param="NAME")
        _write(path, structs.replace(keys, keys=left))
    return 0


def _given() -> str:
    key = sys.stdin.readline().strip()
    if len(key) < SHORTEST or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"a key is one word of at least {SHORTEST} characters", param="--stdin")
    return key


def _limits(words: Sequence[str]) -> dict[str, int]:
    limits = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            limits[name.replace("-", "_")] = int(number)
        except ValueError:
            raise ConfigError(f"--limit {word}: it is NAME=NUMBER", param="--limit") from None
    return limits


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Nobody else changes a file of this folder meanwhile. Raises ConfigError: there is no such folder."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="--file") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: Any) -> None:
    """As a whole, for who could read the file before; else for this user alone. Raises ConfigError: it cannot be."""
    from proxy.config.keys import written

    target = path.resolve()  # a link stays one
    unnamed = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        before = target.stat() if target.exists() else None
        file = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(file, "w", encoding="ascii") as out:
                if before is not None:
                    if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(file, before.st_uid, before.st_gid)
                    os.fchmod(file, stat.S_IMODE(before.st_mode))
                out.write(written(keys))
                out.flush()
                os.fsync(file)
            os.replace(unnamed, target)
        finally:
            unnamed.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="--file") from error
