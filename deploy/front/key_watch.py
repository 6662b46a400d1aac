"""The clients' keys as their file has them now: looked at while front doors serve, told to them when it has changed.

A file that cannot be read, or says what no such file says, changes nothing: the keys stay as they were, a line and a
metric say so until it is mended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from epd_serve.errors import ConfigError, EpdError
from epd_serve.key_files import read_secret

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from proxy.config.keys import ApiKeys

FLAG = "--api-key-file"
LOOK_S = 1.0
Read = Callable[[], Awaitable[str]]
"""The text of the file. Raises EpdError."""


def read_key_text(path: str) -> str:
    """Raises ConfigError."""
    return read_secret(path, FLAG, fix=f"make one with: epd-serve key add NAME --file {path}")


def api_keys_of(text: str, path: str) -> ApiKeys:
    """Raises ConfigError, with the file's name."""
    from proxy.config.keys import parse_keys

    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"api key file {path}: {error}", param=FLAG) from error


def of_this_machine(path: str) -> Read:
    return partial(asyncio.to_thread, read_key_text, path)


class KeyMetrics:
    """Attributes: keys: how many there are. stale: whether the file could not be read when it was looked at last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Gauge

        self.keys = Gauge("epd_api_keys", "API keys of clients that are known.", registry=registry)
        self.stale = Gauge(
            "epd_api_key_file_broken",
            "1 while the file of API keys cannot be read or used: the keys stay as they were.",
            registry=registry,
        )


class KeyWatch:
    """In the event loop of whoever tells the front doors.

    Args:
        path: of the file, for what is said. text: what it said when it was read last.
        tell: takes the keys when they have changed, with the text. say: takes a line for the operator.
    """

    def __init__(
        self,
        path: str,
        text: str,
        read: Read,
        tell: Callable[[ApiKeys, str], None],
        say: Callable[[str], None],
        metrics: KeyMetrics,
    ) -> None:
        self._path = path
        self._text = text
        self._read = read
        self._tell = tell
        self._say = say
        self._metrics = metrics
        self._trouble = ""
        metrics.keys.set(len(api_keys_of(text, path).keys))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Once."""
        try:
            text = await self._read()
            if text != self._text:
                keys = api_keys_of(text, self._path)
                self._tell(keys, text)
                self._text = text
                self._metrics.keys.set(len(keys.keys))
                self._say(f"API keys: {len(keys.keys)} from now on")
        except EpdError as error:
            self._is_broken(str(error))
        else:
            self._is_broken("")

    def _is_broken(self, trouble: str) -> None:
        self._metrics.stale.set(bool(trouble))
        if trouble and trouble != self._trouble:
            self._say(f"error: the API keys stay as they are: {trouble}")
        elif self._trouble and not trouble:
            self._say("the file of API keys is whole again")
        self._trouble = trouble
