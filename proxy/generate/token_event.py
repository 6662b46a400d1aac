"""The events of a stream of tokens as bytes, which the relay passes on unread: ids of tokens are taken out of them.

All but a few events of an answer are one token's, and begin alike: id, time and model are the stream's. Such an event
is told by its beginning, for much less than it takes to look through it.
"""

from __future__ import annotations

import re

from proxy.stages.sse import split

_DATA = b"data: {"
_HOLDERS = (b'"delta":', b'"text":')
_GOES_ON = b'"finish_reason":null'
_NOTHING = b"{}"
_IDS = b'"token_ids":['
_NAME = len(b'"token_ids":')
_ANY_IDS = re.compile(rb'"token_ids":\[[^\]]*\]')
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[[^\]]*\]')
_SILENT = b'"delta":{},"logprobs":null,"finish_reason":null'
"""Of an event that vLLM writes for the ids alone, where a parser holds the text back."""


def without_ids(events: bytes) -> bytes:
    """Whole events as vLLM writes them for a client that does not ask for token ids. Within a JSON string the quotes of
    what is looked for would be escaped."""
    at = events.find(_IDS)
    if at >= 0:  # cut by hand: a regular expression takes three times as long, for every token
        end = events.find(b"]", at)
        events = b"%bnull%b" % (events[: at + _NAME], events[end + 1 :])
        if events.find(_IDS, at) >= 0:
            events = _ANY_IDS.sub(b'"token_ids":null', events)
    if _SILENT in events:
        return b"".join(event for event in split(events) if _SILENT not in event)
    return events


def without_prompt_ids(events: bytes) -> bytes:
    """Events without the ids of the prompt, of which there may be many thousands."""
    return _PROMPT_IDS.sub(b'"prompt_token_ids":null', events)


def prompt_digest(events: bytes) -> int | None:
    """Of the ids of the prompt, where these events say them."""
    ids = _PROMPT_IDS.search(events)
    return hash(ids[0]) if ids is not None else None


class TokenForm:
    """How the events of one stream are written that are a token's, before its last.

    Args:
        prefix: what they begin with, to where they say something. mark: what stands between their text and the ids.

    Attributes:
        size: of the prefix.
    """

    __slots__ = ("_before_ids", "_mark", "_prefix", "size")

    def __init__(self, prefix: bytes, mark: bytes) -> None:
        self._prefix, self._mark = prefix, mark
        self.size, self._before_ids = len(prefix), len(mark) - 1

    @property
    def holder(self) -> bytes:
        """The end of the prefix, which names what holds the text."""
        return self._prefix[self._prefix.rfind(b'"', 0, -2) :]

    def without_ids(self, events: bytes) -> bytes | None:
        """The event as for a client that wants no ids, if this is one such event, neither an error nor the end."""
        if not events.startswith(self._prefix) or events.find(b"\n") != len(events) - 2:
            return None
        at = events.rfind(self._mark, self.size)
        if at < 0 or events.startswith(_NOTHING, self.size):
            return None
        ids = at + self._before_ids
        return events[:ids] + b"null" + events[events.find(b"]", ids) + 1 :]


def token_form(events: bytes) -> TokenForm | None:
    """That of the stream of which these are the first events; None where they say no ids, or are of another form."""
    for holder in _HOLDERS:
        at = events.find(holder)
        goes_on = events.rfind(_GOES_ON)
        ids = events.find(_IDS, goes_on)
        if 0 < at < goes_on < ids and events.startswith(_DATA) and b"\n" not in events[:at] + events[goes_on:ids]:
            return TokenForm(events[: at + len(holder)], events[goes_on : ids + len(_IDS)])
    return None
