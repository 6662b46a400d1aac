"""One tree of settings: dataclasses whose fields are settings, or sections, which are such dataclasses themselves.

A field's type has its bounds, its line under `Attributes:` its meaning. The flags, the keys of the YAML file, the
variables of the environment, the checks and the reference page are all made from these two. Where values come from is
`deploy`'s to know.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from inspect import cleandoc, get_annotations
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from epd_serve.errors import ConfigError
from epd_serve.suggestions import unknown

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountFrom0 = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
T = TypeVar("T")


class Setting(NamedTuple):
    """One setting of a tree.

    Attributes:
        key: its name, one in a section as `section.name`.
        hint: the field's type, with bounds.
        default: the value where nobody names another.
        meaning: its line under `Attributes:`.
        notes: the field's metadata. `repeatable`: given once for each entry; other lists of words are split at commas.
            `positional`: the command takes it without a flag. `hidden`: documents leave it out. `alias`: another
            key for it.
    """

    key: str
    hint: Any
    default: Any
    meaning: str
    notes: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        """The type without bounds and None."""
        hint = get_args(self.hint)[0] if get_origin(self.hint) in (Union, types.UnionType) else self.hint
        return hint.__origin__ if get_origin(hint) is Annotated else hint

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that it may have, if it is one of a few words."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def typed(self, value: object, name: str = "") -> Any:
        """`value`, also as text, in the field's type.

        Args:
            name: what an error calls it.

        Raises:
            ConfigError: wrong type or bound.
        """
        name, kind, given = name or self.key, self.kind, value
        if self.choices and value not in self.choices:  # names the nearest
            raise ConfigError(unknown(name, str(value), self.choices), param=self.key)
        try:
            if isinstance(value, str):
                if kind in (int, float):
                    given = kind(value)
                elif get_origin(kind) is tuple:
                    words = (value,) if self.notes.get("repeatable") else value.split(",")
                    given = tuple(word.strip() for word in words if word.strip())
            return msgspec.convert(given, self.hint, strict=not isinstance(given, str))
        except ValueError as error:  # msgspec's is one
            bound = re.match(r"Expected (`[^`]+`[^,]*)", str(error))
            wanted = "true or false" if kind is bool else bound[1].replace("`", "") if bound else kind.__name__
            raise ConfigError(f"{name} is {value!r}; expected {wanted}", param=self.key) from None


@cache
def settings_of(owner: type) -> dict[str, Setting]:
    """All settings of a tree by key: its own first, then those that it inherits. Fields that are given as keywords only
    are none: they follow from others.
    """
    hints = get_type_hints(owner, include_extras=True)
    declared = {field.name: field for field in fields(owner)}
    found: dict[str, Setting] = {}
    for base in owner.__mro__:
        meanings = attributes(base)
        for name in get_annotations(base):
            field = declared[name]
            if is_dataclass(hints[name]) and not field.kw_only:
                inner = settings_of(hints[name]).values()
                found |= {(key := f"{name}.{one.key}"): one._replace(key=key) for one in inner}
            elif not field.kw_only:
                found[name] = Setting(name, hints[name], field.default, meanings.get(name, ""), field.metadata)
    return found


def attributes(owner: type) -> dict[str, str]:
    """What the lines under `Attributes:` of a class say of its fields: `one: …` or `one, other: …`."""
    _, _, listed = cleandoc(owner.__doc__ or "").partition("Attributes:")
    _, *parts = re.split(r"\n {4}(\w[\w, ]*): ", listed)
    lines = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(text.split()) for names, text in lines for name in names.split(", ")}


def find(owner: type, word: str, what: str) -> Setting:
    """The setting that `word` names; dashes and underscores are the same.

    Raises:
        ConfigError: there is none. It names the nearest.
    """
    known, name = settings_of(owner), word.strip().replace("-", "_")
    known = {one.notes.get("alias", key): one for key, one in known.items()} | known
    if name not in known:
        sections = {key.partition(".")[0] for key in known} - {name}
        raise ConfigError(unknown(what, word, known.keys() | sections), param=word)
    return known[name]


def changed(settings: T, values: Mapping[str, Any]) -> T:
    """A copy with other values, by key. Raises ConfigError where they do not go together."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    own = sections.pop("", {})
    inner = {name: replace(getattr(settings, name), **each) for name, each in sections.items()}
    return replace(settings, **own, **inner)  # type: ignore[type-var]


@dataclass(frozen=True)
class Checked:
    """Settings that hold to their types and bounds however they are made."""

    def __post_init__(self) -> None:
        owner: type = type(self)
        for key, setting in settings_of(owner).items():
            if "." not in key:
                value = getattr(self, key)
                assert setting.typed(value) == value, f"{key} is still text"
