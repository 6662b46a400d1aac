"""What a callable takes, as far as its `def` says: whether a call of some shape fits, and one signature another.

Signatures are kept as text, `(self, request: vllm.v1.request.Request, index: int=...) -> None`. Pure.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """How something is called: `positional` arguments, then keywords. `open`: there is a `*` or `**` in it."""

    positional: int
    keywords: tuple[str, ...] = ()
    open: bool = False

    @classmethod
    def of(cls, call: ast.Call) -> Shape:
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        names = tuple(sorted(keyword.arg for keyword in call.keywords if keyword.arg is not None))
        positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
        return cls(positional, names, starred or len(names) < len(call.keywords))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The reverse of `str`: `(2, name=)` or `(1, ...)`."""
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        names = tuple(part.removesuffix("=") for part in parts if part.endswith("="))
        return cls(int(parts[0]), names, "..." in parts)

    def __str__(self) -> str:
        parts = [str(self.positional), *(f"{name}=" for name in self.keywords), *(["..."] if self.open else [])]
        return f"({', '.join(parts)})"


@dataclass(frozen=True)
class Signature:
    """`positional` and `keyword_only`: (name, whether it has no default)."""

    positional: tuple[tuple[str, bool], ...]
    keyword_only: tuple[tuple[str, bool], ...] = ()
    takes_more: bool = False  # *args
    takes_any_keyword: bool = False  # **kwargs

    @classmethod
    def of(cls, arguments: ast.arguments) -> Signature:
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = len(names) - len(arguments.defaults)
        return cls(
            tuple((name, at < required) for at, name in enumerate(names)),
            tuple(
                (argument.arg, default is None)
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            ),
            arguments.vararg is not None,
            arguments.kwarg is not None,
        )

    @classmethod
    def parse(cls, text: str) -> Signature:
        return cls.of(parsed(text).args)

    def bound(self) -> Signature:
        """Without `self` or `cls`."""
        return Signature(self.positional[1:], self.keyword_only, self.takes_more, self.takes_any_keyword)

    def refuses(self, shape: Shape) -> str | None:
        """Why a call of this shape fails, or None."""
        if shape.positional > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments, not {shape.positional}"
        known = {name for name, _ in (*self.positional[shape.positional :], *self.keyword_only)}
        for name in shape.keywords:
            if name not in known and not self.takes_any_keyword:
                return f"takes no argument {name!r}; it takes {', '.join(sorted(known)) or 'none'}"
        if shape.open:
            return None
        needed = (*self.positional[shape.positional :], *self.keyword_only)
        lacking = [name for name, required in needed if required and name not in shape.keywords]
        return f"needs {', '.join(lacking)}" if lacking else None

    def cannot_replace(self, other: Signature) -> str | None:
        """Why an override with this signature breaks a caller who knows `other`, or None. Both are bound."""
        if len(self.positional) < len(other.positional) and not self.takes_more:
            lacking = [name for name, _ in other.positional[len(self.positional) :]]
            if not self.takes_any_keyword:
                return f"does not take {', '.join(lacking)}"
        names = {name for name, _ in self.keyword_only} | {name for name, _ in self.positional}
        for name, _ in other.keyword_only:
            if name not in names and not self.takes_any_keyword:
                return f"does not take {name}"
        known = {name for name, _ in (*other.positional, *other.keyword_only)}
        extra = [name for name, required in self.positional[len(other.positional) :] if required and name not in known]
        extra += [name for name, required in self.keyword_only if required and name not in known]
        return f"needs {', '.join(extra)}, which nobody passes" if extra else None


def parsed(text: str) -> ast.FunctionDef:
    """The `def` of a signature's text."""
    (made,) = ast.parse(f"def _{text}: ...").body
    assert isinstance(made, ast.FunctionDef)
    return made
