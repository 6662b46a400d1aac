"""The API keys of clients as a file has them: names, hashes, tenants and limits. Pure: text in, values out.

A key is 32 random bytes, so nobody finds one by trying. What keeps passwords that people choose (scrypt, argon2: made
to take long) would only make each request cost milliseconds. One keyed hash, HMAC-SHA256 with the salt of the file,
takes microseconds, tells nothing of the key, and can be looked up. The salt keeps what leaks of one file from being
compared with another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import fields

import msgspec

from epd_serve.errors import ConfigError
from proxy.config.limits import KeyLimits

VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
SALT = re.compile(r"[0-9a-f]{32,128}")
LIMITS = tuple(one.name for one in fields(KeyLimits))


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of a client.

    Attributes:
        name: what people call it. hash: `digest` of the key, in hexadecimal.
        tenant: whose features and prefixes it shares; the name where nothing else is said.
        limits: fields of `KeyLimits` that hold for it instead of those of all keys.
        created: a date, for people.
    """

    name: str
    hash: str
    tenant: str = ""
    limits: dict[str, int] = {}
    created: str = ""

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("tenant", self.tenant or self.name)):
            if not NAME.fullmatch(value):
                raise ConfigError(f"{what} {value!r:.80} is not letters, digits and ._@- (64 at most)", param=what)
        if not DIGEST.fullmatch(self.hash):
            raise ConfigError(f"key {self.name}: hash is not 64 hexadecimal digits", param="hash")
        if unknown := self.limits.keys() - set(LIMITS):
            raise ConfigError(
                f"key {self.name}: there is no limit {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}",
                param="limits",
            )
        try:
            KeyLimits(**self.limits)
        except ConfigError as error:
            raise ConfigError(f"key {self.name}: {error}", param="limits") from error


class ApiKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a file. Attributes: salt: of all hashes, in hexadecimal. keys: of different names."""

    salt: str
    keys: tuple[ApiKey, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"version is {self.version}, {VERSION} is known", param="version")
        if not SALT.fullmatch(self.salt):
            raise ConfigError("salt is not at least 32 hexadecimal digits", param="salt")
        for what, names in (("name", [one.name for one in self.keys]), ("hash", [one.hash for one in self.keys])):
            if len(set(names)) < len(names):
                twice = next(one.name for one in self.keys if names.count(getattr(one, what)) > 1)
                raise ConfigError(f"two keys have the {what} of {twice}", param=what)


def digest(salt: bytes, key: bytes) -> bytes:
    """What a file has of a key. 32 bytes."""
    return hmac.digest(salt, key, "sha256")


def tenant_digest(name: str) -> str:
    """What stages, logs and metrics know a tenant of the file by."""
    return hashlib.sha256(b"epd-serve/tenant/tenant/" + name.encode()).hexdigest()[:32]


def parse_keys(text: str) -> ApiKeys:
    """What is in a file. Raises ConfigError, which never quotes the file: it may be one of plain keys."""
    try:
        return msgspec.json.decode(text.encode(), type=ApiKeys)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            "it is not JSON. Keys as lines, as they were before, come in by: "
            "epd-serve key add NAME --file NEW_FILE --stdin"
        ) from error


def written(keys: ApiKeys) -> str:
    """The text of a file, for people to read and to change."""
    return json.dumps(msgspec.to_builtins(keys), indent=2) + "\n"
