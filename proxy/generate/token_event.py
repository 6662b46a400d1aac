"""Ids of tokens in events that the relay passes on: taken out where they are there for our sake, wherever an event has
them and however a stage spaces its JSON.

Within a JSON string quotes are escaped, so a name between two quotes before a colon is a field's; a list of numbers
ends at its first bracket.
"""

from __future__ import annotations

import re

from proxy.stages.sse import BLANKS, read, split

_NAME = b'"token_ids"'
_IDS = re.compile(_NAME + rb"\s*:\s*\[[^\]]*\]")
_EMPTY_DELTA = re.compile(rb'"delta"\s*:\s*\{\s*\}')
_DATA, _HOLDERS, _GOES_ON, _FORM_IDS = b"data: {", (b'"delta":', b'"text":'), b'"finish_reason":null', b'"token_ids":['
_NOTHING = b"{}"
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*(\[[^\]]*\])')


def without_ids(events: bytes) -> bytes:
    """Whole events as vLLM writes them for a client that does not ask for token ids."""
    if _NAME in events:
        events = _IDS.sub(_NAME + b":null", events)
    if _EMPTY_DELTA.search(events) is None:
        return events
    return b"".join(event for event in split(events) if not _says_nothing(event))


def _says_nothing(event: bytes) -> bool:
    """Whether vLLM writes it for the ids alone, where a parser holds the text back."""
    said = read(event)
    return said is not None and bool(said.choices) and all(choice.says_nothing for choice in said.choices)


def without_prompt_ids(events: bytes) -> bytes:
    """Events without the ids of the prompt, of which there may be many thousands."""
    return _PROMPT_IDS.sub(b'"prompt_token_ids":null', events)


def prompt_digest(events: bytes) -> int | None:
    """Of the ids of the prompt, where these events say them."""
    ids = _PROMPT_IDS.search(events)
    return hash(ids[1].translate(None, BLANKS)) if ids is not None else None


class TokenForm:
    """How the events of one stream are written that are a token's, before its last.

    It is learnt from the first of them, and only saves reading the others: what is not in this form is read.

    Args:
        prefix: what they begin with, to where they say something. mark: what stands between their text and the ids.
    """

    __slots__ = ("_before_ids", "_mark", "_prefix", "_size")

    def __init__(self, prefix: bytes, mark: bytes) -> None:
        self._prefix, self._mark = prefix, mark
        self._size, self._before_ids = len(prefix), len(mark) - 1

    def without_ids(self, events: bytes) -> bytes | None:
        """The event as for a client that wants no ids, if this is one such event, neither an error nor the end."""
        if not events.startswith(self._prefix) or events.find(b"\n") != len(events) - 2:
            return None
        at = events.rfind(self._mark, self._size)
        if at < 0 or events.startswith(_NOTHING, self._size):
            return None
        ids = at + self._before_ids
        return events[:ids] + b"null" + events[events.find(b"]", ids) + 1 :]


def token_form(events: bytes) -> TokenForm | None:
    """That of the stream of which these are the first events; None where they say no ids, or are of another form."""
    for holder in _HOLDERS:
        at = events.find(holder)
        goes_on = events.rfind(_GOES_ON)
        ids = events.find(_FORM_IDS, goes_on)
        if 0 < at < goes_on < ids and events.startswith(_DATA) and b"\n" not in events[:at] + events[goes_on:ids]:
            return TokenForm(events[: at + len(holder)], events[goes_on : ids + len(_FORM_IDS)])
    return None
