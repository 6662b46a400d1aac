"""The sieve in front of the stages: what no rule knows is left out and counted, or refused in strict mode.

Works on a decoded body, in place. A body of known fields costs one set comparison for each of its objects, and a look
at each field that is to be a list or an object: what is neither would reach code of vLLM's that counts on it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from epd_serve.errors import RequestError
from proxy.fields.rules import (
    ANTHROPIC,
    IGNORED,
    NESTED,
    NESTED_ANTHROPIC,
    OUR_XARGS,
    PASSED,
    REFUSED,
    XARGS_REFUSED,
    Refusal,
    names_of,
)
from proxy.fields.vllm_fields import FIELDS, RELEASES, TYPES
from proxy.strict_json import SHOWN_CHARS

OTHER = "other"
MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that a client may send once the operator trusts clients with them."""


@dataclass(frozen=True)
class _Level:
    """What an object may have.

    Attributes:
        allowed: names. inner: those below which there is another level.
        types: letters (`proxy/fields/vllm_fields.py`) of the names for which a list or an object is taken.
    """

    allowed: frozenset[str]
    types: Mapping[str, str] = field(default_factory=dict)
    inner: Mapping[str, _Level] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """The rules of one of vLLM's models, in one of its releases."""

    top: _Level
    refused: Mapping[str, Refusal]


@functools.cache
def rules_of(model: str, release: str = "", *, media_options: bool = False) -> Rules:
    """Returns the rules for `model`, a key of `FIELDS`.

    Args:
        release: vLLM's version; one between two that were read counts as the older of them. Empty, or older than all:
            what any of them has, for stages of unknown versions. Nothing that is refused is among it.
        media_options: `MEDIA_OPTIONS` pass.
    """
    own = {name.removeprefix(f"{model}."): why for name, why in REFUSED.items() if name.startswith(f"{model}.")}
    refused = {**own, **_refused_everywhere(media_options)}
    passed = names_of(PASSED) | (frozenset(MEDIA_OPTIONS) if media_options else frozenset())
    known = known_release(release)
    fields = FIELDS[model][known] if known else frozenset().union(*FIELDS[model].values())
    return Rules(_level(NESTED[model], TYPES[model], "", (fields & passed) - refused.keys()), refused)


@functools.cache
def anthropic_rules(*, media_options: bool = False) -> Rules:
    """The rules for a body of `/v1/messages`, before a chat is made of it."""
    return Rules(_level(NESTED_ANTHROPIC, {}, "", names_of({"": ANTHROPIC})), _refused_everywhere(media_options))


def _refused_everywhere(media_options: bool) -> dict[str, Refusal]:
    left_out = MEDIA_OPTIONS if media_options else ()
    return {name: why for name, why in REFUSED.items() if "." not in name and name not in left_out}


def known_release(version: str) -> str:
    """The newest release read that is not newer than `version`, "" where there is none."""
    return next((release for release in reversed(RELEASES) if _numbers(release) <= _numbers(version)), "")


class Sieve(Struct):
    """Sifts one body.

    Attributes:
        strict: an unknown field is an error.
        dropped: what was left out, by words that are few: names of `field_rules`, paths, `other`.
    """

    strict: bool
    dropped: list[str] = []

    def body(self, body: dict[str, Any], rules: Rules) -> None:
        """Leave in `body` what may reach a stage.

        Raises:
            RequestError: 400, naming the field that is refused, of a type that vLLM does not take, or in strict mode
                unknown.
        """
        if not _all_known(body, rules.top):
            for name in [name for name in body if name not in rules.top.allowed]:
                self._judge(name, body.pop(name), rules)
            self._inner(body, rules.top, "", "")
        if mistyped := _mistyped(body, rules.top):
            where, letters = mistyped
            raise RequestError(f"{where} must be {' or '.join(_WORDS[one] for one in letters)}.", param=where)

    def xargs(self, xargs: dict[str, Any], allowed: Collection[str]) -> None:
        """The same for `vllm_xargs`, of which only what the operator names reaches an engine."""
        for name in [name for name in xargs if name not in allowed]:
            value, where = xargs.pop(name), f"vllm_xargs.{name}"
            if value is not None and (name in XARGS_REFUSED or name.startswith(OUR_XARGS)):
                raise RequestError(f"{where} is set by the server and cannot be sent by a client.", param=where)
            if value is not None:
                self._drop(where, "vllm_xargs", name, allowed)

    def _judge(self, name: str, value: object, rules: Rules) -> None:
        refusal = rules.refused.get(name)
        if refusal is not None:
            if value is not None and value not in refusal.harmless:
                raise RequestError(f"{name} {refusal.reason}", param=name)
        elif value is not None and name not in _IGNORED:
            _refuse_embeds(name, name)
            self._drop(name, name if name in _NAMED else OTHER, name, rules.top.allowed)

    def _inner(self, body: Mapping[str, Any], level: _Level, where: str, path: str) -> None:
        for name, below in level.inner.items():
            value = body.get(name)
            if type(value) is dict:
                self._object(value, below, f"{where}{name}", f"{path}{name}")
            elif type(value) is list:
                for number, one in enumerate(value):
                    if type(one) is dict:
                        self._object(one, below, f"{where}{name}[{number}]", f"{path}{name}")

    def _object(self, body: dict[str, Any], level: _Level, where: str, path: str) -> None:
        for name in [name for name in body if name not in level.allowed]:
            if body.pop(name) is not None:
                _refuse_embeds(name, f"{where}.{name}")
                self._drop(f"{where}.{name}", path, name, level.allowed)
        self._inner(body, level, where + ".", path + ".")

    def _drop(self, where: str, label: str, name: str, allowed: Collection[str]) -> None:
        if self.strict:
            near = difflib.get_close_matches(name[:SHOWN_CHARS], sorted(allowed), n=1, cutoff=0.6)
            meant = f"; did you mean {near[0]}?" if near else ""
            where = where[:SHOWN_CHARS]
            raise RequestError(
                f"{where} is not a field that this server knows{meant}", param=where, code="unknown_field"
            )
        self.dropped.append(label)


def _refuse_embeds(name: str, where: str) -> None:
    """Tensors from outside reach the engine unchecked. Those that have a place in a part, `proxy/fields/parts.py`
    refuses."""
    if name.endswith("_embeds"):
        where = where[:SHOWN_CHARS]
        raise RequestError(f"{where} is not accepted from clients.", param=where)


def _all_known(body: dict[str, Any], level: _Level) -> bool:
    """What nearly every body is: nothing in it has to go. No names of places are made for it."""
    if not body.keys() <= level.allowed:
        return False
    inner = level.inner
    for name, value in body.items():
        if name in inner:
            for one in value if type(value) is list else (value,):
                if type(one) is dict and not _all_known(one, inner[name]):
                    return False
    return True


def _mistyped(body: dict[str, Any], level: _Level) -> tuple[str, str] | None:
    """Where the first value is that is none of what may be there, and the letters of what may."""
    types, inner = level.types, level.inner
    for name, value in body.items():
        letters = types.get(name)
        if letters is not None and _LETTERS[type(value)].isdisjoint(letters):
            return name, letters
        if name not in inner and letters != "L":
            continue
        is_list = type(value) is list
        for number, one in enumerate(value if is_list else (value,)):
            where = f"{name}[{number}]" if is_list else name
            if type(one) is dict:
                if name in inner and (mistyped := _mistyped(one, inner[name])):
                    return f"{where}.{mistyped[0]}", mistyped[1]
            elif is_list and letters == "L":
                return where, "o"
    return None


def _level(nested: Mapping[str, str], types: Mapping[str, str], path: str, allowed: frozenset[str]) -> _Level:
    prefix = f"{path}." if path else ""
    inner = [one.removeprefix(prefix) for one in nested if one.startswith(prefix)]
    direct = [name for name in inner if "." not in name and name in allowed]
    return _Level(
        allowed,
        {name: types[prefix + name] for name in allowed if prefix + name in types},
        {name: _level(nested, types, prefix + name, frozenset(nested[prefix + name].split())) for name in direct},
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


_WORDS = {"o": "an object", "l": "a list", "L": "a list", "s": "a string", "n": "a number"}
_LETTERS: dict[type, frozenset[str]] = {
    dict: frozenset("o"),
    list: frozenset("lL"),
    str: frozenset("s"),
    int: frozenset("n"),
    float: frozenset("n"),
    bool: frozenset("n"),
    type(None): frozenset("lLosn"),
}
_IGNORED = names_of(IGNORED)
_NAMED = frozenset().union(names_of(PASSED), *(names for model in FIELDS.values() for names in model.values()))
