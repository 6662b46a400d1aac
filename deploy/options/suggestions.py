"""The one sentence that turns a misspelled key or flag into its correction."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, word: str, valid: Iterable[str]) -> str:
    """`unknown key 'layuot'; did you mean 'layout'?`, or the list of valid ones when nothing is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    if near:
        return f"unknown {what} {word!r}; did you mean {near[0]!r}?"
    return f"unknown {what} {word!r}; valid: {', '.join(names)}"
