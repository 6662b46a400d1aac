"""Load every media item of a request once, safely, and give it its key.

Owns the order of checks and the bounds over a whole request. How to fetch is `fetch.py`'s and `local_files.py`'s,
how to judge a picture `images.py`'s, how keys are made `store/keys.py`'s.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from epd_serve.errors import PayloadTooLargeError, RequestError
from proxy.clips import inspect_clip
from proxy.errors import most_telling
from proxy.fetch import UrlFetcher, too_large
from proxy.images import inspect_picture
from proxy.local_files import read_local
from proxy.parts import MediaRef, Modality
from proxy.request import ParsedRequest
from proxy.settings import SCHEMES, ProxySettings
from store.errors import StoreError
from store.keys import feature_key

T = TypeVar("T")
MAX_SCHEME = 16  # characters looked at: the rest may be megabytes
DEFAULT_MIME = {Modality.IMAGE: "image/png", Modality.AUDIO: "audio/wav", Modality.VIDEO: "video/mp4"}


@dataclass(frozen=True)
class LoadedItem:
    """A media item on its way to the stages.

    Attributes:
        source: data URL (base64 for `input_audio`): what replaces the client's URL.
        key: its feature key, the `uuid` that every stage sees.
        weight: encoding cost for LPT: pixels of a picture, bytes of anything else.
    """

    ref: MediaRef
    source: str
    key: str
    weight: float


class MediaLoader:
    """Loads items. Blocking work runs on a few threads of its own."""

    def __init__(self, settings: ProxySettings, fetcher: UrlFetcher) -> None:
        self._identity = settings.identity
        self._limits = settings.media
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(settings.media.threads, thread_name_prefix="media")

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    async def load(self, request: ParsedRequest, *, tenant: str) -> tuple[LoadedItem, ...]:
        """All items of `request`, in order. Raises RequestError naming the item at fault."""
        refs = request.media
        if not refs:
            return ()
        if len(refs) > self._limits.max_items:
            raise RequestError(
                f"messages: {len(refs)} media items, the limit is {self._limits.max_items}.", param="messages"
            )
        for ref in refs:
            self._check_scheme(ref)
        fetched = await self._fetched([ref for ref in refs if _scheme(ref) in ("http", "https")])
        options = request.processor_options
        # All of them in one go: a thread's turn costs as much as a small picture.
        return await self._blocking(lambda: self._items(refs, fetched, options, tenant))

    async def _fetched(self, refs: Sequence[MediaRef]) -> Mapping[str, bytes]:
        """What other hosts have, by the parameter that names it."""
        if not refs:
            return {}
        try:
            async with asyncio.TaskGroup() as group:
                fetching = {
                    ref.param: group.create_task(self._fetcher.fetch(ref.source, param=ref.param)) for ref in refs
                }
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        return {param: task.result() for param, task in fetching.items()}

    def _check_scheme(self, ref: MediaRef) -> None:
        if ref.key == "input_audio":
            return
        scheme = _scheme(ref)
        if scheme not in SCHEMES:
            raise RequestError(
                f"{ref.param}: the URL must begin with data:, http:// or https://.",
                param=ref.param,
                code="media_scheme",
            )
        if scheme not in self._limits.schemes:
            raise RequestError(
                f"{ref.param}: this server takes no {scheme}: URLs, only {', '.join(self._limits.schemes) or 'none'}.",
                param=ref.param,
                code="media_scheme",
            )

    def _items(
        self, refs: Sequence[MediaRef], fetched: Mapping[str, bytes], options: dict[str, object], tenant: str
    ) -> tuple[LoadedItem, ...]:
        """In a thread."""
        contents = [self._bytes_of(ref, fetched) for ref in refs]
        total = sum(len(data) for _, data in contents)
        if total > self._limits.max_total_bytes:
            raise PayloadTooLargeError(
                f"messages: media of {total:,} bytes in all, the limit is {self._limits.max_total_bytes:,}.",
                param="messages",
            )
        return tuple(
            [self._item(ref, mime, data, options, tenant) for ref, (mime, data) in zip(refs, contents, strict=True)]
        )

    def _bytes_of(self, ref: MediaRef, fetched: Mapping[str, bytes]) -> tuple[str, bytes]:
        """(MIME type, bytes) of one item."""
        mime, limit = DEFAULT_MIME[ref.modality], self._limits.max_bytes
        if ref.param in fetched:
            return mime, fetched[ref.param]
        if ref.key == "input_audio":
            return mime, _base64(ref.source, ref.param, limit)
        if _scheme(ref) == "data":
            return _data_url(ref.source, ref.param, mime, limit)
        return mime, read_local(ref.source, root=self._limits.allowed_local_root, max_bytes=limit, param=ref.param)

    def _item(self, ref: MediaRef, mime: str, data: bytes, options: dict[str, object], tenant: str) -> LoadedItem:
        if not data:
            raise RequestError(f"{ref.param}: empty.", param=ref.param)
        weight = len(data)
        if ref.modality is Modality.IMAGE:
            mime, weight = inspect_picture(data, param=ref.param, max_pixels=self._limits.max_pixels)
        else:
            limits = self._limits
            max_s = limits.max_audio_s if ref.modality is Modality.AUDIO else limits.max_video_s
            inspect_clip(data, param=ref.param, max_s=max_s, max_pixels=limits.max_pixels)
        try:
            key = feature_key(
                data,
                processor_options=options,
                model=self._identity.model,
                revision=self._identity.revision,
                dtype=self._identity.dtype,
                tenant=tenant,
                modality=ref.modality.value,
            )
        except StoreError as error:
            raise RequestError(f"{', '.join(options)}: {error}.", param=next(iter(options))) from None
        return LoadedItem(ref, _source(ref, mime, data), key, float(weight))

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _scheme(ref: MediaRef) -> str:
    return "" if ref.key == "input_audio" else ref.source[:MAX_SCHEME].partition(":")[0].lower()


def _source(ref: MediaRef, mime: str, data: bytes) -> str:
    """What the stages get: the client's own words where these are it, since encoding again takes time by the byte."""
    if ref.key == "input_audio":
        return ref.source  # decoding it was strict
    head = f"data:{mime};base64,"
    return ref.source if ref.source.startswith(head) else head + base64.b64encode(data).decode("ascii")


def _data_url(url: str, param: str, default_mime: str, max_bytes: int) -> tuple[str, bytes]:
    header, comma, payload = url.partition(",")
    mime, *attributes = header[len("data:") :].split(";")
    if not comma or "base64" not in (attribute.strip().lower() for attribute in attributes):
        raise RequestError(
            f"{param}: a data URL must read data:<type>;base64,<data>.", param=param, code="invalid_data_url"
        )
    if not all(part.isalnum() for part in mime.replace("-", "").replace("+", "").replace(".", "").split("/")):
        mime = ""  # would otherwise be copied into the URL that the stages parse
    return mime or default_mime, _base64(payload, param, max_bytes)


def _base64(payload: str, param: str, max_bytes: int) -> bytes:
    if len(payload) * 3 // 4 > max_bytes + 2:
        raise too_large(param, max_bytes)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: invalid base64 ({error}).", param=param, code="invalid_base64") from None
